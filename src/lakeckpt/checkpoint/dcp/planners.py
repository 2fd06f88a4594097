"""What does DCP save and load, and under which names?  torch's planners, without their pickle.

`LakeSavePlanner` and `LakeLoadPlanner` leave all of DCP's planning (flattening, sharding, resharding, deduplication)
to torch's default planners, and change three things. What is no tensor becomes a document of ours and back. A `PerRank`
value gets a name of its own on each rank, so that nobody's is deduplicated away. And beside the paths of its names a
checkpoint tells what they do not: which dicts are empty, and which keys are no texts, for whoever reads it by itself.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem, WriteItemType

from lakeckpt.checkpoint.dcp.value import PerRank, decode_value, encode_value
from lakeckpt.checkpoint.digests import short_digest
from lakeckpt.errors import CheckpointMismatch

__all__ = ["OF_RANK", "UNTOLD", "LakeLoadPlanner", "LakeSavePlanner", "is_told_key"]

OF_RANK = "::rank:"
UNTOLD = "::untold:"


class LakeSavePlanner(DefaultSavePlanner):
    """torch's ``DefaultSavePlanner``, with its arguments, which writes no pickle and keeps every rank's `PerRank`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See torch."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self.mappings = _by_rank(self.state_dict, self.mappings)
        if self.flatten_state_dict:
            nothing: list[tuple[str, Any]] = [(UNTOLD, [[], []])]  # says that all is told
            self.mappings |= dict([*nothing, *_untold(state_dict, ())])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """A tensor as it is; the document of anything else. `UnsupportedValue` naming what cannot be written."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        value = object.value if isinstance(object, PerRank) else object
        return io.BytesIO(encode_value(write_item.index.fqn, value))


class LakeLoadPlanner(DefaultLoadPlanner):
    """torch's ``DefaultLoadPlanner``, with its arguments, which reads no pickle and gives each rank its `PerRank`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See torch."""
        leaves, paths = flatten_state_dict(state_dict)
        marked = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, PerRank)}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for name, leaf in marked.items():  # torch puts None in the place of what it does not know
            _put(self.original_state_dict, paths[name], leaf)
            if name in self.state_dict:
                self.state_dict[name] = leaf
        self.state_dict, self.mappings = _by_rank(self.state_dict, self.mappings)

    def create_local_plan(self) -> LoadPlan:
        """See torch. `CheckpointMismatch` lists the names that the checkpoint lacks, unless ``allow_partial_load``."""
        assert self.metadata is not None, "set_up_planner comes first"
        known = self.metadata.state_dict_metadata
        missing = [name for name in self.state_dict if name not in known]
        alone = [name for name in missing if OF_RANK in name and _saved_by_others(name, known)]
        if alone:
            names = ", ".join(sorted(name.partition(OF_RANK)[0] for name in alone))
            warnings.warn(
                f"rank {_rank()} is new: the checkpoint holds no {names} of its own, and it keeps what it has",
                RuntimeWarning,
                stacklevel=2,
            )
            self.state_dict = {name: value for name, value in self.state_dict.items() if name not in alone}
        lacking = sorted(name for name in missing if name not in alone)
        if lacking and not self.allow_partial_load:
            shown = ", ".join(map(repr, lacking[:10])) + (f" and {len(lacking) - 10} more" if len(lacking) > 10 else "")
            raise CheckpointMismatch(
                f"the checkpoint does not hold {shown}: load into the state that was saved, or give allow_partial_load"
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put what a document holds in its place."""
        name = read_item.dest_index.fqn
        live = self.state_dict[name]
        if isinstance(live, PerRank):
            live.value = decode_value(value.getbuffer(), live.value)
            return
        found = decode_value(value.getbuffer(), live)
        if not self.flatten_state_dict:
            self.state_dict[name] = self.original_state_dict[name] = found
            return
        _put(self.original_state_dict, self.mappings[name], found)


def _put(state: Any, path: Sequence[str | int], value: object) -> None:
    """Put ``value`` in its place in nested containers."""
    *outer, last = path
    for step in outer:
        state = state[_key(state, step)]
    state[_key(state, last)] = value


def _key(state: Any, step: str | int) -> Any:
    """The key of ``state`` that torch's path has as ``step``: it makes text of numbers, such as an optimizer's keys."""
    if isinstance(state, Mapping) and step not in state:
        return next((key for key in state if str(key) == step), step)
    return step


def _by_rank(state: dict[str, Any], mappings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with this rank's name for every `PerRank`."""
    names = {name: f"{name}{OF_RANK}{_rank()}" for name, value in state.items() if isinstance(value, PerRank)}
    return (
        {names.get(name, name): value for name, value in state.items()},
        {names.get(name, name): path for name, path in mappings.items()},
    )


def _untold(state: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, Any]]:
    """Of each dict that torch's paths do not tell whole: a name of its own, its path, and its keys that are no text."""
    if isinstance(state, Mapping):
        others = [key for key in state if is_told_key(key)]
        if others or (path and not state):
            keys = short_digest(repr((path, others)).encode()).hex()[:8]  # ranks may have parts of a dict
            yield f"{UNTOLD}{'.'.join(map(str, path))}:{keys}", [list(path), others]
        for key, value in state.items():
            yield from _untold(value, (*path, str(key)))
    elif isinstance(state, list):
        for place, value in enumerate(state):
            yield from _untold(value, (*path, place))


def is_told_key(key: object) -> bool:
    """Whether torch's paths have ``key`` of a dict as a text, and a checkpoint of ours tells what it was."""
    if type(key) is tuple:
        return all(type(one) is str or is_told_key(one) for one in key)
    return key is None or type(key) in (int, float, complex, bool, bytes)


def _saved_by_others(name: str, known: dict[str, Any]) -> bool:
    head = name.partition(OF_RANK)[0] + OF_RANK
    return any(one.startswith(head) for one in known)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
