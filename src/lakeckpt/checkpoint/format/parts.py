"""This module defines a part: the immutable record of what one rank wrote for a checkpoint, and of the files it names.

A part lists the units that its rank is responsible for. The rank wrote them in this save, or an earlier save wrote them
and they are unchanged; then the part refers to the earlier files. A unit is a tensor, or the tree of an item (its state
without the tensors, as a document), with the ranks whose state it is: one rank writes replicas that agree. A large
tensor consists of slabs, in one file or several. Digests of slabs and tensors cover the bytes of tensors, another
digest covers the head of each file, and the manifest has a digest of the record: no byte is uncovered. The classes are
the format: `lakeckpt.wire.documents` writes and reads them by the types of their fields.

A part begins with its `PartHead`: what a commit must know of it. Rank 0 decodes the heads of all parts, and not their
tensors, so that a commit costs it little, however many tensors there are.

The module never imports torch, and never reads or writes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Digest, Ranks
from lakeckpt.checkpoint.format.sharing import Tiling, is_part_key
from lakeckpt.checkpoint.format.units import UnitId, sum_of, tensor_unit, tree_unit
from lakeckpt.errors import WireDamaged
from lakeckpt.recovery.facts import CutId
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "OBJECTS",
    "OBJECT_NAME",
    "PARTS",
    "RANDOM",
    "SHARING",
    "FileRecord",
    "Outline",
    "PartHead",
    "PartRecord",
    "SaveId",
    "SiteWaits",
    "SlabRecord",
    "TensorRecord",
    "TreeRecord",
]

PARTS = "parts"
OBJECTS = "objects"
OBJECT_NAME = re.compile(OBJECTS + r"/[0-9]{10}/[0-9]{12}-[0-9]{6}/[0-9]+-[0-9]+-[0-9a-f]+\.safetensors", re.ASCII)
"""Matches the names that `SaveId.object_path` gives, and no others."""
RANDOM = "lakeckpt.random"
"""The name of the item that holds the random states; users' items cannot have it."""
SHARING = "lakeckpt.sharing"
"""The name of the item that records which ranks share tensors; users' items cannot have it."""
_HEAD, _BODY = "part", "part-body"
_VERSION = (1, 0)
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveId:
    """One save of one attempt, and the paths of its parts and objects. Never used twice."""

    attempt: Count
    step: Count
    """Optimizer steps done at its cut."""
    number: Count
    """How many saves the attempt had begun before it."""

    @property
    def cut(self) -> CutId:
        """The cut that is saved."""
        return CutId(attempt=self.attempt, step=self.step)

    @property
    def folder(self) -> str:
        """The folder below ``parts/`` and ``objects/``."""
        return f"{self.attempt:010d}/{self.step:012d}-{self.number:06d}"

    def part_path(self, rank: int) -> str:
        """Return the path of the part of ``rank``."""
        return f"{PARTS}/{self.folder}/{rank:05d}.lkc"

    @property
    def register_path(self) -> str:
        """The path of the register of its checkpoint (`lakeckpt.checkpoint.format.register`)."""
        return f"{PARTS}/{self.folder}/register.lkc"

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

    path: str
    size_bytes: Positive
    head_bytes: Positive
    """The size of the file before its tensors: length and head."""
    head_digest: Digest
    """`short_digest` of the first ``head_bytes`` bytes."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRecord:
    """The part of a tensor in one file: the whole tensor, or a run of its elements."""

    spec: TensorSpec
    """Name, dtype and shape in the file."""
    start: Count
    """The offset of its first byte in the tensor."""
    digest: Digest
    """The digest of its bytes: `lakeckpt.checkpoint.format.digests.content_digest`."""
    file: Count
    """The index of its file in the part."""
    at: Count
    """The offset of its first byte in the file."""

    @property
    def stop(self) -> int:
        """The offset behind its last byte in the tensor."""
        return self.start + self.spec.size_bytes


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor: its spec and digest, its slabs, and the ranks whose state it is."""

    spec: TensorSpec
    digest: Digest
    """The digest of its bytes: `lakeckpt.checkpoint.format.digests.content_digest`."""
    slabs: tuple[SlabRecord, ...]
    """In the order of the tensor's bytes (`lakeckpt.checkpoint.format.slabs.slab_specs`)."""
    ranks: Ranks


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
class SiteWaits:
    """The last waits at ``site``, such as ``pipeline``, ``ddp`` or ``data``."""

    site: str
    kind: Literal["bubble", "free"]
    """True if the rank was idle; False: it computed while the link to the host was free."""
    median_s: float
    """The median length of a wait, in seconds."""
    share: float
    """The part of all captured bytes that moved in these waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a rank saved: the fields that a part and its head have in common."""

    run: str
    save: SaveId
    rank: Count
    world_size: Positive
    cut: bytes
    """Digest of what all ranks agreed on at the cut."""
    files: tuple[FileRecord, ...]
    tilings: tuple[Tiling, ...] = ()
    """Of the parts of tensors that the rank holds, whether it wrote them or a replica did."""
    reports: Mapping[str, bytes] = field(default_factory=dict)
    """Reader → what the rank consumed of it, for readers of which each rank knows its own lanes alone
    (`lakeckpt.checkpoint.consumed.reports`)."""
    excluded: bytes = b""
    """Reader → what the rank consumed and trained nothing on (`lakeckpt.checkpoint.consumed.excluded`)."""
    waits: tuple[SiteWaits, ...] = ()
    """How long the rank waited by site, and how much of its captures moved meanwhile."""

    @property
    def earlier(self) -> list[str]:
        """The files that earlier saves wrote. They may hold tensors that this part does not refer to."""
        return [file.path for file in self.files if not file.path.startswith(f"{OBJECTS}/{self.save.folder}/")]

    @property
    def in_common(self) -> dict[str, Any]:
        """The fields that a part and its head have in common, by name."""
        return {one.name: getattr(self, one.name) for one in fields(_Share)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHead(_Share):
    """What a commit must know of a part."""

    alone: int
    """The sum of its units that are no parts of tensors (`lakeckpt.checkpoint.format.units.sum_of`). Random states, of
    which other ranks know nothing, are not among them."""
    divided: tuple[tuple[Ranks, int], ...]
    """Ranks → the sum of its parts of tensors that these ranks hold."""
    body: Digest
    """`short_digest` of the document of its tensors and trees."""

    @classmethod
    def from_bytes(cls, data: bytes) -> PartHead:
        """Return the head of the part in a document of `PartRecord.to_bytes`, all of which is verified. `WireError`."""
        head, body = _taken_apart(data)
        found: PartHead = from_plain(cls, loads(head, kind=_HEAD, supported=_VERSION), "a part")
        if short_digest(body) != found.body:
            raise WireDamaged(f"this part is damaged: the {len(body)} bytes behind its head are not what was written")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord(_Share):
    """All that a rank wrote for one save."""

    tensors: tuple[TensorRecord, ...]
    trees: tuple[TreeRecord, ...]
    outline: Outline | None = None
    """The extent of the rank's state; None: not recorded."""

    def to_bytes(self) -> bytes:
        """Return the document of the part: the length of its head (8 bytes, big-endian), the head, and the body."""
        body = dumps(
            to_plain(_Body(tensors=self.tensors, trees=self.trees, outline=self.outline)), kind=_BODY, version=_VERSION
        )
        alone = [tree_unit(one.item, one.digest) for one in self.trees if one.item != RANDOM]
        divided: defaultdict[Ranks, list[UnitId]] = defaultdict(list)
        for one in self.tensors:
            (divided[one.ranks] if is_part_key(one.spec.key) else alone).append(tensor_unit(one.spec, one.digest))
        sums = tuple((ranks, sum_of(units)) for ranks, units in divided.items())
        found = PartHead(**self.in_common, alone=sum_of(alone), divided=sums, body=short_digest(body))
        head = dumps(to_plain(found), kind=_HEAD, version=_VERSION)
        return b"".join((len(head).to_bytes(_LENGTH_BYTES, "big"), head, body))

    @classmethod
    def from_bytes(cls, data: bytes) -> PartRecord:
        """Return the part in a document of `to_bytes`. `WireError`."""
        head, (_, data) = PartHead.from_bytes(data), _taken_apart(data)
        body: _Body = from_plain(_Body, loads(data, kind=_BODY, supported=_VERSION), "a part")
        return cls(**head.in_common, tensors=body.tensors, trees=body.trees, outline=body.outline)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The rest of a part."""

    tensors: tuple[TensorRecord, ...]
    trees: tuple[TreeRecord, ...]
    outline: Outline | None


def _taken_apart(data: bytes) -> tuple[bytes, bytes]:
    """Return the head and the body of a part."""
    stop = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    return data[_LENGTH_BYTES:stop], data[stop:]
