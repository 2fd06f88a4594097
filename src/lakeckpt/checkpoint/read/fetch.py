"""This module reads the records of a checkpoint's parts, and its other objects, and distinguishes damage from failures.

An object that is missing, too short, too long or altered raises `CheckpointDamaged` with its path. So does a read error
of the medium (EIO). Any other failure of the store is raised unchanged: falling back to an older checkpoint because of
a network error would lose work, and nobody would notice. The module ``ranged`` reads the files of tensors.

The module never writes, never imports torch, and starts no threads.
"""

from __future__ import annotations

import errno

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.manifest import Manifest, PartRef
from lakeckpt.checkpoint.format.parts import PartRecord
from lakeckpt.errors import CheckpointDamaged, ObjectMissing, StorageError, UnsupportedValue, WireDamaged
from lakeckpt.lake.storage.base import Storage

__all__ = ["fetch_part", "read_object"]


def read_object(storage: Storage, path: str, start: int = 0, stop: int | None = None) -> bytes:
    """Return bytes of an object of a checkpoint. `CheckpointDamaged` if it is missing or the medium cannot read it."""
    try:
        return storage.read(path, start, stop)
    except ObjectMissing:
        raise CheckpointDamaged(f"{path}: the object is missing") from None
    except StorageError as error:
        if error.errno == errno.EIO:
            raise CheckpointDamaged(f"{path}: the medium cannot read it: {error}") from error
        raise


def fetch_part(storage: Storage, manifest: Manifest, ref: PartRef) -> PartRecord:
    """Return the record of a part that ``manifest`` names, verified against the manifest. `CheckpointDamaged`."""
    data = read_object(storage, ref.path)
    if len(data) != ref.size_bytes or short_digest(data) != ref.digest:
        raise CheckpointDamaged(
            f"{ref.path}: the part of rank {ref.rank} is not what slot {manifest.slot} committed "
            f"({len(data)} bytes, expected {ref.size_bytes})"
        )
    try:
        part = PartRecord.from_bytes(data)
    except (WireDamaged, UnsupportedValue) as error:
        raise CheckpointDamaged(f"{ref.path}: {error}") from error
    if (part.rank, part.save, part.cut, part.run) != (ref.rank, manifest.save, manifest.cut, manifest.run):
        raise CheckpointDamaged(f"{ref.path}: this is a part of another checkpoint than slot {manifest.slot}")
    return part
