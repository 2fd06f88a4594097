"""Documents as an attacker would make them: any payload, under a header and checksum that are right."""

from __future__ import annotations

import struct
from hashlib import blake2b

KIND = "thing"
VERSION = (1, 0)


def sealed(payload: bytes, *, kind: str = KIND, version: tuple[int, int] = VERSION, envelope: int = 1) -> bytes:
    name = kind.encode("ascii")
    head = struct.pack(">8sBBHHHQ", b"LAKECKPT", envelope, len(name), *version, 0, len(payload)) + name
    return resealed(head + payload)


def resealed(body: bytes) -> bytes:
    """``body`` with the checksum that fits it."""
    return body + blake2b(body, digest_size=16).digest()
