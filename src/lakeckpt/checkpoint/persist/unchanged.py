"""This module finds which slabs of a rank's share lie in storage already, so that they are referred to.

A part names files by their path, and a file that an earlier save wrote serves as well as a new file: nothing in storage
ever changes. So frozen layers, buffers, and slabs of a table that no step touched are not written again. A file stays
as long as one kept checkpoint refers to it, wherever its other slabs are. To bound that cost, a file is referred to
only while at least half of its bytes are needed; the needed slabs of other files are written again, apart from what
changed, and are referred to from then on.

Only committed parts are referred to, and only by the attempt that goes on from them: see `Earlier`. The module imports
without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import FileRecord, PartRecord, SlabRecord
from lakeckpt.checkpoint.format.verified_reads import fetch_part, fetch_register
from lakeckpt.checkpoint.persist.log import read_entry
from lakeckpt.errors import CheckpointDamaged, StorageError, WireError
from lakeckpt.lake.storage.base import Storage

__all__ = ["Earlier", "Wanted"]

Wanted = tuple[TensorSpec, bytes]
"""The spec of a slab, and the digest of its content."""

_LEAST_LIVE = 0.5
"""The part of a file's bytes that must still be referred to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The files of the last committed part of a rank, and which slabs lie in them."""

    files: tuple[FileRecord, ...] = ()
    places: Mapping[Wanted, SlabRecord] = field(default_factory=dict)
    """(spec, digest) → the slab in ``files``."""

    @classmethod
    def of(cls, part: PartRecord) -> Earlier:
        """Return the files of ``part``, which was committed."""
        places = {(slab.spec, slab.digest): slab for one in part.tensors for slab in one.slabs}
        return cls(files=part.files, places=places)

    @classmethod
    def read(cls, storage: Storage, slot: int, rank: int) -> Earlier:
        """Return the files of the part that ``rank`` wrote for the commit in ``slot``; none if it cannot be read."""
        with contextlib.suppress(WireError, CheckpointDamaged, StorageError):
            found = read_entry(storage, slot)
            if isinstance(found, Manifest) and rank < found.world_size:
                return cls.of(fetch_part(storage, found, fetch_register(storage, found), rank))
        return cls()

    def found(self, wanted: Iterable[Wanted]) -> dict[Wanted, SlabRecord]:
        """Return the ``wanted`` slabs that need not be written, with the place of each in ``files``.

        Slabs without bytes are written again: that costs nothing, and keeps no file.
        """
        by_file: defaultdict[int, list[Wanted]] = defaultdict(list)
        for one in wanted:
            if one in self.places and one[0].size_bytes:
                by_file[self.places[one].file].append(one)
        return {
            one: self.places[one]
            for file, ones in by_file.items()
            if sum(spec.size_bytes for spec, _ in ones) >= _LEAST_LIVE * self.files[file].size_bytes
            for one in ones
        }
