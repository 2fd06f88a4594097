"""This module wraps a packed value into a document: a header, the payload, and a checksum over both.

The header names the kind of the document and the version of its format::

    offset   size   what
    0        8      magic, b"LAKECKPT"
    8        1      version of this envelope, 1
    9        1      k, the length of the kind
    10       2      format version, major (big-endian, as all numbers here)
    12       2      format version, minor
    14       2      1 if the payload is compressed (zlib), else 0
    16       8      n, the length of the payload
    24       k      kind, ASCII
    24+k     n      payload, one msgpack value (see ``values``)
    24+k+n   16     BLAKE2b-128 of every byte before

Magic and checksum keep their places in every version of the envelope, so that a reader can distinguish damage from a
newer format. A reader refuses a newer *major* version by name; a newer *minor* version is read as far as the fields are
known (`lakeckpt.wire.documents` refuses others by name). The checksum notices accidents, not forgery.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from lakeckpt.errors import NewerFormat, WireDamaged
from lakeckpt.wire.values import Payload, TensorRef, join_payloads, pack, unpack

__all__ = [
    "CHECKSUM_BYTES",
    "MAGIC",
    "Payload",
    "TensorRef",
    "dumps",
    "dumps_map",
    "loads",
]

MAGIC = b"LAKECKPT"
CHECKSUM_BYTES = 16
_ENVELOPE = 1
_HEADER = struct.Struct(">8sBBHHHQ")
_SMALL_BYTES = 1024


def dumps(value: object, *, kind: str, version: tuple[int, int], root: str = "", compress: bool = False) -> bytes:
    """Return the document of ``value``. Equal values, with dicts in equal order, give equal bytes.

    ``kind`` (a short ASCII name) and ``version`` (major, minor) name the format of the value. Paths in messages begin
    with ``root``. ``compress``: a payload of more than 1 KiB is compressed; the states of many readers are much alike.

    Raises `UnsupportedValue` naming the path of a value outside the closed list of types, or too deep.
    """
    payload = pack(value, root=root)
    is_large = compress and len(payload) > _SMALL_BYTES
    return _document(zlib.compress(payload) if is_large else payload, kind=kind, version=version, flags=int(is_large))


def dumps_map(payloads: Mapping[str, Payload], *, kind: str, version: tuple[int, int]) -> bytes:
    """Return the document of a dict, the same bytes as `dumps` makes. `lakeckpt.wire.values.pack` packed its values."""
    return _document(join_payloads(payloads), kind=kind, version=version)


def _document(payload: bytes, *, kind: str, version: tuple[int, int], flags: int = 0) -> bytes:
    name = kind.encode("ascii")
    head = _HEADER.pack(MAGIC, _ENVELOPE, len(name), *version, flags, len(payload)) + name
    checksum = blake2b(head, digest_size=CHECKSUM_BYTES)
    checksum.update(payload)
    return b"".join((head, payload, checksum.digest()))


def loads(data: bytes | bytearray | memoryview, *, kind: str, supported: tuple[int, int]) -> Any:
    """Return the value of a document, verified. ``supported``: the newest (major, minor) version that the caller reads.

    Arrays are writable and share nothing with ``data``.

    Raises `WireDamaged` (not ours, truncated, altered, or of another kind), `NewerFormat` (a newer major version) and
    `UnsupportedValue` (a tag that this version does not know).
    """
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    _verify(view, kind)
    _, envelope, name_bytes, major, minor, flags, payload_bytes = _HEADER.unpack_from(view)
    if envelope != _ENVELOPE:
        raise NewerFormat(
            f"this {kind} document has envelope version {envelope} and this lakeckpt reads {_ENVELOPE}: "
            "upgrade lakeckpt to read it"
        )
    start = _HEADER.size + name_bytes
    if flags not in (0, 1) or len(view) != start + payload_bytes + CHECKSUM_BYTES:
        raise WireDamaged(f"this {kind} document has {len(view)} bytes, and its header does not fit: restore the file")
    found = bytes(view[_HEADER.size : start])
    if found != kind.encode("ascii"):
        raise WireDamaged(f"expected a {kind} document and found one of kind {found!r}: a file is in another's place")
    if major > supported[0]:
        raise NewerFormat(
            f"this {kind} document has format {major}.{minor} and this lakeckpt reads up to {supported[0]}.x: "
            "upgrade lakeckpt to read it"
        )
    payload = view[start : start + payload_bytes]
    if flags:
        try:
            payload = memoryview(zlib.decompress(payload))
        except zlib.error as error:
            raise WireDamaged(f"this {kind} document cannot be decompressed ({error}): restore the file") from None
    return unpack(payload, what=f"{kind} document")


def _verify(view: memoryview, kind: str) -> None:
    """Refuse a document that is not ours, is cut short, or was altered: in this order, for the clearest message."""
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)] or not len(view):
        raise WireDamaged(
            f"expected a {kind} document and found {bytes(view[: len(MAGIC)])!r} at its start, not {MAGIC!r}"
        )
    if len(view) < _HEADER.size + CHECKSUM_BYTES:
        raise WireDamaged(f"this {kind} document is cut short: {len(view)} bytes are less than a header")
    end = len(view) - CHECKSUM_BYTES
    if blake2b(view[:end], digest_size=CHECKSUM_BYTES).digest() == bytes(view[end:]):
        return
    _, _, name_bytes, _, _, _, payload_bytes = _HEADER.unpack_from(view)
    expected = _HEADER.size + name_bytes + payload_bytes + CHECKSUM_BYTES
    if expected != len(view):
        raise WireDamaged(f"this {kind} document is damaged: it has {len(view)} bytes and its header states {expected}")
    raise WireDamaged(f"this {kind} document is damaged: its checksum is not that of its {len(view)} bytes")
