"""Which rows did each rank really use, in which optimizer step of which launch?

How: the training loop itself appends one JSON line per event to a file of its own (one per launch and rank), with one
``write`` each, so that a SIGKILL loses at most the line at hand. `surviving_steps` then works out the history that the
final weights were made by from one fact per launch: the step that it restored.

Never: nothing here asks lakeckpt which rows were read. That is the point: the audit is checked against this.
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
    """Where rank ``rank`` of launch ``launch`` writes."""
    return folder / f"launch-{launch:02d}-rank-{rank:02d}.jsonl"


class Writer:
    """Appends events. Owns its file descriptor; used by one thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def write(self, kind: str, **fields: object) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, **fields}) + "\n").encode())

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step, all ranks together. ``rows`` maps a rank to the ids that it used, in order.

    ``loss`` is the mean over rows (nats per byte), ``began`` and ``ended`` the monotonic clock in seconds (first rank
    in, last rank out), ``digest`` of the weights after the step on rank 0 ("" where it was not taken).
    """

    launch: int
    step: int
    epoch: int
    rows: Mapping[int, tuple[int, ...]]
    loss: float
    began: float
    ended: float
    digest: str

    @property
    def ids(self) -> list[int]:
        return [row for rank in sorted(self.rows) for row in self.rows[rank]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the job. ``steps`` holds those that every rank finished; ``furthest`` is the last that any began.

    ``ready`` is when the last rank had restored; ``final`` the closing record of rank 0 where training ended.
    """

    launch: int
    world_size: int
    workers: int
    restored: int
    ready: float
    steps: Mapping[int, Step]
    furthest: int
    cut_seconds: Mapping[int, float]
    final: Mapping[str, Any] | None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file; a last line that a kill cut short is left out."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def _launch(launch: int, paths: Sequence[Path]) -> Launch | None:
    starts: list[dict[str, Any]] = []
    parts: dict[int, dict[int, dict[str, Any]]] = {}
    cuts: dict[int, float] = {}
    furthest = 0
    final: dict[str, Any] | None = None
    for rank, path in enumerate(paths):
        for event in _lines(path):
            kind = event["kind"]
            if kind == "start":
                starts.append(event)
            elif kind == "enter":
                furthest = max(furthest, event["step"])
            elif kind == "step":
                parts.setdefault(event["step"], {})[rank] = event
            elif kind == "cut":
                cuts[event["step"]] = max(cuts.get(event["step"], 0.0), event["seconds"])
            elif kind == "final" and rank == 0:
                final = event
    if not starts or len(starts) < starts[0]["world_size"]:
        return None
    restored = {start["restored"] for start in starts}
    if len(restored) != 1:
        raise ValueError(f"launch {launch}: the ranks restored different steps: {sorted(restored)}")
    steps = {
        number: _join(launch, number, by_rank)
        for number, by_rank in sorted(parts.items())
        if len(by_rank) == starts[0]["world_size"]
    }
    return Launch(
        launch=launch,
        world_size=starts[0]["world_size"],
        workers=starts[0]["workers"],
        restored=restored.pop(),
        ready=max(start["time"] for start in starts),
        steps=steps,
        furthest=max([furthest, *steps]),
        cut_seconds=cuts,
        final=final,
    )


def _join(launch: int, number: int, by_rank: Mapping[int, Mapping[str, Any]]) -> Step:
    epochs = {event["epoch"] for event in by_rank.values()}
    if len(epochs) != 1:
        raise ValueError(f"launch {launch}, step {number}: the ranks were in different epochs: {sorted(epochs)}")
    rows = sum(len(event["ids"]) for event in by_rank.values())
    return Step(
        launch=launch,
        step=number,
        epoch=epochs.pop(),
        rows={rank: tuple(event["ids"]) for rank, event in by_rank.items()},
        loss=sum(event["loss_sum"] for event in by_rank.values()) / max(1, rows),
        began=min(event["began"] for event in by_rank.values()),
        ended=max(event["ended"] for event in by_rank.values()),
        digest=next((event["digest"] for event in by_rank.values() if event["digest"]), ""),
    )


def read_launches(folder: Path) -> list[Launch]:
    """All launches that got as far as restoring, in order."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("launch-*-rank-*.jsonl")):
        found.setdefault(int(path.name.split("-")[1]), []).append(path)
    launches = (_launch(number, paths) for number, paths in sorted(found.items()))
    return [launch for launch in launches if launch is not None]


def surviving_steps(launches: Sequence[Launch]) -> list[Step]:
    """The steps that the final weights were made by, in order.

    A launch's steps survive from where it restored up to where a later launch restored. Raises ValueError where a step
    of that history was recorded by no launch, or not by all of its ranks.
    """
    history: list[Step] = []
    limit: int | None = None
    for launch in reversed(launches):
        end = max(launch.steps, default=launch.restored) if limit is None else limit
        if end > launch.restored:
            absent = [step for step in range(launch.restored + 1, end + 1) if step not in launch.steps]
            if absent:
                raise ValueError(f"launch {launch.launch}: step {absent[0]} survived, but not every rank recorded it")
            history.extend(launch.steps[step] for step in range(end, launch.restored, -1))
        limit = end if limit is None else limit
        limit = min(limit, launch.restored)
    if limit:
        raise ValueError(f"the first launch restored step {limit}, which no launch made")
    return history[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCount:
    """How often rows counted in one epoch: ``lost`` never, ``repeated`` times too many, ``unknown`` not of the lake."""

    epoch: int
    counted: int
    lost: int
    repeated: int
    unknown: int

    @property
    def exactly_once(self) -> bool:
        return not (self.lost or self.repeated or self.unknown)


def count_rows(history: Sequence[Step], lake: npt.NDArray[np.int64], epochs: int) -> list[RowCount]:
    """The rows of ``lake`` (int64[rows]) that ``history`` counted, for each of ``epochs`` epochs and any other met."""
    by_epoch: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for step in history:
        by_epoch.setdefault(step.epoch, []).extend(step.ids)
    counts = []
    for epoch, used in sorted(by_epoch.items()):
        ids, times = np.unique(np.array(used, dtype=np.int64), return_counts=True)
        known = np.isin(ids, lake)
        counts.append(
            RowCount(
                epoch=epoch,
                counted=len(used),
                lost=int(len(lake) - known.sum()),
                repeated=int((times[known] - 1).sum()),
                unknown=int(times[~known].sum()),
            )
        )
    return counts
