"""What did one rank write for a checkpoint?  Its part: an immutable record, and the objects that it names.

A part lists the units of which its rank took care: it wrote them, now or, where they are unchanged, in an earlier save,
whose files it refers to. A unit is a tensor, or the tree of an item (its state without the tensors, as a document),
with the ranks whose state it is: replicas that agree are written once, by one of them. A large tensor lies in slabs, in
as many files as it may be (``slabs``). A tensor's bytes are covered by its own digest and those of its slabs, the head
of a file by another; the record itself by its checksum and, in the manifest, its digest: no byte is uncovered.

Imports without torch, and never reads or writes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.checkpoint.digests import CURRENT, DIGEST_BYTES, LEAF_BYTES, Algorithm, short_digest
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fields import Ranks, confined, fields_of, number, ranks_of, taken
from lakeckpt.checkpoint.slabs import SLAB_BYTES, slab_specs
from lakeckpt.core.skips import SkipList
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.skips import skips_from_wire, skips_to_wire

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
# 1.1: "skips"; 2.0: contents digested by XXH3, files of earlier saves, of which it may need some only; parts of tensors
# 3.0: large tensors in slabs; 3.1: "sharing"; 3.2: "outline"
_VERSION = (3, 2)
_UNCUT_BYTES = 2**62
"""The size of slabs before version 3: no tensor was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveId:
    """One attempt's one save: where its parts and objects lie. Never used twice."""

    attempt: int
    step: int
    """Optimizer steps done at its cut."""
    number: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of tensors."""

    path: str
    size_bytes: int
    head_digest: bytes
    """`short_digest` of its first bytes: length and head."""
    digest: bytes
    """`short_digest` of ``head_digest`` and the digests of its tensors, in the order of their bytes."""

    def __post_init__(self) -> None:
        _check_digests(self.head_digest, self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRecord:
    """What of a tensor lies in a file: all of it, or a run of its elements."""

    spec: TensorSpec
    """What the file says of it."""
    start: int
    """The byte of the tensor at which it begins."""
    digest: bytes
    """Of its bytes: `lakeckpt.checkpoint.digests.content_digest`."""
    file: int
    """Which of the part's files holds it."""

    def __post_init__(self) -> None:
        _check_digests(self.digest)

    @property
    def stop(self) -> int:
        """Behind its last byte, in the tensor."""
        return self.start + self.spec.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor: what it is, where it lies, and whose state it is."""

    spec: TensorSpec
    digest: bytes
    """Of its bytes: `lakeckpt.checkpoint.digests.content_digest`."""
    slabs: tuple[SlabRecord, ...]
    """In the order of its bytes: what `lakeckpt.checkpoint.slabs.slab_specs` makes of it."""
    ranks: Ranks
    algorithm: Algorithm = CURRENT
    """How digests were made: the same for all tensors of a part."""

    def __post_init__(self) -> None:
        _check_digests(self.digest)
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
        algorithm: Algorithm = CURRENT,
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
        return cls(spec=spec, digest=digest, slabs=slabs, ranks=ranks, algorithm=algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecord:
    """The state of an item without its tensors (``TensorRef`` stands for each), as a document of kind ``tree``."""

    item: str
    document: bytes
    digest: bytes
    ranks: Ranks

    def __post_init__(self) -> None:
        _check_digests(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Of what the state of a rank consists, in whichever parts: so that it can be read without those of all ranks."""

    units: int
    """How many units it has."""
    elsewhere: Ranks
    """The other ranks in whose parts some of them are."""
    different: tuple[str, ...]
    """The names (``tensor:…``, ``tree:…``) of those of which other ranks have other contents."""

    def to_plain(self) -> list[Any]:
        """As a part holds it."""
        return [self.units, _lists(self.elsewhere), list(self.different)]

    @classmethod
    def from_plain(cls, row: object) -> Outline:
        """What `to_plain` made ``row`` of; `WireDamaged` where it is none."""
        if type(row) is not list or [*map(type, row)] != [int, list, list] or {*map(type, row[2])} - {str}:
            raise WireDamaged(f"the outline of a state is [how many units, ranks, names], got {row!r:.80}")
        return cls(units=row[0], elsewhere=ranks_of(row[1]), different=tuple(row[2]))


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
    skips: Mapping[str, SkipList] = field(default_factory=dict)
    """reader → what this rank had to skip of it, where it had to."""
    outline: Outline | None = None
    """Of what the state of its rank consists; None: an older lakeckpt did not say."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise WireDamaged(f"a part of rank {self.rank} of {self.world_size}")
        if any(not 0 <= slab.file < len(self.files) for tensor in self.tensors for slab in tensor.slabs):
            raise WireDamaged(f"the part of rank {self.rank} places a tensor in a file that it does not have")
        names = [(slab.file, slab.spec.key) for tensor in self.tensors for slab in tensor.slabs]
        if len(set(names)) != len(names):
            raise WireDamaged(f"the part of rank {self.rank} has one name for two things in a file")

    def to_bytes(self) -> bytes:
        """The part as a document."""
        plain = {
            "run": self.run,
            "attempt": self.save.attempt,
            "step": self.save.step,
            "number": self.save.number,
            "rank": self.rank,
            "world_size": self.world_size,
            "cut": self.cut,
            "files": [[file.path, file.size_bytes, file.head_digest, file.digest] for file in self.files],
            "slab_bytes": self.slab_bytes,
            "tensors": [
                [
                    one.spec.key,
                    one.spec.dtype,
                    list(one.spec.shape),
                    one.digest,
                    [[slab.file, slab.digest] for slab in one.slabs],
                    _lists(one.ranks),
                ]
                for one in self.tensors
            ],
            "trees": [
                [one.item, one.document, one.digest, _lists(one.ranks)] for one in self.trees if one.item != SHARING
            ],
        }
        sharing = [[one.document, one.digest, _lists(one.ranks)] for one in self.trees if one.item == SHARING]
        if sharing:  # apart: older readers take trees for the states of objects
            plain["sharing"] = sharing
        if self.outline is not None:
            plain["outline"] = self.outline.to_plain()
        if any(self.skips.values()):
            plain["skips"] = {name: skips_to_wire(skips) for name, skips in self.skips.items() if skips}
        assert all(one.algorithm == CURRENT for one in self.tensors), "parts are written as they are read only here"
        return dumps(plain, kind=_KIND, version=_VERSION)

    def is_earlier(self, file: FileRecord) -> bool:
        """Whether an earlier save wrote ``file``: it may hold tensors that this part has no use for."""
        return not file.path.startswith(f"{OBJECTS}/{self.save.folder}/")

    def slabs_in(self, index: int) -> dict[str, tuple[TensorRecord, SlabRecord]]:
        """name in the file → what of which tensor is meant to lie in the ``index``-th of its files."""
        return {slab.spec.key: (one, slab) for one in self.tensors for slab in one.slabs if slab.file == index}

    @classmethod
    def from_bytes(cls, data: bytes) -> PartRecord:
        """The part that `to_bytes` made ``data`` of; `WireError` where it is none."""
        document = loads(data, kind=_KIND, supported=_VERSION)
        plain = fields_of(document.value, "a part")
        algorithm: Algorithm = CURRENT if document.version[0] >= 2 else "blake2b"
        has_slabs = document.version[0] >= 3
        slab_bytes = number(plain, "slab_bytes", least=1) if has_slabs else _UNCUT_BYTES
        if slab_bytes % LEAF_BYTES:
            raise WireDamaged(f"slabs of {slab_bytes} bytes are no whole leaves of {LEAF_BYTES}")
        save = SaveId(attempt=number(plain, "attempt"), step=number(plain, "step"), number=number(plain, "number"))
        return cls(
            run=taken(plain, "run", str),
            save=save,
            rank=number(plain, "rank"),
            world_size=number(plain, "world_size", least=1),
            cut=taken(plain, "cut", bytes),
            files=tuple(_file(row) for row in _rows(plain, "files", (str, int, bytes, bytes))),
            tensors=tuple(
                _tensor(row, algorithm, slab_bytes)
                for row in _rows(plain, "tensors", (str, str, list, bytes, list if has_slabs else int, list))
            ),
            slab_bytes=slab_bytes,
            trees=tuple(
                TreeRecord(item=item, document=document, digest=digest, ranks=ranks_of(ranks))
                for item, document, digest, ranks in (
                    *_rows(plain, "trees", (str, bytes, bytes, list)),
                    *([SHARING, *row] for row in _rows(plain, "sharing", (bytes, bytes, list), must=False)),
                )
            ),
            skips={
                str(name): skips_from_wire(rows)
                for name, rows in (taken(plain, "skips", dict) if "skips" in plain else {}).items()
            },
            outline=Outline.from_plain(plain["outline"]) if "outline" in plain else None,
        )


def file_digest(head_digest: bytes, tensor_digests: list[bytes]) -> bytes:
    """The digest of a file of tensors, which also names it."""
    return short_digest(head_digest, *tensor_digests)


def _rows(plain: Any, name: str, kinds: tuple[type, ...], *, must: bool = True) -> list[list[Any]]:
    rows = taken(plain, name, list) if must or name in plain else []
    for row in rows:
        if type(row) is not list or tuple(map(type, row)) != kinds:
            raise WireDamaged(f"field {name!r} of a part holds {row!r:.80}")
    return rows


def _file(row: list[Any]) -> FileRecord:
    path, size_bytes, head_digest, digest = row
    if not 8 <= size_bytes < 2**63:
        raise WireDamaged(f"a file of tensors of {size_bytes} bytes")
    return FileRecord(path=confined(path, below=OBJECTS), size_bytes=size_bytes, head_digest=head_digest, digest=digest)


def _tensor(row: list[Any], algorithm: Algorithm, slab_bytes: int) -> TensorRecord:
    key, dtype, shape, digest, found, ranks = row
    if not all(type(size) is int for size in shape):
        raise WireDamaged(f"tensor {key!r} has the shape {shape!r:.80}")
    spec = TensorSpec(key=key, dtype=dtype, shape=tuple(shape))
    places = found if type(found) is list else [[found, digest]]
    if not all(type(one) is list and [*map(type, one)] == [int, bytes] for one in places):
        raise WireDamaged(f"tensor {key!r} is said to lie at {places!r:.80}")
    return TensorRecord.of(
        spec, digest, [(file, one) for file, one in places], ranks_of(ranks), slab_bytes=slab_bytes, algorithm=algorithm
    )


def _lists(ranks: Ranks) -> list[list[int]]:
    return [list(pair) for pair in ranks]


def _check_digests(*digests: bytes) -> None:
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise WireDamaged(f"a digest has {DIGEST_BYTES} bytes, got {[len(digest) for digest in digests]}")
