"""This package writes documents: versioned, checksummed msgpack of a closed list of types. `envelope` is the way in."""
