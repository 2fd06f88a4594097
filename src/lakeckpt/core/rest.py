"""What has nobody consumed yet?  The rest of the data, at an instant.

A rest is all that is needed to go on: what is left of the epochs that have begun, with the layouts they began with, and
the first epoch that nobody has touched. It never says who is to consume it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.receipts import Span

__all__ = ["Left", "Rest", "spans_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of an epoch that has begun, and the layout that it began with."""

    epoch: int
    positions: Intervals
    num_lanes: int
    rotation: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.num_lanes < 1 or not 0 <= self.rotation < self.num_lanes:
            raise ValueError(f"epoch {self.epoch} cannot have {self.num_lanes} lanes rotated by {self.rotation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What nobody has consumed: parts of epochs that have begun, and every epoch from ``next_epoch`` on."""

    begun: tuple[Left, ...]
    next_epoch: int

    def __post_init__(self) -> None:
        epochs = [left.epoch for left in self.begun]
        if epochs != sorted(set(epochs)) or (epochs and epochs[-1] >= self.next_epoch):
            raise ValueError(f"epochs {epochs} before {self.next_epoch} are not in order")

    def of(self, epoch: int, rows: int) -> Intervals:
        """Return what is left of ``epoch``, which has ``rows`` rows."""
        if epoch >= self.next_epoch:
            return Intervals.whole(rows)
        return next((left.positions for left in self.begun if left.epoch == epoch), Intervals.empty())

    def plus(self, spans: list[Span], layouts: Mapping[int, tuple[int, int]]) -> Rest:
        """Return the rest with ``spans`` put back; ``layouts`` are the lanes and rotation of their epochs."""
        back: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            back.setdefault(span.epoch, []).append((span.start, span.stop))
        begun = {left.epoch: left for left in self.begun}
        for epoch, pairs in back.items():
            positions = Intervals.of(pairs).union(begun[epoch].positions if epoch in begun else Intervals.empty())
            lanes, rotation = layouts[epoch]
            begun[epoch] = Left(epoch=epoch, positions=positions, num_lanes=lanes, rotation=rotation)
        return Rest(begun=tuple(begun[epoch] for epoch in sorted(begun)), next_epoch=self.next_epoch)


def spans_of(epoch: int, positions: Iterable[tuple[int, int]]) -> list[Span]:
    """Return ``positions``, as (start, stop), of ``epoch`` as spans."""
    return [Span(epoch=epoch, start=start, stop=stop) for start, stop in positions]
