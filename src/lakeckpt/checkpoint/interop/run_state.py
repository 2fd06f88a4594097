"""This module reads the state that a checkpoint of a run holds, without live objects.

`RunState` is a tree of dicts, lists and plain values, in which a `StoredTensor` stands for each tensor. Tensors are
read and verified on request, so that a part of a state can be read alone. By default the state is that of all ranks
together: the stages of a pipeline make up one model. If ranks had different values under one name, a `Disputed` stands
for the values, and reading it is refused: the caller chooses a rank instead.

The module never writes to a run. Each call starts and joins its own threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

from lakeckpt.checkpoint.format.fields import holds
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING, PartRecord, TreeRecord
from lakeckpt.checkpoint.persist.log import read_entry
from lakeckpt.checkpoint.restore.from_storage import fetch_parts, load_from
from lakeckpt.checkpoint.restore.run_log import BesideRun, Step
from lakeckpt.checkpoint.state.loaded import Loaded
from lakeckpt.checkpoint.state.names import numbered
from lakeckpt.checkpoint.state.rank_differences import contents_of, unlike_of
from lakeckpt.checkpoint.state.tree import branch_to_bytes, tree_from_bytes
from lakeckpt.checkpoint.state.wholes import Wholes
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, ConfigError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.wire.envelope import TensorRef

__all__ = ["Disputed", "RunState", "StoredTensor", "leaves", "mapped", "with_checkpoint"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stands for a tensor of the run: its key, and a rank that had it."""

    key: str
    rank: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Disputed:
    """Stands for a value that differed between ranks."""

    name: str

    def refusal(self) -> CheckpointMismatch:
        """Return the error for reading the value."""
        return CheckpointMismatch(
            f"the ranks that saved this checkpoint had different values of {self.name!r}: choose the rank whose state "
            "is read, with rank=, or read another part of the state"
        )


class RunState:
    """The state in the checkpoint ``manifest``: of all ranks together, or of ``rank``.

    Raises `CheckpointDamaged`, which names the object, and `ConfigError` if there was no such rank.
    """

    def __init__(self, storage: Storage, manifest: Manifest, rank: int | None = None) -> None:
        if rank is not None and not 0 <= rank < manifest.world_size:
            raise ConfigError(
                f"the checkpoint of step {manifest.step} has ranks 0 to {manifest.world_size - 1}, not {rank}"
            )
        parts = fetch_parts(storage, manifest)
        self.manifest = manifest
        loaded = partial(load_from, storage, manifest, parts, world_size=manifest.world_size)
        self._loaded = cache(lambda of: loaded(rank=of))
        try:
            readers = {name: dict(reader.state) for name, reader in manifest.readers.items()}
            self.tree: dict[str, Any] = _items(parts, rank, manifest.world_size) | readers
        except WireError as error:
            raise CheckpointDamaged(f"the checkpoint in slot {manifest.slot}: {error}") from error

    def loaded(self, leaf: StoredTensor) -> Loaded:
        """Return the state that holds the tensor."""
        return self._loaded(leaf.rank)

    def read(self, tree: Any) -> Any:
        """Return ``tree``, a part of this state, with its tensors in new host memory, verified.

        Raises `CheckpointMismatch` if ranks had different values of something in it, `CheckpointDamaged`.
        """
        wanted: defaultdict[int, set[str]] = defaultdict(set)
        for leaf in leaves(tree):
            if isinstance(leaf, Disputed):
                raise leaf.refusal()
            if isinstance(leaf, StoredTensor):
                wanted[leaf.rank].add(leaf.key)
        tensors = {rank: self._loaded(rank).read_as_saved(sorted(keys)) for rank, keys in wanted.items()}
        return mapped(tree, lambda one: tensors[one.rank][one.key] if isinstance(one, StoredTensor) else one)


def with_checkpoint(storage: Storage, step: Step, use: Callable[[Manifest], _T]) -> _T:
    """Call ``use`` with the newest checkpoint, or the checkpoint of ``step``, and return its result.

    The run may go on and remove the checkpoint meanwhile; then ``use`` is called again with a newer one. If the
    newest one is damaged, the next one is used, with a `DamageWarning`. Raises `CheckpointNotFound` and
    `CheckpointDamaged`.
    """
    choice = BesideRun(storage, step)
    while True:
        slot = int(choice.choose()["slot"])
        manifest = read_entry(storage, slot)
        assert isinstance(manifest, Manifest), "only commits are chosen"
        try:
            return use(manifest)
        except CheckpointDamaged as error:
            choice.failed = slot, str(error)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree: all values that are not containers."""
    if type(tree) in (dict, list, tuple):
        for one in tree.values() if type(tree) is dict else tree:
            yield from leaves(one)
    else:
        yield tree


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tree of the same containers, with ``change`` of each of its `leaves`."""
    if type(tree) is dict:
        return {key: mapped(one, change) for key, one in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(one, change) for one in tree)
    return change(tree)


def _items(parts: list[PartRecord], rank: int | None, world_size: int) -> dict[str, Any]:
    """Return the trees of all items: the trees of one rank, or the merged trees of all ranks."""
    disputed = frozenset() if rank is not None else _disputed(parts, world_size)
    found: dict[str, Any] = {}
    for record in _trees(parts, rank):
        of = record.ranks[0][0] if rank is None else rank
        tree = _placed(tree_from_bytes(record.document)[0], of, disputed)
        found[record.item] = _merged(found[record.item], tree, record.item) if record.item in found else tree
    return {item: numbered(tree) for item, tree in found.items()}


def _trees(parts: list[PartRecord], rank: int | None) -> Iterator[TreeRecord]:
    every = [tree for part in parts for tree in part.trees if tree.item not in (RANDOM, SHARING)]
    for tree in sorted(every, key=lambda one: one.ranks):
        if rank is None or holds(tree.ranks, rank):
            yield tree


def _disputed(parts: list[PartRecord], world_size: int) -> frozenset[str]:
    """Return the keys of tensors whose contents differ between ranks."""
    return frozenset(unlike_of(contents_of(parts), world_size).tensors) | frozenset(Wholes(parts).several())


def _placed(tree: Any, rank: int, disputed: frozenset[str]) -> Any:
    def place(one: Any) -> Any:
        if not isinstance(one, TensorRef):
            return one
        return Disputed(one.key) if one.key in disputed else StoredTensor(one.key, rank)

    return mapped(tree, place)


def _merged(one: Any, other: Any, path: str) -> Any:
    """Return the merged values of two ranks at ``path``."""
    if type(one) is not type(other):
        return Disputed(path)
    if type(one) is dict:
        both = {key: _merged(one[key], other[key], f"{path}/{key}") for key in one if key in other}
        return one | other | both
    if type(one) in (list, tuple):
        if len(one) != len(other):
            return Disputed(path)
        return type(one)(_merged(*pair, f"{path}/{at}") for at, pair in enumerate(zip(one, other, strict=True)))
    if isinstance(one, (StoredTensor, Disputed)):
        return one if one == other else Disputed(path)
    return one if branch_to_bytes(one, path) == branch_to_bytes(other, path) else Disputed(path)
