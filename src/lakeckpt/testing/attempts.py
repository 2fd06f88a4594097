"""This module defines the history of a job: attempts of some topology, each of which takes steps and crashes.

A history is a list of `Attempt`. The first attempt begins at the start of the data, each other attempt at the
checkpoint of the attempt before it. The steps that an attempt takes after its checkpoint are lost in a crash and do not
count. The last attempt goes on to the end. A history is a value, and its repr is Python that makes it again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lakeckpt.errors import ConfigError

__all__ = ["Attempt", "Topology", "TopologyLike", "count", "script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How a job runs: what ``make_loader(rank, world_size, num_workers, **options)`` is called with."""

    world_size: int = 1
    num_workers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """More keyword arguments of ``make_loader``, such as ``batch_size`` or ``num_lanes``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", count("a topology's world_size", self.world_size, least=1))
        object.__setattr__(self, "num_workers", count("a topology's num_workers", self.num_workers, least=0))
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise ConfigError(
                f"a topology's options are arguments of make_loader, such as {{'batch_size': 8}}, got {self.options!r}"
            )

    @classmethod
    def of(cls, value: TopologyLike) -> Topology:
        """Return what ``(world_size, num_workers)`` or ``(world_size, num_workers, options)`` stands for."""
        if isinstance(value, Topology):
            return value
        if not isinstance(value, tuple) or not 2 <= len(value) <= 3:
            raise ConfigError(f"a topology is (world_size, num_workers) or (…, options), got {value!r}")
        return cls(world_size=value[0], num_workers=value[1], options=value[2] if len(value) == 3 else {})


TopologyLike: TypeAlias = Topology | tuple[int, int] | tuple[int, int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A job of ``topology`` takes ``steps`` steps, checkpoints, takes ``lost`` more and crashes.

    Steps are those of every rank, and go on over epoch borders; None: until all ranks have seen the end of the epoch
    (of an endless stream: until every epoch that had begun is complete). The last attempt of a history does not crash:
    after its steps it goes on to that end.
    """

    topology: TopologyLike
    steps: int | None = None
    lost: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", count("an attempt's steps", self.steps, least=0, otherwise=" or None"))
        object.__setattr__(self, "lost", count("an attempt's lost steps", self.lost, least=0))
        object.__setattr__(self, "topology", Topology.of(self.topology))


def script(history: Sequence[Attempt], arguments: Iterable[str] = ()) -> str:
    """Return Python that replays ``history``; ``arguments`` are further arguments of `replay`, as source."""
    lines = "".join(f"        {attempt!r},\n" for attempt in history)
    more = "".join(f"    {argument},\n" for argument in arguments)
    imports = "from lakeckpt.testing import Attempt, Topology, replay"
    return f"{imports}\n\nreplay(\n    make_loader,\n    [\n{lines}    ],\n{more})\n"


def count(name: str, value: Any, *, least: int, otherwise: str = "") -> int:
    """Return ``value`` as an integer; ConfigError if it is no integer, or below ``least``.

    ``otherwise`` says, for people, what it may be instead.

    >>> count("chains", 3, least=0)
    3
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name} must be an integer of at least {least}{otherwise}, got {value!r}")
    return number
