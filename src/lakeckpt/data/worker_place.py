"""Where is one worker of somebody else's DataLoader?  Its part of a loader's state.

Worker w of n yields the micro-batches of steps origin + w, origin + w + n, … of its rank, so its place is its next step
(and, in row-wise use, rows of it). torchdata's StatefulDataLoader keeps these parts inside of its own state;
`lakeckpt.convert_state` joins them into one reader state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lakeckpt.core.plain import integer
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import StateInvalid

__all__ = ["WORKER_FORMAT", "WorkerPlace"]

WORKER_FORMAT = "lakeckpt.worker/1"
"""The name and major version of a plain worker place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place of worker ``worker`` of ``workers``."""

    state: ReaderState
    """Its ``step`` is this worker's alone."""
    worker: int
    workers: int
    origin: int
    """The step at which the workers' turns began."""

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers or self.origin < 0:
            raise ValueError(f"no such worker: {self.worker} of {self.workers}, from step {self.origin}")

    @property
    def next_step(self) -> int:
        """The next step of this worker."""
        return self.state.step + (self.worker - (self.state.step - self.origin)) % self.workers

    @property
    def skip(self) -> int:
        """Rows of the next step's micro-batch that are done."""
        return self.state.row if self.next_step == self.state.step else 0

    def at(self, step: int, row: int) -> WorkerPlace:
        """Return this worker's place at ``row`` of ``step``."""
        return replace(self, state=replace(self.state, step=step, row=row))

    def check(self, worker: int, workers: int, world_size: int) -> None:
        """Refuse to be the place of another worker, or of a job of another size."""
        if (self.worker, self.workers) != (worker, workers):
            raise StateInvalid(
                f"this is the state of worker {self.worker} of {self.workers}, given to worker {worker} of {workers}: "
                "convert the loader's state with lakeckpt.convert_state and load the result into the dataset before "
                "its DataLoader is made"
            )
        if self.state.segment.world_size != world_size and not Plan(self.state).at_end:  # an end is anybody's
            raise StateInvalid(
                f"this worker's state is of a job of {self.state.segment.world_size} ranks, not of {world_size}: "
                "convert the loader's state with lakeckpt.convert_state and load the result into the dataset before "
                "its DataLoader is made"
            )

    def to_plain(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "format": WORKER_FORMAT,
            "worker": self.worker,
            "workers": self.workers,
            "origin": self.origin,
            "state": self.state.to_plain(),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WorkerPlace:
        """Return what `to_plain` made ``plain`` of; StateInvalid where it is none."""
        if plain.get("format") != WORKER_FORMAT:
            raise StateInvalid(f"a worker's state has the format {WORKER_FORMAT!r}, got {plain.get('format')!r}")
        try:
            return cls(
                state=ReaderState.from_plain(plain.get("state")),
                worker=integer(plain, "worker"),
                workers=integer(plain, "workers", least=1),
                origin=integer(plain, "origin"),
            )
        except StateInvalid:
            raise
        except ValueError as error:
            raise StateInvalid(f"not the state of a worker: {error}") from error
