"""This module holds the state of a reader: the place of a job in its data.

A state names the order it belongs to (`lakeckpt.core.identity.Identity`), the segments of the current epoch, and how
many steps of it are done. A *frontier* is the place of a lane: (positions that are consumed, items consumed of the
position that follows).

* In *lockstep* the frontiers follow from the step. The state is the same on every rank, and holds no frontier.
* If a position yields any number of items (`lakeckpt.core.identity.Maker`), consumption depends on the data. Each rank
  knows the frontiers of its own lanes, so that its state is a *part*: `Held` has the frontiers of some ranks, and
  `lakeckpt.core.merge` joins parts.

The state of a mixture has several orders, one for each source, which are endless streams, and one list of segments,
each with the weights of all sources. `State.of` looks at one source: then it is as the state of a stream of its own, of
which each micro-batch has a share. Of each source that has a maker, it holds the frontiers of its own lanes.

From a state, `lakeckpt.core.plan` computes everything else: which rank gets which rows next, and which rows have been
consumed. States are values: every change makes a new state. A state never lists single rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import derive_key
from lakeckpt.core.identity import MAX_ROWS, Identity, Mixing
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Begun, Rest, inside
from lakeckpt.errors import StateError
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain

__all__ = [
    "FORMAT",
    "MAX_EPOCH",
    "MAX_LANES",
    "Frontier",
    "Held",
    "Segment",
    "State",
    "depends_on_data",
    "lanes_of",
]

FORMAT = "lakeckpt.reader/1"
"""The name and major version of a plain state."""

MAX_EPOCH = 1 << 31
"""The last epoch that can be read; an endless stream has no limit."""

MAX_LANES = 1 << 20
"""The most lanes of an epoch: planning takes time and memory in proportion to them."""

Int64Array = npt.NDArray[np.int64]
Frontier = tuple[int, int]
"""(positions of a lane that are consumed, items consumed of the position that follows)."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of an epoch with one topology and batch size; every micro-batch below its first was consumed before."""

    micro_batch: int
    """m0: the first micro-batch."""
    step: int
    """s0: the first step of each rank."""
    num_lanes: int
    batch_size: int
    world_size: int
    weights: tuple[int, ...] | None = None
    """The weights of the sources of a mixture; None: the reader is none."""
    carried: tuple[int, ...] | None = None
    """For each source, what a lane had too many of it when the segment began (`lakeckpt.core.streams.mixing.Share`);
    None: nothing."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "step", "num_lanes", "batch_size", "world_size"):
            least = 0 if name in ("micro_batch", "step") else 1
            if getattr(self, name) < least:
                raise ValueError(f"a segment's {name} is at least {least}, got {getattr(self, name)}")
        if self.num_lanes > MAX_LANES:
            raise ValueError(f"an epoch has at most {MAX_LANES} lanes, got {self.num_lanes}")
        if self.num_lanes % self.world_size:
            raise ValueError(f"{self.world_size} ranks do not divide {self.num_lanes} lanes")

    @property
    def topology(self) -> tuple[int, int, int]:
        """(num_lanes, batch_size, world_size)."""
        return self.num_lanes, self.batch_size, self.world_size


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The frontiers of all lanes of some ranks, since the lanes were dealt."""

    ranks: Intervals
    done: tuple[Count, ...]
    """For each lane of the ranks, in ascending order: the positions that are consumed. Of a mixture, these lanes of
    each source that has a maker, source after source."""
    offsets: tuple[Count, ...]
    """For each of ``done``: the items that are consumed of the position that follows."""

    def __post_init__(self) -> None:
        if not self.ranks or len(self.done) != len(self.offsets):
            raise ValueError(
                f"the lanes of the ranks {self.ranks} have {len(self.done)} counts of positions and "
                f"{len(self.offsets)} offsets"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a reader: of the whole job, or if consumption depends on the data, the part of some ranks."""

    orders: tuple[Identity, ...]
    """One; of a mixture, one for each source."""
    epoch: Count
    """The current epoch; 0 if the stream is endless (it counts its epochs itself)."""
    segments: tuple[Segment, ...]
    """At least one; the last is the current segment. If frontiers are held, the current segment alone; of a mixture,
    segments with equally many lanes."""
    step: Count
    """Steps done, of this epoch; every rank has done as many."""
    bases: tuple[Rest, ...] = ()
    """For each of ``orders``, the rest when the first of ``segments`` began (if frontiers are held: when the lanes were
    dealt), positions that had begun included; empty: a whole epoch, or stream."""
    begun: tuple[Begun, ...] = ()
    """The positions of the base that had begun when the lanes were dealt."""
    held: Held | None = None
    """The frontiers, if consumption depends on the data; None: they follow from ``step``."""
    mixing: Mixing | None = None
    """How the sources of a mixture take turns; None: there is one source."""
    source: int | None = None
    """The number of the source of a mixture that is looked at (`of`); None: all of them."""

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("a reader state has at least one segment")
        self._check_orders()
        if self.epoch < 0:
            raise ValueError(f"epochs are counted from 0, got {self.epoch}")
        if self.is_endless and self.epoch:
            raise ValueError(f"an endless stream counts its epochs itself, got epoch {self.epoch}")
        self._check_segments()
        for order, base in zip(self.orders, self.bases, strict=bool(self.bases)):
            self._check_base(order, base)
        self._check_begun()
        if self.held is not None:
            self._check_held(self.held)

    def _check_orders(self) -> None:
        if (self.held is None) != all(one.maker is None for one in self.orders):
            raise ValueError("a state holds frontiers if a maker yields any number of items, and only then")
        count = 1 if self.mixing is None else len(self.mixing.names)
        if len(self.orders) != count or len(self.bases) not in (0, count):
            raise ValueError(f"{count} sources, {len(self.orders)} orders, and what was left of {len(self.bases)}")
        for one in self.segments:
            counts = {len(each) for each in (one.weights, one.carried) if each is not None}
            if (one.weights is None) != (self.mixing is None) or counts - {count}:
                raise ValueError(f"the segments of {count} sources have weights for each, got {one.weights}")
        if self.mixing is not None and not all(one.endless for one in self.orders):
            raise ValueError("the sources of a mixture are endless streams")

    def _check_segments(self) -> None:
        starts = [(segment.step, segment.micro_batch) for segment in self.segments]
        steps, numbers = [step for step, _ in starts], [number for _, number in starts]
        if steps != sorted(steps) or numbers != sorted(numbers) or self.step < steps[-1]:
            raise ValueError(f"segments begin at (step, micro-batch) {starts}, and the state is at step {self.step}")
        if not self.bases and self.held is None and starts[0] != (0, 0):
            raise ValueError(f"the first segment of a whole epoch begins at step 0, not at {starts[0]}")
        reached = numbers[-1] + (self.step + 1 - steps[-1]) * self.segment.world_size
        if reached * max(segment.batch_size for segment in self.segments) > MAX_ROWS:
            raise ValueError(
                f"{reached} micro-batches of up to {self.segment.batch_size} rows are more than {MAX_ROWS}"
            )

    def _check_base(self, order: Identity, base: Rest) -> None:
        epochs = [left.epoch for left in base.begun]
        if not order.endless and (epochs != [self.epoch] or base.next_epoch != self.epoch + 1):
            raise ValueError(f"epochs {epochs} before {base.next_epoch} cannot be the rest of epoch {self.epoch}")
        for left in base.begun:
            rows = (left.order or order).rows_of(left.epoch)
            if left.positions and left.positions.stops[-1] > rows:
                raise ValueError(f"the rest names positions outside of epoch {left.epoch} of {rows} rows")

    def _check_begun(self) -> None:
        keys = [(one.source or 0, one.epoch, one.position) for one in self.begun]
        if keys != sorted(set(keys)):
            raise ValueError(f"positions that have begun are named once and in order, got {keys[:8]}")
        for source in dict.fromkeys(one.source for one in self.begun):
            here, number = tuple(one for one in self.begun if one.source == source), source or 0
            is_known = (source is None) == (self.mixing is None) and number < len(self.bases)
            if not is_known or inside(self.bases[number], self.orders[number], here) != here:
                raise ValueError(f"positions that have begun are not among those that were left: {keys[:8]}")

    def _check_held(self, held: Held) -> None:
        world_size, num_lanes = self.segment.world_size, self.segment.num_lanes
        if len(self.segments) > 1 and self.mixing is None:
            raise ValueError(f"frontiers are of the lanes of one segment, got {len(self.segments)} segments")
        if any(one.num_lanes != num_lanes for one in self.segments):
            raise ValueError("frontiers are of the lanes since they were dealt, and the segments have other lanes")
        if held.ranks.stops[-1] > world_size:
            raise ValueError(f"it holds the lanes of ranks {held.ranks}, of {world_size} ranks")
        count = held.ranks.size * num_lanes // world_size
        if len(held.done) != count * len(self.makers):
            sources = "" if self.mixing is None else f" of each of {len(self.makers)} sources"
            raise ValueError(
                f"{held.ranks.size} of {world_size} ranks have {count} of {num_lanes} lanes{sources}, and there are "
                f"{len(held.done)} counts of positions and {len(held.offsets)} offsets"
            )

    def moved(self, *, step: int) -> State:
        """Return the state with ``step`` steps done, in the current segment. The segments are not checked again."""
        if step < self.segments[-1].step:
            raise ValueError(f"step {step} is before the segment that began at {self.segments[-1].step}")
        found = object.__new__(State)
        for name in State.__slots__:
            object.__setattr__(found, name, step if name == "step" else getattr(self, name))
        return found

    def of(self, source: int) -> State:
        """Return this state, of which one source of a mixture is looked at. Only a source with a maker holds
        frontiers, which follow from no segment before the current one."""
        assert self.mixing is not None
        values = {name: getattr(self, name) for name in State.__slots__} | {"source": source}
        if self.held is not None:
            values["held"] = self._held_of(self.held, source)
            values["begun"] = tuple(one for one in self.begun if one.source == source)
            if values["held"] is not None:
                values["segments"] = self.segments[-1:]
        found = object.__new__(State)
        for name, value in values.items():
            object.__setattr__(found, name, value)
        return found

    def _held_of(self, held: Held, source: int) -> Held | None:
        if source not in self.makers:
            return None
        count = len(held.done) // len(self.makers)
        mine = slice((start := self.makers.index(source) * count), start + count)
        return Held(ranks=held.ranks, done=held.done[mine], offsets=held.offsets[mine])

    @property
    def identity(self) -> Identity:
        """The order; of a mixture, that of the source that is looked at."""
        assert self.mixing is None or self.source is not None, "a mixture has no order of its own"
        return self.orders[self.source or 0]

    @property
    def base(self) -> Rest | None:
        """The rest when the first of ``segments`` began; of a mixture, that of the source that is looked at."""
        assert self.mixing is None or self.source is not None, "a mixture has no order of its own"
        return self.bases[self.source or 0] if self.bases else None

    def order_of(self, epoch: int) -> Identity:
        """Return the order of ``epoch``, which is not over; of a mixture, of the source that is looked at."""
        begun = () if self.base is None else self.base.begun
        return next((left.order for left in begun if left.epoch == epoch and left.order is not None), self.identity)

    def rows_of(self, epoch: int) -> int:
        """Return the positions of ``epoch``, as `order_of`."""
        return self.order_of(epoch).rows_of(epoch)

    @property
    def epoch_orders(self) -> tuple[Identity, ...]:
        """The orders of the epochs that have begun and of those to come, of the source that is looked at."""
        begun = () if self.base is None else self.base.begun
        return tuple(dict.fromkeys([*(self.order_of(left.epoch) for left in begun), self.identity]))

    @property
    def makers(self) -> tuple[int, ...]:
        """The numbers of the orders that have a maker, so that consumption depends on the data."""
        return tuple(number for number, one in enumerate(self.orders) if one.maker is not None)

    @property
    def is_endless(self) -> bool:
        """True if the stream is endless, as those of all sources of a mixture are."""
        return self.orders[0].endless

    @property
    def digest(self) -> str:
        """The name by which receipts name the reader: that of its order, or of the orders of all sources."""
        if self.mixing is None:
            return self.identity.digest
        return f"{derive_key(' '.join(one.digest for one in self.orders))[0]:016x}"

    @property
    def segment(self) -> Segment:
        """The current segment."""
        return self.segments[-1]

    @property
    def lanes(self) -> Int64Array:
        """The lanes whose frontiers it holds, ascending: int64, shape (held,)."""
        return lanes_of(self.segment, Intervals.empty() if self.held is None else self.held.ranks)

    @property
    def frontiers(self) -> dict[Any, Frontier]:
        """Lane → frontier, for each lane whose frontier it holds; of a mixture, (source, lane) → frontier."""
        held = self.held
        if held is None:
            return {}
        keys: list[Any] = self.lanes.tolist()
        if self.mixing is not None and self.source is None:
            keys = [(source, lane) for source in self.makers for lane in keys]
        return dict(zip(keys, zip(held.done, held.offsets, strict=True), strict=True))

    @property
    def is_whole(self) -> bool:
        """True if it is the state of the whole job, and not a part."""
        return self.held is None or self.held.ranks.size == self.segment.world_size

    @property
    def is_start(self) -> bool:
        """True if nothing of the epoch was read."""
        held = self.held
        moved = held is not None and (any(held.done) or any(held.offsets))
        return self.step == 0 and not self.bases and len(self.segments) == 1 and not moved

    def to_plain(self) -> dict[str, object]:
        """Return the state as JSON-able values. It has ``orders`` and ``bases`` if it is of a mixture, else
        ``identity`` and ``base``; fields of frontiers only if it holds any."""
        assert self.source is None, "the state of one source is derived from that of the mixture"
        plain: dict[str, Any] = {"format": FORMAT, **to_plain(self)}
        del plain["source"]
        orders, bases = (plain.pop(name) for name in ("orders", "bases"))
        for order in orders:
            for name in ("maker", "phase"):
                if not order[name]:
                    del order[name]
        if self.held is None:
            del plain["held"], plain["begun"]
        if self.mixing is None:
            del plain["mixing"]
            return {**plain, "identity": orders[0], "base": bases[0] if bases else None}
        return {**plain, "orders": orders, "bases": bases}

    @classmethod
    def from_plain(cls, plain: object) -> State:
        """Return the state that `to_plain` made ``plain`` of; StateError, saying why, if it is none."""
        if not isinstance(plain, Mapping):
            raise StateError(f"a reader state is a mapping, got {type(plain).__name__}")
        values = dict(plain)
        if values.pop("format", None) != FORMAT:
            raise StateError(f"a reader state's 'format' is {FORMAT!r}, got {plain.get('format')!r}")
        if "source" in values:
            raise StateError("a reader state has no field 'source': this is of one source of a mixture")
        if "mixing" not in values:
            values = _as_one(values)
        try:
            found: State = from_plain(cls, values, "a reader state", error=StateError)
        except StateError as error:  # a state of one order names its fields in its own words
            words = str(error).replace("field 'orders[0]", "field 'identity").replace("field 'bases[0]", "field 'base")
            raise StateError(str(error) if "mixing" in plain else words) from None
        return found


def _as_one(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain fields of a state of one order as those of the class."""
    values = dict(plain)
    if wrong := values.keys() & {"orders", "bases"}:
        raise StateError(f"a reader state, field {min(wrong)!r}: only the state of a mixture has it")
    if "identity" not in values:
        raise StateError("a reader state, field 'identity': it is missing")
    order, base = values.pop("identity"), values.pop("base", None)
    return {**values, "orders": [order], "bases": [] if base is None else [base]}


def depends_on_data(plain: Mapping[str, Any]) -> bool:
    """Return whether a plain state is of a reader whose consumption depends on the data."""
    return plain.get("held") is not None


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
