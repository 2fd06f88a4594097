"""This module holds the state of a flow: where a job is in a stream whose positions yield any number of items.

A position of a flow (a row, or a window) yields none, one or many *items*, and a micro-batch is the next ``batch_size``
items of one lane. How many items a position yields is known only after it was read. So the place of a lane is a
*frontier*: (positions of the lane that are consumed, items consumed of the position that follows).

Each rank knows the frontiers of its own lanes. The state of one rank is therefore a *part* (`FlowState.ranks`), and
`lakeckpt.core.flows.merge` joins parts. The deal of positions to lanes is that of `lakeckpt.core.lanes`.

States are values: every change makes a new state. A state never holds an item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import EpochDeal, Left, Rest
from lakeckpt.core.state import Identity, Segment
from lakeckpt.core.stream import StreamDeal
from lakeckpt.errors import StateError
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, to_plain

__all__ = ["FLOW_FORMAT", "Begun", "FlowState", "Maker", "deal_of", "inside", "lanes_of"]

FLOW_FORMAT = "lakeckpt.flow/1"
"""The name and major version of the plain state of a flow."""

Int64Array = npt.NDArray[np.int64]


@as_row
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Begun:
    """A position of which ``offset`` items, but not all, are consumed."""

    epoch: Count
    position: Count
    offset: Positive


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What makes items of a position."""

    name: str
    """The name of a transform, or of a tokenizer; empty for whole documents."""
    how: str = ""
    """How sequences are made of tokens; empty for a transform."""
    length: Count = 0
    """Tokens of a sequence; 0 for a transform."""
    fingerprint: str = field(default="", compare=False)
    """``form:`` and the digest of a tokenizer's serialised form, or ``rows:`` and the digest of what some rows of the
    table give; empty where there is none. Ranks need not agree on it: the states of a job keep that of its first rank.
    """

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.name, self.how]))

    def differences(self, its: Maker, *, same_rows: bool) -> list[str]:
        """Return one line for each thing in which ``its`` differs, led by its name. ``same_rows``: whether both
        fingerprints are of the same rows, where they are of rows."""
        lines, words = [], "{!r} in this dataset, {!r} in the state"
        if self.length != its.length:
            lines.append(f"length: {words.format(self.length, its.length)}")
        elif self.how != its.how:
            lines.append(f"packing: {words.format(self.how, its.how)}")
        what, (mine, other) = "tokenizer" if self.length else "transform", (self.fingerprint, its.fingerprint)
        is_form = mine.startswith("form:") and other.startswith("form:")
        if is_form and mine == other:
            return lines  # whatever it is called
        if self.name != its.name:
            lines.append(f"{what}: {words.format(self.name, its.name)}")
        elif mine and other and mine != other and ((same_rows and not lines) or is_form):
            lines.append(f"{what}: {self.name!r} has the fingerprint {words.format(mine, other)}, so it is another one")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """The state of a flow, or the part of some ranks."""

    identity: Identity
    maker: Maker
    epoch: Count
    """The epoch at hand; 0 where the stream is endless (it counts its epochs itself)."""
    segment: Segment
    """The segment at hand."""
    step: Count
    """Steps done, of this epoch; every rank has done as many."""
    ranks: Intervals
    """The ranks whose lanes this state holds; all of them: it is the state of the whole job."""
    done: tuple[Count, ...]
    """For each lane that it holds, in ascending order: how many positions are consumed, since the lanes were dealt."""
    offsets: tuple[Count, ...]
    """For each lane that it holds: how many items are consumed of the position that follows."""
    base: Rest | None = None
    """The positions that were left when the lanes were dealt, those that had begun included; None: a whole epoch, or
    stream."""
    begun: tuple[Begun, ...] = ()
    """The positions of ``base`` that had begun when the lanes were dealt."""

    def __post_init__(self) -> None:
        if self.identity.endless and self.epoch:
            raise ValueError(f"an endless stream counts its epochs itself, got epoch {self.epoch}")
        if self.step < self.segment.step:
            raise ValueError(f"step {self.step} is before the segment that began at {self.segment.step}")
        self._check_lanes()
        if self.base is not None:
            self._check_base(self.base)
        self._check_begun()

    def _check_lanes(self) -> None:
        world_size, num_lanes = self.segment.world_size, self.segment.num_lanes
        if not self.ranks or self.ranks.stops[-1] > world_size:
            raise ValueError(f"it holds the lanes of ranks {self.ranks}, of {world_size} ranks")
        held = self.ranks.size * num_lanes // world_size
        if not len(self.done) == len(self.offsets) == held:
            raise ValueError(
                f"{self.ranks.size} of {world_size} ranks have {held} of {num_lanes} lanes, and there are "
                f"{len(self.done)} counts of positions and {len(self.offsets)} offsets"
            )
        deal = deal_of(self)
        if isinstance(deal, StreamDeal):
            return
        sizes = deal.limits[self.lanes]
        done, offsets = np.array(self.done), np.array(self.offsets)
        if (done > sizes).any() or (offsets[done == sizes] > 0).any():
            raise ValueError(f"frontiers {self.done[:8]}, {self.offsets[:8]} lie behind lanes of {sizes[:8]} positions")

    def _check_base(self, base: Rest) -> None:
        epochs = [left.epoch for left in base.begun]
        if not self.identity.endless and (epochs != [self.epoch] or base.next_epoch != self.epoch + 1):
            raise ValueError(f"epochs {epochs} before {base.next_epoch} cannot be the rest of epoch {self.epoch}")
        for left in base.begun:
            if left.positions and left.positions.stops[-1] > self.identity.rows_of(left.epoch):
                raise ValueError(f"the rest names positions outside of epoch {left.epoch}")

    def _check_begun(self) -> None:
        keys = [(one.epoch, one.position) for one in self.begun]
        if keys != sorted(set(keys)):
            raise ValueError(f"positions that have begun are named once and in order, got {keys[:8]}")
        if keys and self.base is None:
            raise ValueError("a whole epoch has no position that has begun")
        if self.base is not None and inside(self.base, self.identity, self.begun) != self.begun:
            raise ValueError(f"positions that have begun are not among those that were left: {keys[:8]}")

    @property
    def lanes(self) -> Int64Array:
        """The lanes that it holds, ascending: int64, shape (held,)."""
        return lanes_of(self.segment, self.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether it is the state of the whole job, and not a part."""
        return self.ranks.size == self.segment.world_size

    @property
    def is_start(self) -> bool:
        """Whether nothing of the epoch was read."""
        return self.step == 0 and self.base is None and not any(self.done) and not any(self.offsets)

    def to_plain(self) -> dict[str, object]:
        """Return the state as JSON-able values."""
        return {"format": FLOW_FORMAT, **to_plain(self)}

    @classmethod
    def from_plain(cls, plain: object) -> FlowState:
        """Return the state that `to_plain` made ``plain`` of; StateError, saying why, where it is none."""
        if not isinstance(plain, Mapping):
            raise StateError(f"the state of a flow is a mapping, got {type(plain).__name__}")
        values = dict(plain)
        if values.pop("format", None) != FLOW_FORMAT:
            raise StateError(
                f"the 'format' of a flow's state is {FLOW_FORMAT!r}, got {plain.get('format')!r}: the state was saved "
                'by a reader whose transform is not declared rows="many"'
            )
        found: FlowState = from_plain(cls, values, "the state of a flow", error=StateError)
        return found


def lanes_of(segment: Segment, ranks: Intervals) -> Int64Array:
    """Return the lanes that ``ranks`` read in ``segment``, ascending: int64.

    Step s gives micro-batch m = m0 + (s - s0) * W + rank, which is of lane m mod L.

    >>> segment = Segment(micro_batch=1, step=0, num_lanes=6, batch_size=1, world_size=3)
    >>> lanes_of(segment, Intervals.of([(0, 1)])).tolist(), lanes_of(segment, Intervals.of([(1, 3)])).tolist()
    ([1, 4], [0, 2, 3, 5])
    """
    world_size = segment.world_size
    reads = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in ranks)])
    turns = np.arange(segment.num_lanes // world_size, dtype=np.int64)[:, None] * world_size
    return np.asarray((turns + np.sort((reads + segment.micro_batch) % world_size)).reshape(-1), np.int64)


def deal_of(state: FlowState) -> EpochDeal | StreamDeal:
    """Return the deal of positions to the lanes of ``state``. Its micro-batches have no meaning."""
    identity, lanes, base = state.identity, state.segment.num_lanes, state.base
    if identity.endless:
        start = base or Rest(begun=(), next_epoch=0)
        rows = identity.tokens or identity.rows
        return StreamDeal(first=0, num_lanes=lanes, batch_size=1, rows=rows, start=start, unit=identity.unit)
    whole = Left(epoch=state.epoch, positions=Intervals.whole(identity.rows), num_lanes=lanes, rotation=0)
    left = base.begun[0] if base else whole
    return EpochDeal(first=0, num_lanes=lanes, batch_size=1, tail="short", left=left)


def inside(rest: Rest, identity: Identity, begun: tuple[Begun, ...]) -> tuple[Begun, ...]:
    """Return those of ``begun`` whose positions are in ``rest``."""
    kept = []
    for epoch in dict.fromkeys(one.epoch for one in begun):
        left, here = rest.of(epoch, identity.rows_of(epoch)), [one for one in begun if one.epoch == epoch]
        at = np.searchsorted(left.starts, [one.position for one in here], side="right") - 1
        kept += [one for one, which in zip(here, at, strict=True) if which >= 0 and one.position < left.stops[which]]
    return tuple(kept)
