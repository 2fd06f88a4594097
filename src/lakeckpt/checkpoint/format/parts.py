"""This module defines a part: the immutable record of what one rank wrote for a checkpoint, and of the files it names.

A part lists the units that its rank is responsible for. The rank wrote them in this save, or an earlier save wrote them
and they are unchanged; then the part refers to the earlier files. A unit is a tensor, or the tree of an item (its state
without the tensors, as a document), with the ranks whose state it is: one rank writes replicas that agree. A large
tensor consists of slabs, in one file or several. Digests of slabs and tensors cover the bytes of tensors, another
digest covers the head of each file, and the manifest has a digest of the record: no byte is uncovered.

The module never imports torch, and never reads or writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from lakeckpt.checkpoint.format.digests import LEAF_BYTES, short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Digest, Ranks, confined
from lakeckpt.checkpoint.format.slabs import SLAB_BYTES, slab_specs
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "OBJECTS",
    "OBJECT_NAME",
    "PARTS",
    "PART_MARK",
    "RANDOM",
    "SHARING",
    "FileRecord",
    "Outline",
    "PartRecord",
    "SaveId",
    "SlabRecord",
    "TensorRecord",
    "TreeRecord",
    "file_digest",
]

PARTS = "parts"
OBJECTS = "objects"
OBJECT_NAME = re.compile(OBJECTS + r"/[0-9]{10}/[0-9]{12}-[0-9]{6}/[0-9]+-[0-9]+-[0-9a-f]+\.safetensors", re.ASCII)
"""Matches the names that `SaveId.object_path` gives, and no others."""
RANDOM = "lakeckpt.random"
"""The name of the item that holds the random states; users' items cannot have it."""
SHARING = "lakeckpt.sharing"
"""The name of the item that records which ranks share tensors; users' items cannot have it."""
PART_MARK = "::at "
"""In the key of a part of a tensor: between the key of the tensor and the offsets of the part."""
_KIND = "part"
_VERSION = (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveId:
    """One save of one attempt, and the paths of its parts and objects. Never used twice."""

    attempt: Count
    step: Count
    """Optimizer steps done at its cut."""
    number: Count
    """How many saves the attempt had begun before it."""

    @property
    def folder(self) -> str:
        """The folder below ``parts/`` and ``objects/``."""
        return f"{self.attempt:010d}/{self.step:012d}-{self.number:06d}"

    def part_path(self, rank: int) -> str:
        """Return the path of the part of ``rank``."""
        return f"{PARTS}/{self.folder}/{rank:05d}.lkc"

    def failure_path(self, rank: int) -> str:
        """Return the path of the note by which ``rank`` aborts its part."""
        return f"{PARTS}/{self.folder}/{rank:05d}.failed"

    def object_path(self, rank: int, index: int, digest: bytes) -> str:
        """Return the path of the ``index``-th file of tensors of ``rank``."""
        return f"{OBJECTS}/{self.folder}/{rank:05d}-{index:04d}-{digest.hex()}.safetensors"


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of tensors."""

    path: Annotated[str, partial(confined, below=OBJECTS)]
    size_bytes: Positive
    head_digest: Digest
    """`short_digest` of its first bytes: length and head."""
    digest: Digest
    """`short_digest` of ``head_digest`` and the digests of its tensors, in the order of their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRecord:
    """The part of a tensor in one file: the whole tensor, or a run of its elements."""

    spec: TensorSpec
    """Name, dtype and shape in the file."""
    start: int
    """The offset of its first byte in the tensor."""
    digest: bytes
    """Of its bytes: `lakeckpt.checkpoint.format.digests.content_digest`."""
    file: int
    """The index of its file in the part."""

    @property
    def stop(self) -> int:
        """The offset behind its last byte in the tensor."""
        return self.start + self.spec.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor: its spec and digest, its slabs, and the ranks whose state it is."""

    spec: TensorSpec
    digest: bytes
    """Of its bytes: `lakeckpt.checkpoint.format.digests.content_digest`."""
    slabs: tuple[SlabRecord, ...]
    """In the order of the tensor's bytes (`lakeckpt.checkpoint.format.slabs.slab_specs`)."""
    ranks: Ranks

    def __post_init__(self) -> None:
        if len(self.slabs) == 1 and self.slabs[0].digest != self.digest:
            raise WireDamaged(f"tensor {self.spec.key!r} and the whole of it have different digests")

    @classmethod
    def of(
        cls,
        spec: TensorSpec,
        digest: bytes,
        places: Sequence[tuple[int, bytes]],
        ranks: Ranks,
        *,
        slab_bytes: int,
    ) -> TensorRecord:
        """Return the record of a tensor with slabs of ``slab_bytes``; ``places`` are (file, digest) of each slab.

        `WireDamaged` if the tensor has another number of slabs.
        """
        if len(places) != max(1, -(-spec.size_bytes // slab_bytes)):
            raise WireDamaged(f"tensor {spec.key!r} of {spec.size_bytes} bytes is said to lie in {len(places)} slabs")
        slabs = tuple(
            SlabRecord(spec=one, start=number * slab_bytes, digest=found, file=file)
            for number, (one, (file, found)) in enumerate(zip(slab_specs(spec, slab_bytes), places, strict=True))
        )
        return cls(spec=spec, digest=digest, slabs=slabs, ranks=ranks)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecord:
    """The state of an item without its tensors (``TensorRef`` stands for each), as a document of kind ``tree``."""

    item: str
    document: bytes
    digest: Digest
    ranks: Ranks


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The extent of a rank's state over all parts, by which it can be read without the parts of all ranks."""

    units: Count
    """How many units the rank's state has."""
    elsewhere: Ranks
    """The other ranks whose parts hold some of the units."""
    different: tuple[str, ...]
    """The names (``tensor:…``, ``tree:…``) of units that differ on other ranks."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorRow:
    """A tensor in the document of a part. The size of slabs gives their offsets."""

    key: str
    dtype: str
    shape: tuple[Count, ...]
    digest: Digest
    places: tuple[tuple[Count, Digest], ...]
    """For each slab, the index of its file in the part, and its digest."""
    ranks: Ranks

    @classmethod
    def of(cls, one: TensorRecord) -> _TensorRow:
        places = tuple((slab.file, slab.digest) for slab in one.slabs)
        spec = one.spec
        return cls(key=spec.key, dtype=spec.dtype, shape=spec.shape, digest=one.digest, places=places, ranks=one.ranks)

    def record(self, slab_bytes: int) -> TensorRecord:
        spec = TensorSpec(key=self.key, dtype=self.dtype, shape=self.shape)
        return TensorRecord.of(spec, self.digest, self.places, self.ranks, slab_bytes=slab_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartDocument:
    """The fields of the document of a part."""

    run: str
    save: SaveId
    rank: Count
    world_size: Positive
    cut: bytes
    files: tuple[FileRecord, ...]
    tensors: tuple[_TensorRow, ...]
    trees: tuple[TreeRecord, ...]
    slab_bytes: Positive
    outline: Outline | None

    def __post_init__(self) -> None:
        if self.slab_bytes % LEAF_BYTES:
            raise WireDamaged(f"slabs of {self.slab_bytes} bytes are no whole leaves of {LEAF_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """All that a rank wrote for one save."""

    run: str
    save: SaveId
    rank: int
    world_size: int
    cut: bytes
    """Digest of what all ranks agreed on at the cut."""
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    trees: tuple[TreeRecord, ...]
    slab_bytes: int = SLAB_BYTES
    """The size of slabs."""
    outline: Outline | None = None
    """The extent of the rank's state; None: not recorded."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise WireDamaged(f"a part of rank {self.rank} of {self.world_size}")
        if any(not 0 <= slab.file < len(self.files) for tensor in self.tensors for slab in tensor.slabs):
            raise WireDamaged(f"the part of rank {self.rank} places a tensor in a file that it does not have")
        names = [(slab.file, slab.spec.key) for tensor in self.tensors for slab in tensor.slabs]
        if len(set(names)) != len(names):
            raise WireDamaged(f"the part of rank {self.rank} has one name for two things in a file")

    def to_bytes(self) -> bytes:
        """Return the document of the part."""
        document = _PartDocument(
            tensors=tuple(map(_TensorRow.of, self.tensors)),
            **{name: getattr(self, name) for name in self.__slots__ if name != "tensors"},
        )
        return dumps(to_plain(document), kind=_KIND, version=_VERSION)

    def is_earlier(self, file: FileRecord) -> bool:
        """Return whether an earlier save wrote ``file``, which may hold tensors that this part does not refer to."""
        return not file.path.startswith(f"{OBJECTS}/{self.save.folder}/")

    def slabs_in(self, index: int) -> dict[str, tuple[TensorRecord, SlabRecord]]:
        """Return the slabs in the ``index``-th file, each with its tensor, by their names in the file."""
        return {slab.spec.key: (one, slab) for one in self.tensors for slab in one.slabs if slab.file == index}

    @classmethod
    def from_bytes(cls, data: bytes) -> PartRecord:
        """Return the part in a document of `to_bytes`. `WireError`."""
        plain = loads(data, kind=_KIND, supported=_VERSION)
        document = from_plain(_PartDocument, plain, "a part")
        return cls(
            tensors=tuple(row.record(document.slab_bytes) for row in document.tensors),
            **{name: getattr(document, name) for name in cls.__slots__ if name != "tensors"},
        )


def file_digest(head_digest: bytes, tensor_digests: list[bytes]) -> bytes:
    """Return the digest of a file of tensors, which is also in its name."""
    return short_digest(head_digest, *tensor_digests)
