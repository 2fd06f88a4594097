"""This module defines `ReadOptions` and `Follow`, and checks the arguments of datasets and loaders.

`ReadOptions` holds the arguments of a `lakeckpt.LakeDataset` that few users need. It is checked once, when it is made.
Each check raises `ConfigError` with a message that names the argument and what was given. Integers of numpy and of
torch are as good as Python's; a bool is never an integer, nor the other way round. The module reads nothing.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lakeckpt.core.state import MAX_LANES
from lakeckpt.errors import ConfigError, shown

__all__ = [
    "OVERRIDABLE",
    "Follow",
    "ReadOptions",
    "check_lanes",
    "check_only_reader",
    "flag",
    "following",
    "integer",
    "one_of",
    "optional",
    "positive",
    "refuse",
]

MOST = 1 << 31

OVERRIDABLE = frozenset({"table", "selection", "tail", "transform", "tokenizer"})
"""Differences between a state and a dataset that a user may accept."""


_ELSEWHERE = {
    "batch_size": "the dataset makes the micro-batches: LakeDataset(…, batch_size=…)",
    "shuffle": "the dataset has the order: LakeDataset(…, shuffle=True)",
    "sampler": "the dataset has the order, and each rank's share of it: LakeDataset(…, shuffle=True)",
    "batch_sampler": "the dataset has the order, and each rank's share of it: LakeDataset(…, shuffle=True)",
    "drop_last": "the dataset has the ends: LakeDataset(…, drop_last=True)",
    "collate_fn": "micro-batches come whole: what is to be made of one is LakeDataset(…, transform=…)",
    "pin_memory_device": "pin_memory=True pins for the current accelerator",
    "in_order": "the order of rows never depends on workers",
}
"""The arguments of a DataLoader that a LakeLoader does not have, and where they went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The arguments of a `lakeckpt.LakeDataset` that few users need.

    Raises `ConfigError` for a value that cannot be.

    >>> ReadOptions(num_lanes=8, nulls="mask")
    ReadOptions(num_lanes=8, nulls='mask')
    """

    num_lanes: int | None = None
    """Lanes of an epoch (rounded up to a multiple of the ranks). None: ranks times max(1, workers) at the first start,
    then as the state has it. Micro-batches are the same for all numbers of ranks that divide it."""
    text: Literal["str", "ragged"] = "str"
    """``"str"``: a text column is a ``list[str]`` (a null is ``""``, and its mask says so). ``"ragged"``: it is a
    `lakeckpt.Ragged` of UTF-8 bytes, as text inside of lists always is. ``output="arrow"`` has neither."""
    nulls: Literal["error", "mask"] = "error"
    """``"error"`` raises `NullValueError` on a null; ``"mask"`` puts a bool column ``<name>.is_null`` beside every
    nullable column. A null is never a silent zero."""
    accept_changes: Collection[str] = ()
    """Differences between a loaded state and this dataset to accept: ``"table"`` (another listing of equally many
    rows), ``"selection"``, ``"tail"`` (another ``drop_last``), ``"transform"`` (another one, or another name, with
    ``rows="many"``), ``"tokenizer"`` (another one: the rest of a row that has begun is cut by the new one)."""
    on_new_version: Literal["keep", "next_epoch"] = "keep"
    """``"keep"``: the version of the table that the dataset or its state names is read for ever. ``"next_epoch"``: each
    epoch is of the version that is the newest when it begins, on all ranks."""
    on_version_gone: Literal["raise", "next_epoch"] = "raise"
    """The way to restore in the middle of an epoch whose version is gone or was written again: ``"raise"``, or
    ``"next_epoch"``: drop the rest of it (`lakeckpt audit` says so) and begin the next one."""
    memory_limit_bytes: int | None = None
    """The most memory of open windows and of windows read ahead, in each process, and of micro-batches that loader
    workers have in flight. None: a quarter of the memory that the machine or the container has, shared by the ranks and
    the workers of the machine, and three groups of 16 MiB in flight for each worker. Batches that the loop keeps do not
    count. The window that each lane is in is held whatever the limit, and a warning says so if that is more than the
    limit. A quarter of the limit is for bytes fetched ahead from a store (at most 256 MiB)."""

    def __post_init__(self) -> None:
        for name, most in (("num_lanes", MOST), ("memory_limit_bytes", sys.maxsize)):
            object.__setattr__(self, name, optional(name, getattr(self, name), most=most))
        one_of("text", self.text, ("str", "ragged"))
        one_of("nulls", self.nulls, ("error", "mask"))
        one_of("on_new_version", self.on_new_version, ("keep", "next_epoch"))
        one_of("on_version_gone", self.on_version_gone, ("raise", "next_epoch"))
        object.__setattr__(self, "accept_changes", _accepted(self.accept_changes))

    def __repr__(self) -> str:
        fields = [(one.name, getattr(self, one.name), one.default) for one in dataclasses.fields(self)]
        given = [f"{name}={value!r}" for name, value, default in fields if value != default and value != frozenset()]
        return f"ReadOptions({', '.join(given)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """How a `lakeckpt.LakeDataset` follows a table that is appended to.

    Raises `ConfigError` for a value that cannot be.
    """

    poll_every_s: float = 30.0
    """Seconds between two looks at the table, while there is nothing to read."""
    stop_after_idle_s: float | None = None
    """End the stream when nothing was added for so many seconds while there was nothing to read. The rows that fill no
    step come before the end, in smaller micro-batches. None: wait for ever."""
    ignore_deletes: bool = False
    """Go on if a newer version only deletes rows: rows that were known are read as if they were still there. False:
    `TableRewritten` is raised. A version that writes rows again always raises it."""

    def __post_init__(self) -> None:
        for name, value in (("poll_every_s", self.poll_every_s), ("stop_after_idle_s", self.stop_after_idle_s)):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
            if not is_number and (value is not None or name == "poll_every_s"):
                raise ConfigError(f"{name} is a number of seconds of at least 0, got {shown(value)}")
        flag("ignore_deletes", self.ignore_deletes)


def integer(name: str, value: Any) -> int:
    """Return ``value`` as an integer."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ConfigError(f"{name} must be an integer, got {shown(value)}")


def positive(name: str, value: Any, *, most: int = MOST) -> int:
    """Return ``value`` as an integer from 1 to ``most``."""
    try:
        number = integer(name, value)
    except ConfigError:
        number = 0
    if not 1 <= number <= most:
        raise ConfigError(f"{name} must be a positive integer up to {most}, got {shown(value)}")
    return number


def optional(name: str, value: object, *, most: int = MOST) -> int | None:
    """Return ``value`` as `positive` does, or None for None."""
    return None if value is None else positive(name, value, most=most)


def flag(name: str, value: Any) -> bool:
    """Return ``value``, which is True or False."""
    if value is not True and value is not False:
        raise ConfigError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse ``value`` if it is not one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def following(follow: object, *, row_wise: bool, others: Sequence[bool]) -> Follow | None:
    """Return how the table is followed. ``others``: whether endless=, drop_last= and consumed= were given."""
    if not isinstance(follow, Follow):
        if not flag("follow", follow):
            return None
        follow = Follow()
    if row_wise or any(others):
        raise ConfigError(
            "a table that is followed is read in micro-batches, without epochs, and no row is dropped: give a "
            "batch_size, and leave endless=, drop_last= and consumed= out"
        )
    return follow


def _accepted(changes: Any) -> frozenset[str]:
    """Return the names of ``changes``, each of which can be overridden."""
    if isinstance(changes, (str, bytes)) or not isinstance(changes, Iterable):
        raise ConfigError(f"accept_changes is a list of names, got {changes!r}: write [{changes!r}]")
    names = list(changes)
    others = [name for name in names if not isinstance(name, str) or name not in OVERRIDABLE]
    if others:
        raise ConfigError(
            f"accept_changes may name {', '.join(sorted(OVERRIDABLE))}, got {others}: any other change gives positions "
            "another meaning, and the rest of the epoch could not be read exactly"
        )
    return frozenset(names)


def check_lanes(num_lanes: int) -> None:
    """Refuse so many lanes that planning would take too long."""
    if num_lanes > MAX_LANES:
        raise ConfigError(f"an epoch has at most {MAX_LANES} lanes, got {num_lanes}: give a smaller num_lanes=")


def refuse(others: Collection[str]) -> None:
    """Refuse arguments that a LakeLoader does not have: `ConfigError` for those of a DataLoader, else ``TypeError``."""
    for name in others:
        if name not in _ELSEWHERE:
            raise TypeError(f"LakeLoader has no argument {name!r}")
        raise ConfigError(f"LakeLoader has no {name}=: {_ELSEWHERE[name]}")


_READERS: weakref.WeakKeyDictionary[object, tuple[weakref.ref[object], bool]] = weakref.WeakKeyDictionary()
"""Dataset → its newest loader, and whether this loader begins anew in each iteration."""


def check_only_reader(dataset: object, loader: object, *, restarts: bool) -> None:
    """Raise `ConfigError` if ``dataset`` is read by a loader that goes on and by one that begins anew. The place in
    the dataset is one: each of the two would move the place of the other."""
    other, others_restart = _READERS.get(dataset, (None, restarts))
    if other is not None and other() is not None and others_restart != restarts:
        raise ConfigError(
            "this dataset is read by another LakeLoader already, one of the two with restart=True: an evaluation would "
            "move the place of the training. Make a LakeDataset of its own for each of them"
        )
    _READERS[dataset] = weakref.ref(loader), restarts
