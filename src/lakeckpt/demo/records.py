"""This module writes and reads the rows that each rank really used, in each optimizer step of each launch.

The training loop appends one JSON line per event to a file of its own (one per launch and rank), with one ``write``
each, so a SIGKILL loses at most the last line. `surviving_steps` joins the launches to the history that the final
weights were made by, from the step that each launch restored.

Nothing here asks lakeckpt which rows were read: the audit is compared with these records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Launch", "RowCount", "Step", "Writer", "count_rows", "read_launches", "record_path", "surviving_steps"]


def record_path(folder: Path, launch: int, rank: int) -> Path:
    """Return the file of rank ``rank`` of launch ``launch``."""
    return folder / f"launch-{launch:02d}-rank-{rank:02d}.jsonl"


class Writer:
    """Appends events to a new file. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def write(self, kind: str, **fields: object) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, **fields}) + "\n").encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of all ranks. ``rows`` maps a rank to the ids that it used, in order.

    ``loss`` is the mean over rows (nats per byte), ``digest`` that of the weights after the step on rank 0.
    """

    launch: int
    step: int
    epoch: int
    rows: Mapping[int, tuple[int, ...]]
    loss: float
    digest: str

    @property
    def ids(self) -> list[int]:
        """The ids of all ranks."""
        return [row for rank in sorted(self.rows) for row in self.rows[rank]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the job. ``steps`` holds those that every rank finished; ``ended``: training came to its end."""

    launch: int
    world_size: int
    restored: int
    steps: Mapping[int, Step]
    ended: bool


def read_launches(folder: Path) -> list[Launch]:
    """Return all launches that restored, in order."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("launch-*-rank-*.jsonl")):
        found.setdefault(int(path.name.split("-")[1]), []).append(path)
    launches = (_launch(number, paths) for number, paths in sorted(found.items()))
    return [launch for launch in launches if launch is not None]


def surviving_steps(launches: Sequence[Launch]) -> list[Step]:
    """Return the steps that the final weights were made by, in order.

    The steps of a launch survive from where it restored up to where a later launch restored. Raises ValueError where a
    step of that history was recorded by no launch, or not by all of its ranks.
    """
    history: list[Step] = []
    limit: int | None = None
    for launch in reversed(launches):
        end = max(launch.steps, default=launch.restored) if limit is None else limit
        absent = [step for step in range(launch.restored + 1, end + 1) if step not in launch.steps]
        if absent:
            raise ValueError(f"launch {launch.launch}: step {absent[0]} survived, but not every rank recorded it")
        history.extend(launch.steps[step] for step in range(end, launch.restored, -1))
        limit = min(end, launch.restored)
    if limit:
        raise ValueError(f"the first launch restored step {limit}, which no launch made")
    return history[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCount:
    """How often rows counted in one epoch: ``lost`` never, ``repeated`` times too many, ``unknown`` not in the lake."""

    epoch: int
    counted: int
    lost: int
    repeated: int
    unknown: int

    @property
    def exactly_once(self) -> bool:
        return not (self.lost or self.repeated or self.unknown)


def count_rows(history: Sequence[Step], lake: npt.NDArray[np.int64], epochs: int) -> list[RowCount]:
    """Count the rows of ``lake`` (int64[rows]) in ``history``, for each of ``epochs`` epochs and any other epoch."""
    by_epoch: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for step in history:
        by_epoch.setdefault(step.epoch, []).extend(step.ids)
    return [_count(epoch, used, lake) for epoch, used in sorted(by_epoch.items())]


def _count(epoch: int, used: list[int], lake: npt.NDArray[np.int64]) -> RowCount:
    ids, times = np.unique(np.array(used, dtype=np.int64), return_counts=True)
    known = np.isin(ids, lake)
    return RowCount(
        epoch=epoch,
        counted=len(used),
        lost=int(len(lake) - known.sum()),
        repeated=int((times[known] - 1).sum()),
        unknown=int(times[~known].sum()),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file without a last line that a kill cut short."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def _launch(launch: int, paths: Sequence[Path]) -> Launch | None:
    """Join the files of all ranks; None where a rank was killed before it had restored."""
    events = [(rank, event) for rank, path in enumerate(paths) for event in _lines(path)]
    starts = [event for _, event in events if event["kind"] == "start"]
    world_size = starts[0]["world_size"] if starts else 1
    if len(starts) < world_size:
        return None
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, event in events:
        if event["kind"] == "step":
            steps.setdefault(event["step"], {})[rank] = event
    whole = {number: by_rank for number, by_rank in sorted(steps.items()) if len(by_rank) == world_size}
    return Launch(
        launch=launch,
        world_size=world_size,
        restored=_same(launch, "restored", starts),
        steps={number: _join(launch, number, by_rank) for number, by_rank in whole.items()},
        ended=any(event["kind"] == "end" for _, event in events),
    )


def _join(launch: int, number: int, by_rank: Mapping[int, Mapping[str, Any]]) -> Step:
    events = list(by_rank.values())
    return Step(
        launch=launch,
        step=number,
        epoch=_same(launch, "epoch", events),
        rows={rank: tuple(event["ids"]) for rank, event in by_rank.items()},
        loss=sum(event["loss_sum"] for event in events) / max(1, sum(len(event["ids"]) for event in events)),
        digest="".join(event["digest"] for event in events),
    )


def _same(launch: int, name: str, events: Sequence[Mapping[str, Any]]) -> int:
    values = {event[name] for event in events}
    if len(values) != 1:
        raise ValueError(f"launch {launch}: the ranks recorded different values of {name!r}: {sorted(values)}")
    return int(values.pop())
