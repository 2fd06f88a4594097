"""What happens to the demo's run, and when: sizes, topologies and faults as plain values.

How: a run is a list of phases. Each phase is one launch of torchrun with a topology, and ends by its fault, or, for the
last one, by the end of training. Faults are addressed by (rank, optimizer step, point in the step).

Never: nothing here starts a process, reads a clock or imports torch; a config goes to the ranks as JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from lakeckpt.errors import ConfigError

__all__ = [
    "MOST_KILLS",
    "DemoConfig",
    "Fault",
    "Phase",
    "Point",
    "scenario_for",
    "steps_per_epoch",
    "topology",
    "usual_save_every",
]

Point = Literal["before-update", "before-cut", "before-part", "before-commit"]
_POINTS: tuple[str, ...] = get_args(Point)
MICRO_BATCHES_PER_STEP = 4
"""Micro-batches that make one optimizer step, on every number of ranks that divides it."""
MOST_KILLS = 5

WHAT_HAPPENS: dict[str, str] = {
    "before-update": "between the backward pass and the optimizer's update",
    "before-cut": "after the optimizer's update, before the cut",
    "before-part": "during a save, before its part was published",
    "before-commit": "during a save, all data written, before the commit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """SIGKILL for ``rank`` in optimizer step ``step`` (counted from 1) at ``point``; ``whole_job`` kills all ranks."""

    rank: int
    step: int
    point: Point
    whole_job: bool = False

    def __post_init__(self) -> None:
        if self.point not in _POINTS:
            raise ValueError(f"point must be one of {', '.join(_POINTS)}, got {self.point!r}")
        if self.rank < 0 or self.step < 1:
            raise ValueError(f"a fault needs rank >= 0 and step >= 1, got rank {self.rank} and step {self.step}")

    @property
    def title(self) -> str:
        who = "the whole job" if self.whole_job else f"rank {self.rank}"
        return f"{who}, step {self.step}: {WHAT_HAPPENS[self.point]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One launch: its data-parallel world size, loader workers per rank, and the fault that ends it."""

    world_size: int
    workers: int
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.workers < 0:
            raise ValueError(f"need world_size >= 1 and workers >= 0, got {self.world_size} and {self.workers}")
        if self.fault is not None and self.fault.rank >= self.world_size:
            raise ValueError(f"the fault names rank {self.fault.rank}, but there are {self.world_size} ranks")

    @property
    def accumulate(self) -> int:
        """Micro-batches per rank and optimizer step: a constant global batch where the world size allows it."""
        return max(1, MICRO_BATCHES_PER_STEP // self.world_size)

    @property
    def topology(self) -> str:
        return topology(self.world_size, self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Everything that a rank must know, equal in the faulted and the fault-free run."""

    lake: str
    checkpoints: str
    records: str
    epochs: int
    batch_size: int
    save_every: int
    num_lanes: int
    seed: int
    learning_rate: float
    steps_per_epoch: int
    drop_reader_state: bool = False
    phases: tuple[Phase, ...] = field(default=())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        plain: dict[str, Any] = json.loads(text)
        phases = []
        for phase in plain.pop("phases"):
            fault = phase.pop("fault")
            phases.append(Phase(**phase, fault=None if fault is None else Fault(**fault)))
        return cls(**plain, phases=tuple(phases))


def topology(world_size: int, workers: int) -> str:
    """In words."""
    return f"{world_size} rank{'' if world_size == 1 else 's'} × {workers} worker{'' if workers == 1 else 's'}"


def steps_per_epoch(rows: int, num_lanes: int, batch_size: int) -> int:
    """Optimizer steps of an epoch where the world size divides `MICRO_BATCHES_PER_STEP`."""
    per_lane = math.ceil(math.ceil(rows / num_lanes) / batch_size)
    return math.ceil(per_lane * num_lanes / MICRO_BATCHES_PER_STEP)


def usual_save_every(steps: int) -> int:
    """32, or less where an epoch of ``steps`` is so short that the faults would not fall between saves: there may be
    little text, since Debian's Python comes without its tests."""
    return max(1, min(32, steps // 4))


def scenario_for(steps: int, save_every: int, *, kills: int = MOST_KILLS) -> tuple[Phase, ...]:
    """The faulted run over two epochs of ``steps`` optimizer steps each, with the first ``kills`` of five faults.

    In the first epoch three kills and no change of topology; in the second a lost node, a return with twice the ranks
    (which divide the lanes: the order of rows stays), a kill there, and a return with three ranks (which do not divide
    the lanes: the rest of the epoch is re-cut) to the end.
    """
    if not 1 <= kills <= MOST_KILLS:
        raise ConfigError(f"kills must be 1 to {MOST_KILLS}, got {kills}")
    if steps < 8:
        raise ConfigError(f"an epoch has {steps} steps, and the faults need 8 to fall apart: use more rows")
    if not 1 <= save_every <= steps // 4:
        raise ConfigError(
            f"an epoch has {steps} steps, so saves must come at least every {steps // 4} steps for the faults to fall "
            f"between them, got {save_every}: save more often, or use more rows"
        )

    def between_saves(share: float) -> int:  # so that something must be made again
        step = max(save_every + 1, round(share * steps))
        return step if step % save_every or save_every == 1 else step + max(1, save_every // 2)

    def at_save(share: float) -> int:
        return max(1, round(share * steps / save_every)) * save_every

    two = {"world_size": 2, "workers": 1}
    faulted = (
        Phase(**two, fault=Fault(rank=1, step=between_saves(0.22), point="before-update")),
        Phase(**two, fault=Fault(rank=0, step=at_save(0.52), point="before-commit")),
        Phase(**two, fault=Fault(rank=1, step=between_saves(0.83), point="before-cut")),
        Phase(**two, fault=Fault(rank=0, step=between_saves(1.15), point="before-update", whole_job=True)),
        Phase(world_size=4, workers=2, fault=Fault(rank=2, step=at_save(1.55), point="before-part")),
    )
    return (*faulted[:kills], Phase(world_size=3, workers=0))
