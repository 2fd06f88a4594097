"""This module reads objects of a checkpoint, verifies every byte, and tells damage from failures of the store.

An object that is missing, too short, too long or altered raises `CheckpointDamaged` with its path. So does a read error
of the medium (EIO). Any other failure of the store is raised unchanged: falling back to an older checkpoint because of
a network error would lose work, and nobody would notice.

`fetch_register` reads the register of a checkpoint, and `fetch_part` the record of a part, which names the place of
each slab. `open_files` verifies the heads and sizes of files of tensors. `read_slabs` reads slabs with several threads
straight into the memory that the caller names; adjacent small slabs are read together. A slab for which the caller
names no memory is verified all the same. After an error the caller's memory may hold anything.

Each call starts and joins its own threads. The module never writes, and never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from lakeckpt.checkpoint.format.digests import content_digest, short_digest
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import PartRecord, SlabRecord, TensorRecord
from lakeckpt.checkpoint.format.register import Register
from lakeckpt.checkpoint.format.slabs import SLAB_BYTES
from lakeckpt.errors import CheckpointDamaged, ObjectMissing, StorageError, UnsupportedValue, WireDamaged
from lakeckpt.lake.storage.base import Storage

__all__ = ["StoredSlab", "fetch_part", "fetch_register", "open_files", "read_object", "read_slabs", "verify_file"]

_THREADS = 8


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """Raise what shows damage of the object at ``path`` as `CheckpointDamaged`."""
    try:
        yield
    except ObjectMissing:
        raise CheckpointDamaged(f"{path}: the object is missing") from None
    except StorageError as error:
        if error.errno == errno.EIO:
            raise CheckpointDamaged(f"{path}: the medium cannot read it: {error}") from error
        raise


def read_object(storage: Storage, path: str, start: int = 0, stop: int | None = None) -> bytes:
    """Return bytes of an object of a checkpoint. `CheckpointDamaged` if it is missing or the medium cannot read it."""
    with _damage(path):
        return storage.read(path, start, stop)


def fetch_register(storage: Storage, manifest: Manifest) -> Register:
    """Return the register of the checkpoint of ``manifest``, verified. `CheckpointDamaged`."""
    path = manifest.save.register_path
    data = read_object(storage, path)
    if short_digest(data) != manifest.register:
        raise CheckpointDamaged(f"{path}: the register is not what slot {manifest.slot} committed")
    try:
        return Register.from_bytes(data)
    except (WireDamaged, UnsupportedValue) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


def fetch_part(storage: Storage, manifest: Manifest, register: Register, rank: int) -> PartRecord:
    """Return the record of the part of ``rank``, verified against the ``register`` of ``manifest``.
    `CheckpointDamaged`."""
    path = manifest.save.part_path(rank)
    data = read_object(storage, path)
    if short_digest(data) != register.digest(rank):
        raise CheckpointDamaged(f"{path}: the part of rank {rank} is not what slot {manifest.slot} committed")
    try:
        part = PartRecord.from_bytes(data)
    except (WireDamaged, UnsupportedValue) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error
    if (part.rank, part.save, part.cut, part.run) != (rank, manifest.save, manifest.cut, manifest.run):
        raise CheckpointDamaged(f"{path}: this is a part of another checkpoint than slot {manifest.slot}")
    return part


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlab:
    """A slab of a tensor, and the object that holds it."""

    tensor: TensorRecord
    slab: SlabRecord
    path: str

    @property
    def start(self) -> int:
        """The byte of the object at which the slab begins."""
        return self.slab.at

    @property
    def stop(self) -> int:
        """The byte of the object behind the slab's last byte."""
        return self.slab.at + self.slab.spec.size_bytes

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
    if short_digest(read_object(storage, file.path, 0, file.head_bytes)) != file.head_digest:
        raise CheckpointDamaged(f"{file.path}: its head is not what was written")
    # The last byte must be there, and none behind it.
    if len(read_object(storage, file.path, file.size_bytes - 1, file.size_bytes + 1)) != 1:
        raise CheckpointDamaged(f"{file.path}: it does not have the {file.size_bytes} bytes that were written")
    return [
        StoredSlab(tensor=tensor, slab=slab, path=file.path)
        for tensor in part.tensors
        for slab in tensor.slabs
        if slab.file == index
    ]


def verify_file(storage: Storage, part: PartRecord, index: int) -> None:
    """Read and verify the tensors of ``part`` in its ``index``-th file, on one thread besides the caller's."""
    read_slabs(storage, _open_file(storage, part, index), {}, threads=1)


def read_slabs(
    storage: Storage, slabs: Sequence[StoredSlab], into: Mapping[str, memoryview], *, threads: int = _THREADS
) -> None:
    """Read and verify ``slabs``; each goes to its place in the memory (uint8) that ``into`` names for its tensor."""
    with ThreadPoolExecutor(threads, thread_name_prefix="lakeckpt-read") as pool:
        jobs = [pool.submit(_read_run, storage, run, into) for run in _runs(slabs)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def _runs(slabs: Sequence[StoredSlab]) -> Iterator[list[StoredSlab]]:
    """Yield runs of adjacent slabs, together no longer than the largest slab may be."""
    ordered = sorted(slabs, key=lambda one: (one.path, one.start, one.stop))
    run = ordered[:1]
    for before, one in pairwise(ordered):
        if one.path == before.path and one.start == before.stop and one.stop - run[0].start <= SLAB_BYTES:
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
            raise CheckpointDamaged(f"{path}: the bytes of tensor {one.slab.spec.key!r} are not what was written")
        target = one.target(into)
        if target is not None and alone is None:
            target[:] = view


def _read_range(storage: Storage, path: str, start: int, stop: int, target: memoryview | None) -> memoryview:
    """Return bytes of an object, in ``target`` if it is given. A store that cannot read into memory costs a copy."""
    if start == stop:
        return memoryview(b"")
    read_into = getattr(storage, "read_into", None)
    if target is not None and callable(read_into):
        with _damage(path):
            count = read_into(path, start, target)
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
