"""This module defines a part: the immutable record of what one rank wrote for a checkpoint, and of the files it names.

A part lists the units of which its rank took care: it wrote them, now or, where they are unchanged, in an earlier save,
whose files it refers to. A unit is a tensor, or the tree of an item (its state without the tensors, as a document),
with the ranks whose state it is: replicas that agree are written once, by one of them. A large tensor lies in slabs, in
as many files as it may be (``slabs``). A tensor's bytes are covered by its own digest and those of its slabs, the head
of a file by another; the record itself by its checksum and, in the manifest, its digest: no byte is uncovered.

Imports without torch, and never reads or writes by itself.
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
"""The names that `SaveId.object_path` gives, and nobody else's."""
RANDOM = "lakeckpt.random"
"""The name of the item that holds the random states; users' items cannot have it."""
SHARING = "lakeckpt.sharing"
"""The name of the item that says which ranks share tensors (``sharing``); users' items cannot have it."""
PART_MARK = "::at "
"""In the key of a tensor that is a part of a larger one: behind the larger one's key, before where it begins."""
_KIND = "part"
_VERSION = (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveId:
    """One attempt's one save: where its parts and objects lie. Never used twice."""

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
        """Where ``rank`` publishes its part."""
        return f"{PARTS}/{self.folder}/{rank:05d}.lkc"

    def failure_path(self, rank: int) -> str:
        """Where ``rank`` says that it will not publish its part."""
        return f"{PARTS}/{self.folder}/{rank:05d}.failed"

    def object_path(self, rank: int, index: int, digest: bytes) -> str:
        """Where ``rank`` puts its ``index``-th file of tensors."""
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
    """What of a tensor lies in a file: all of it, or a run of its elements."""

    spec: TensorSpec
    """What the file says of it."""
    start: int
    """The byte of the tensor at which it begins."""
    digest: bytes
    """Of its bytes: `lakeckpt.checkpoint.format.digests.content_digest`."""
    file: int
    """Which of the part's files holds it."""

    @property
    def stop(self) -> int:
        """Behind its last byte, in the tensor."""
        return self.start + self.spec.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor: what it is, where it lies, and whose state it is."""

    spec: TensorSpec
    digest: bytes
    """Of its bytes: `lakeckpt.checkpoint.format.digests.content_digest`."""
    slabs: tuple[SlabRecord, ...]
    """In the order of its bytes: what `lakeckpt.checkpoint.format.slabs.slab_specs` makes of it."""
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
        """The record of a tensor whose slabs of ``slab_bytes`` lie in these files, and have these digests.

        `WireDamaged` where it has not as many slabs.
        """
        if len(places) != max(1, -(-spec.size_bytes // slab_bytes)):  # before anything is made of a size that is a lie
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
    """How many units it has."""
    elsewhere: Ranks
    """The other ranks in whose parts some of them are."""
    different: tuple[str, ...]
    """The names (``tensor:…``, ``tree:…``) of those of which other ranks have other contents."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorRow:
    """A tensor, as the document of a part holds it: where its slabs begin follows from their size."""

    key: str
    dtype: str
    shape: tuple[Count, ...]
    digest: Digest
    places: tuple[tuple[Count, Digest], ...]
    """Of each slab: which of the part's files holds it, and its digest."""
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
    """How its tensors are cut."""
    outline: Outline | None = None
    """Of what the state of its rank consists; None: that was not said."""

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
        """Whether an earlier save wrote ``file``: it may hold tensors that this part has no use for."""
        return not file.path.startswith(f"{OBJECTS}/{self.save.folder}/")

    def slabs_in(self, index: int) -> dict[str, tuple[TensorRecord, SlabRecord]]:
        """name in the file → what of which tensor is meant to lie in the ``index``-th of its files."""
        return {slab.spec.key: (one, slab) for one in self.tensors for slab in one.slabs if slab.file == index}

    @classmethod
    def from_bytes(cls, data: bytes) -> PartRecord:
        """The part that `to_bytes` made ``data`` of; `WireError` where it is none."""
        plain = loads(data, kind=_KIND, supported=_VERSION).value
        document = from_plain(_PartDocument, plain, "a part")
        return cls(
            tensors=tuple(row.record(document.slab_bytes) for row in document.tensors),
            **{name: getattr(document, name) for name in cls.__slots__ if name != "tensors"},
        )


def file_digest(head_digest: bytes, tensor_digests: list[bytes]) -> bytes:
    """The digest of a file of tensors, which also names it."""
    return short_digest(head_digest, *tensor_digests)
