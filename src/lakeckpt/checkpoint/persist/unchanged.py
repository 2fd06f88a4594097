"""What of a rank's share lies in storage already?  Slabs whose content is that of the part before are referred to.

A part names files by their path, and a file that an earlier save wrote serves as well as one of its own: nothing in
storage ever changes. So frozen layers, buffers, and those slabs of a table that no step touched are not written
again. A file stays as long as one kept checkpoint refers to it, wherever its other slabs are: to bound what that
costs, a file is referred to only while at least half of its bytes are needed; what is left of the others is written
anew, apart from what changed, and will be referred to from then on.

Only what is committed is referred to, and only by the attempt that goes on from there: see `Earlier`. Pure. Imports
without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import FileRecord, PartRecord

__all__ = ["Earlier", "Wanted"]

Wanted = tuple[TensorSpec, bytes]
"""What a slab is, and the digest of its content."""

_LEAST_LIVE = 0.5
"""The part of a file's bytes that must still be referred to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The files of the last committed part of a rank, and which slabs lie in them."""

    files: tuple[FileRecord, ...] = ()
    places: Mapping[Wanted, int] = field(default_factory=dict)
    """(spec, digest) → which of ``files`` holds it."""

    @classmethod
    def of(cls, part: PartRecord) -> Earlier:
        """What ``part``, which was committed, holds."""
        places = {(slab.spec, slab.digest): slab.file for one in part.tensors for slab in one.slabs}
        return cls(files=part.files, places=places)

    def found(self, wanted: Iterable[Wanted]) -> dict[Wanted, FileRecord]:
        """Those of ``wanted`` that need not be written, with the file that holds each.

        Slabs without bytes are written anew: that costs nothing, and keeps no file.
        """
        by_file: defaultdict[int, list[Wanted]] = defaultdict(list)
        for one in wanted:
            if one in self.places and one[0].size_bytes:
                by_file[self.places[one]].append(one)
        return {
            one: self.files[file]
            for file, ones in by_file.items()
            if sum(spec.size_bytes for spec, _ in ones) >= _LEAST_LIVE * self.files[file].size_bytes
            for one in ones
        }
