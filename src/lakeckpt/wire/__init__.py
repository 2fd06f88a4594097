"""Bytes that last: versioned, checksummed msgpack over a closed list of types. ``codec`` is the way in."""
