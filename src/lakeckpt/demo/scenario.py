"""This module describes the demo's runs as plain values: sizes, topologies and faults.

A run is a list of phases. A phase is one start of all ranks, with one topology. It ends by its fault, or, for the last
phase, by the end of training. One ``lakeckpt run`` starts the ranks of all phases up to the next change of topology, or
loss of the whole job (`DemoConfig.launches`). A fault is addressed by (rank, optimizer step, point in the step). Ranks
get a `DemoConfig` as JSON. Nothing here starts a process, reads a clock or imports torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = [
    "BATCH_SIZE",
    "LENGTH",
    "NUM_LANES",
    "POINTS",
    "WEIGHTS",
    "DemoConfig",
    "Phase",
    "PlannedFault",
    "scenario_for",
]

NUM_LANES, BATCH_SIZE, LENGTH = 8, 8, 64
WEIGHTS = {"prose": 0.7, "code": 0.3}
"""The tables of the lake → the share of the sequences that each has."""
_MICRO_BATCHES = 4
"""Micro-batches of an optimizer step, on every number of ranks that divides it."""
POINTS = {
    "before-update": "between the backward pass and the optimizer's update",
    "before-cut": "after the optimizer's update, before the cut",
    "after-order": "after a step that ordered a save, while agents write it",
}
"""Point in a step → what happens there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """SIGKILL for ``rank`` in optimizer step ``step`` (counted from 1) at ``point``; ``whole_job`` kills all ranks."""

    rank: int
    step: int
    point: str
    whole_job: bool = False

    @property
    def title(self) -> str:
        """The fault, in words."""
        victims = "the whole job" if self.whole_job else f"rank {self.rank}"
        return f"{victims}, step {self.step}: {POINTS[self.point]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One start of the ranks: the data-parallel world size, loader workers per rank, and the fault that ends it."""

    world_size: int
    workers: int
    fault: PlannedFault | None = None

    @property
    def accumulate(self) -> int:
        """Micro-batches per rank and optimizer step: a constant global batch if the world size allows it."""
        return max(1, _MICRO_BATCHES // self.world_size)

    @property
    def topology(self) -> str:
        """The topology, in words."""
        ranks, workers = self.world_size, self.workers
        return f"{ranks} rank{'' if ranks == 1 else 's'} × {workers} worker{'' if workers == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """All that a rank must know."""

    lake: str
    folder: str
    steps: int
    save_every: int
    drop_reader_state: bool = False
    phases: tuple[Phase, ...] = ()

    @property
    def checkpoints(self) -> Path:
        """Folder of the run."""
        return Path(self.folder, "checkpoints")

    @property
    def arenas(self) -> Path:
        """Folder of what the ranks capture."""
        return Path(self.folder, "memory")

    @property
    def launches(self) -> list[range]:
        """The phases of each launcher, by number."""
        ends = [
            number
            for number, (one, other) in enumerate(pairwise(self.phases), 1)
            if one.topology != other.topology or (one.fault is not None and one.fault.whole_job)
        ]
        return [range(start, stop) for start, stop in pairwise([0, *ends, len(self.phases)])]

    @property
    def records(self) -> Path:
        """Folder of what the ranks record."""
        return Path(self.folder, "records")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        plain: dict[str, Any] = json.loads(text)
        phases = (phase | {"fault": phase["fault"] and PlannedFault(**phase["fault"])} for phase in plain.pop("phases"))
        return cls(**plain, phases=tuple(Phase(**phase) for phase in phases))


def scenario_for(steps: int, save_every: int, *, kills: int) -> tuple[Phase, ...]:
    """Return the phases of the run with the first ``kills`` of five faults, over ``steps`` optimizer steps.

    The first half has three kills and no change of topology. In the second all processes are killed, agents too; the
    job comes back with twice the ranks (which divide the lanes: the order of sequences stays), is killed there, and
    comes back with three ranks (which do not divide the lanes: the rest is dealt anew) to the end.
    """
    assert 1 <= save_every <= steps // 8, f"{steps} steps, and a save every {save_every}: faults fall between saves"

    def between_saves(share: float) -> int:  # so that some steps must be computed again
        step = max(save_every + 1, round(share * steps))
        return step if step % save_every or save_every == 1 else step + max(1, save_every // 2)

    def at_save(share: float) -> int:
        return max(1, round(share * steps / save_every)) * save_every

    two = {"world_size": 2, "workers": 1}
    faulted = (
        Phase(**two, fault=PlannedFault(rank=1, step=between_saves(0.11), point="before-update")),
        Phase(**two, fault=PlannedFault(rank=0, step=at_save(0.26), point="after-order")),
        Phase(**two, fault=PlannedFault(rank=1, step=between_saves(0.42), point="before-cut")),
        Phase(**two, fault=PlannedFault(rank=0, step=at_save(0.58), point="after-order", whole_job=True)),
        Phase(world_size=4, workers=2, fault=PlannedFault(rank=2, step=between_saves(0.78), point="before-update")),
    )
    return (*faulted[:kills], Phase(world_size=3, workers=0))
