"""This module reads the tensors of a checkpoint in ranges, several at once, straight to their destination.

The head and size of each file are read first; the head gives the places of the slabs. Then several threads read large
slabs piece by piece, and small slabs together, into the memory that the caller names. There is no copy of a file or of
the state in between. A slab for which the caller names no memory is verified all the same; `verify_file` names none. An
object that is missing, too short, too long or altered raises `CheckpointDamaged` with its path; the caller's memory may
hold anything then.

Each call starts and joins its own threads. The module never imports torch.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from lakeckpt.checkpoint.format.digests import (
    LEAF_BYTES,
    PIECE_BYTES,
    content_digest,
    digest_of_leaves,
    leaf_digests,
    short_digest,
)
from lakeckpt.checkpoint.format.parts import PartRecord, SlabRecord, TensorRecord, file_digest
from lakeckpt.checkpoint.format.tensor_file import FileLayout, parse_head, read_head_length
from lakeckpt.checkpoint.read.fetch import read_object
from lakeckpt.errors import CheckpointDamaged, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import Storage

__all__ = ["StoredSlab", "open_files", "read_slabs", "verify_file"]

_THREADS = 8
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlab:
    """A slab of a part, and the byte of its object at which it begins."""

    tensor: TensorRecord
    slab: SlabRecord
    path: str
    start: int

    @property
    def stop(self) -> int:
        """The byte of the object behind the slab's last byte."""
        return self.start + self.slab.spec.size_bytes

    def target(self, into: Mapping[str, memoryview]) -> memoryview | None:
        """Return the slab's part of the whole tensor's memory in ``into``; None if the tensor is not in ``into``."""
        whole = into.get(self.tensor.spec.key)
        return None if whole is None else whole[self.slab.start : self.slab.stop]


def open_files(storage: Storage, files: Iterable[tuple[PartRecord, int]]) -> list[StoredSlab]:
    """Return the slabs of ``files`` (a part and the number of one of its files), and verify heads and sizes."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lakeckpt-open") as pool:
        jobs = [pool.submit(_open_file, storage, part, index) for part, index in files]
        return [one for job in jobs for one in job.result()]


def _open_file(storage: Storage, part: PartRecord, index: int) -> list[StoredSlab]:
    file = part.files[index]
    first = read_object(storage, file.path, 0, min(_HEAD_BYTES, file.size_bytes))
    length = read_head_length(first, path=file.path)
    if length > file.size_bytes:
        raise CheckpointDamaged(f"{file.path}: its head claims {length} bytes and it has {file.size_bytes}")
    head = first[:length]
    if length > len(first):
        head += read_object(storage, file.path, len(first), length)
    if short_digest(head) != file.head_digest:
        raise CheckpointDamaged(f"{file.path}: its head is not what was written")
    # The last byte must be there, and none behind it.
    if len(read_object(storage, file.path, file.size_bytes - 1, file.size_bytes + 1)) != 1:
        raise CheckpointDamaged(f"{file.path}: it does not have the {file.size_bytes} bytes that were written")
    layout = parse_head(head, path=file.path, size_bytes=file.size_bytes)
    found = _match(layout, part.slabs_in(index), file.path, some=part.is_earlier(file))
    digests = [place[1].digest for place in found if place is not None]
    if len(digests) == len(layout.slabs) and file_digest(file.head_digest, digests) != file.digest:
        raise CheckpointDamaged(f"{file.path}: its tensors are not in the order that was written")
    return [
        StoredSlab(tensor=place[0], slab=place[1], path=file.path, start=slab.start)
        for slab, place in zip(layout.slabs, found, strict=True)
        if place is not None
    ]


_Place = tuple[TensorRecord, SlabRecord]


def _match(found: FileLayout, records: Mapping[str, _Place], path: str, *, some: bool) -> Sequence[_Place | None]:
    """Return the record of each slab, in the order of their bytes; head and record must agree.

    ``some``: the part uses only some of the slabs; the others have no record.
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
    return [records.get(slab.key) for slab in found.slabs]


def verify_file(storage: Storage, part: PartRecord, index: int) -> None:
    """Read and verify the tensors of ``part`` in its ``index``-th file, on one thread besides the caller's."""
    read_slabs(storage, _open_file(storage, part, index), {}, threads=1)


def read_slabs(
    storage: Storage, slabs: Sequence[StoredSlab], into: Mapping[str, memoryview], *, threads: int = _THREADS
) -> None:
    """Read and verify ``slabs``; each goes to its place in the memory (uint8) that ``into`` names for its tensor."""
    with ThreadPoolExecutor(threads, thread_name_prefix="lakeckpt-read") as pool:
        jobs = [pool.submit(work) for work in _works(storage, slabs, into)]
        try:
            pieces = [job.result() for job in jobs]
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    found: dict[int, list[bytes]] = {}
    for number, digest in filter(None, pieces):
        found.setdefault(number, []).append(digest)
    for one in slabs:
        if id(one) in found and digest_of_leaves(found[id(one)]) != one.slab.digest:
            raise _altered(one)


_Piece = tuple[int, bytes] | None
_Work = Callable[[], _Piece]
"""Reads bytes. Returns the slab and the digest of the piece that it read; None if it has verified the bytes itself."""


def _works(storage: Storage, slabs: Sequence[StoredSlab], into: Mapping[str, memoryview]) -> Iterator[_Work]:
    for run in _runs(slabs):
        if len(run) > 1 or run[0].stop - run[0].start <= PIECE_BYTES:
            yield lambda run=run: _read_run(storage, run, into)  # type: ignore[misc]
            continue
        (one,) = run
        for at in range(one.start, one.stop, PIECE_BYTES):
            stop = min(at + PIECE_BYTES, one.stop)
            yield lambda one=one, at=at, stop=stop: _read_piece(storage, one, at, stop, into)  # type: ignore[misc]


def _runs(slabs: Sequence[StoredSlab]) -> Iterator[list[StoredSlab]]:
    """Yield runs of adjacent slabs, together no longer than a piece. A larger slab is a run of its own."""
    ordered = sorted(slabs, key=lambda one: (one.path, one.start, one.stop))
    run = ordered[:1]
    for before, one in pairwise(ordered):
        if one.path == before.path and one.start == before.stop and one.stop - run[0].start <= PIECE_BYTES:
            run.append(one)
        else:
            yield run
            run = [one]
    if run:
        yield run


def _read_run(storage: Storage, run: list[StoredSlab], into: Mapping[str, memoryview]) -> None:
    path, start, stop = run[0].path, run[0].start, run[-1].stop
    alone = run[0].target(into) if len(run) == 1 else None
    data = _read_range(storage, path, start, stop, alone)
    for one in run:
        view = data[one.start - start : one.stop - start]
        if content_digest(view) != one.slab.digest:
            raise _altered(one)
        target = one.target(into)
        if target is not None and alone is None:
            target[:] = view


def _read_piece(storage: Storage, one: StoredSlab, at: int, stop: int, into: Mapping[str, memoryview]) -> _Piece:
    target = one.target(into)
    part = None if target is None else target[at - one.start : stop - one.start]
    return id(one), leaf_digests(_read_range(storage, one.path, at, stop, part), LEAF_BYTES)


def _read_range(storage: Storage, path: str, start: int, stop: int, target: memoryview | None) -> memoryview:
    """Return bytes of an object, in ``target`` if it is given. A store that cannot read into memory costs a copy."""
    if start == stop:
        return memoryview(b"")
    read_into = getattr(storage, "read_into", None)
    if target is not None and callable(read_into):
        try:
            count = read_into(path, start, target)
        except ObjectMissing:
            raise CheckpointDamaged(f"{path}: the object is missing") from None
        except StorageError as error:
            if error.errno == errno.EIO:
                raise CheckpointDamaged(f"{path}: the medium cannot read it: {error}") from error
            raise
        view = target
    else:
        data = read_object(storage, path, start, stop)
        count, view = len(data), memoryview(data)
        if target is not None and count == len(target):
            target[:] = view
            view = target
    if count != stop - start:
        raise CheckpointDamaged(f"{path}: it ends at byte {start + count}, inside of what was written")
    return view


def _altered(one: StoredSlab) -> CheckpointDamaged:
    return CheckpointDamaged(f"{one.path}: the bytes of tensor {one.slab.spec.key!r} are not what was written")
