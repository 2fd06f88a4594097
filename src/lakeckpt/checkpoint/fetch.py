"""Are the bytes of a checkpoint what was written?  Reads records and files of tensors, and verifies every byte.

A file of tensors is read in spans, head first: size, head and every slab's digest must be those of the part's record,
wherever the bytes go (into the caller's buffers, or nowhere). Of a file that an earlier save wrote, the slabs that
the part has no use for are passed over. What is missing, cut short, longer or altered is `CheckpointDamaged`, with the
path; so is a read error of the medium (EIO). Any other failure of the store is no damage and goes through as it is:
falling back to an older checkpoint because of a network error would lose work silently.

Imports without torch. Never writes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence

from lakeckpt.checkpoint.digests import ContentDigest, short_digest
from lakeckpt.checkpoint.manifest import Manifest, PartRef
from lakeckpt.checkpoint.parts import PartRecord, SlabRecord, TensorRecord, file_digest
from lakeckpt.checkpoint.tensor_file import FileLayout, parse_head, read_head_length
from lakeckpt.errors import CheckpointDamaged, LimitExceeded, ObjectMissing, StorageError, UnsupportedValue, WireDamaged
from lakeckpt.lake.storage import Storage

__all__ = ["fetch_file", "fetch_part", "match_slabs", "read_object"]

SPAN_BYTES = 32 * 2**20


def read_object(storage: Storage, path: str, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes of an object of a checkpoint; `CheckpointDamaged` where it is missing or the medium cannot read it."""
    try:
        return storage.read(path, start, stop)
    except ObjectMissing:
        raise CheckpointDamaged(f"{path}: the object is missing") from None
    except StorageError as error:
        if error.errno == errno.EIO:
            raise CheckpointDamaged(f"{path}: the medium cannot read it: {error}") from error
        raise


def fetch_part(storage: Storage, manifest: Manifest, ref: PartRef) -> PartRecord:
    """The record of a part that ``manifest`` names, verified against it."""
    data = read_object(storage, ref.path)
    if len(data) != ref.size_bytes or short_digest(data) != ref.digest:
        raise CheckpointDamaged(
            f"{ref.path}: the part of rank {ref.rank} is not what slot {manifest.slot} committed "
            f"({len(data)} bytes, expected {ref.size_bytes})"
        )
    try:
        part = PartRecord.from_bytes(data)
    except (WireDamaged, UnsupportedValue, LimitExceeded) as error:
        raise CheckpointDamaged(f"{ref.path}: {error}") from error
    if (part.rank, part.save, part.cut, part.run) != (ref.rank, manifest.save, manifest.cut, manifest.run):
        raise CheckpointDamaged(f"{ref.path}: this is a part of another checkpoint than slot {manifest.slot}")
    return part


def fetch_file(storage: Storage, part: PartRecord, index: int, *, into: Mapping[str, memoryview]) -> None:
    """Read and verify a file of tensors; each tensor named in ``into`` goes into that buffer (uint8, of its size).

    Buffers may hold anything when `CheckpointDamaged` is raised.
    """
    file = part.files[index]
    stream = _Stream(storage, file.path, file.size_bytes)
    head = _head(stream, file.path)
    if short_digest(head) != file.head_digest:
        raise CheckpointDamaged(f"{file.path}: its head is not what was written")
    found = parse_head(head, path=file.path, size_bytes=file.size_bytes)
    digests = []
    some = part.is_earlier(file)
    for size_bytes, place in match_slabs(found, part.slabs_in(index), file.path, some=some):
        if place is None:
            stream.skip(size_bytes)
            continue
        record, slab = place
        digest = ContentDigest(record.algorithm)
        target, at = into.get(record.spec.key), slab.start
        for run in stream.runs(size_bytes):
            digest.update(run)
            if target is not None:
                target[at : at + len(run)] = run
            at += len(run)
        if digest.digest() != slab.digest:
            raise CheckpointDamaged(f"{file.path}: the bytes of tensor {slab.spec.key!r} are not what was written")
        digests.append(slab.digest)
    stream.finish()
    if len(digests) == len(found.slabs) and file_digest(file.head_digest, digests) != file.digest:
        raise CheckpointDamaged(f"{file.path}: its tensors are not in the order that was written")


_Place = tuple[TensorRecord, SlabRecord]


def match_slabs(
    found: FileLayout, records: Mapping[str, _Place], path: str, *, some: bool
) -> Sequence[tuple[int, _Place | None]]:
    """The size and the record of each slab, in the order of their bytes; refused where head and record differ.

    ``some``: the part has a use for some of the slabs only; the others have no record.
    """
    held = {slab.key for slab in found.slabs}
    if not records.keys() <= held or (held != records.keys() and not some):
        raise CheckpointDamaged(f"{path}: it holds other tensors than its part's record says")
    for slab in found.slabs:
        if slab.key not in records:
            continue
        spec = records[slab.key][1].spec
        if (slab.code, slab.shape) != (spec.code, spec.stored_shape):
            raise CheckpointDamaged(f"{path}: tensor {slab.key!r} is {slab.code} {slab.shape}, not as its record says")
    return [(slab.stop - slab.start, records.get(slab.key)) for slab in found.slabs]


def _head(stream: _Stream, path: str) -> bytes:
    first = b"".join(stream.runs(8))
    rest = read_head_length(first, path=path) - 8
    return first + b"".join(stream.runs(rest))


class _Stream:
    """The bytes of an object from the first to the last, in spans."""

    __slots__ = ("_at", "_buffer", "_path", "_size_bytes", "_storage")

    def __init__(self, storage: Storage, path: str, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._size_bytes = size_bytes
        self._at = 0
        self._buffer = memoryview(b"")

    def runs(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes, as runs of any length."""
        while count:
            if not len(self._buffer):
                self._fill()
            run = self._buffer[:count]
            self._buffer = self._buffer[len(run) :]
            count -= len(run)
            yield run

    def _fill(self) -> None:
        stop = min(self._at + SPAN_BYTES, self._size_bytes)
        last = stop == self._size_bytes
        # At the end, one byte more is asked for: it must not be there.
        data = read_object(self._storage, self._path, self._at, stop + last)
        if len(data) != stop - self._at or not data:
            raise CheckpointDamaged(
                f"{self._path}: it has {'more' if self._at + len(data) > stop else 'less'} than the "
                f"{self._size_bytes} bytes that were written"
            )
        self._at = stop
        self._buffer = memoryview(data)

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` bytes: they are read only where they are the end of the object."""
        held = min(count, len(self._buffer))
        self._buffer = self._buffer[held:]
        count -= held
        if count and self._at + count == self._size_bytes:
            self._at, count = self._size_bytes - 1, 1  # the last byte tells whether it is as long as was written
            self._fill()
            self._buffer = self._buffer[count:]
        else:
            self._at += count

    def finish(self) -> None:
        """Refuse what was left unread."""
        if len(self._buffer) or self._at != self._size_bytes:
            raise CheckpointDamaged(f"{self._path}: it holds more than its tensors")
