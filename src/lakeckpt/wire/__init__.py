"""This package writes documents: versioned, checksummed msgpack of a closed list of types. `envelope` is the way in.

::

    dataclass → [documents] → plain values → [envelope] → bytes: kind, version, payload, checksum
                                                 |
                                             [values]: msgpack of the payload, every type as it was

    Bytes are read the same way back; what does not fit is refused with the path to the field.
"""
