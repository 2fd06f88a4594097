"""This module writes and reads the tokens that each rank really used, in each optimizer step of each launch.

The training loop appends one JSON line per event to a file of its own (one per launch and rank), with one ``write``
each, so a SIGKILL loses at most the last line. `surviving_steps` joins the launches to the history that the final
weights were made by, from the step that each launch restored.

Tokens are recorded by the numbers that they carry (`lakeckpt.demo.lake`), so nothing here asks lakeckpt which tokens
were read: the audit is compared with these records.
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

__all__ = ["Launch", "Packed", "RecordedStep", "TokenCount", "Writer"]
__all__ += ["count_tokens", "read_launches", "record_path", "surviving_steps"]

Packed = tuple[str, int, tuple[int, ...]]
"""One sequence: its source, the source's epoch, and the numbers of its tokens."""


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
class RecordedStep:
    """One optimizer step of all ranks. ``used`` maps a rank to the sequences that it used, in order.

    ``loss`` is the mean over tokens (nats), ``digest`` that of the weights after the step on rank 0.
    """

    launch: int
    step: int
    used: Mapping[int, tuple[Packed, ...]]
    loss: float
    digest: str

    @property
    def sequences(self) -> list[Packed]:
        """The sequences of all ranks."""
        return [one for rank in sorted(self.used) for one in self.used[rank]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the ranks. ``steps`` holds those whose gradients every rank made; ``ended``: training came to its
    end."""

    launch: int
    world_size: int
    restored: int
    steps: Mapping[int, RecordedStep]
    ended: bool
    began_s: float = 0.0
    """When all ranks had the gradients of the first step, in seconds since 1970."""


def read_launches(folder: Path) -> list[Launch]:
    """Return all launches that restored, in order."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("launch-*-rank-*.jsonl")):
        found.setdefault(int(path.name.split("-")[1]), []).append(path)
    launches = (_launch(number, paths) for number, paths in sorted(found.items()))
    return [launch for launch in launches if launch is not None]


def surviving_steps(launches: Sequence[Launch]) -> list[RecordedStep]:
    """Return the steps that the final weights were made by, in order.

    The steps of a launch survive from where it restored up to where a later launch restored. Raises ValueError if a
    step of that history was recorded by no launch, or not by all of its ranks.
    """
    history: list[RecordedStep] = []
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
class TokenCount:
    """How often the tokens of a source counted in one epoch of it."""

    source: str
    epoch: int
    complete: bool
    """True if a later epoch has begun, so that no token may be missing."""
    counted: int
    lost: int
    """Tokens that never counted; 0 if the epoch is not complete."""
    repeated: int
    """How many times too many tokens counted; a token that the table does not have is always one too many."""


def count_tokens(history: Sequence[RecordedStep], lake: Mapping[str, npt.NDArray[np.int64]]) -> list[TokenCount]:
    """Count the tokens of each source in ``history``. ``lake`` maps a source to the numbers that its table has."""
    used: dict[tuple[str, int], list[int]] = {}
    for step in history:
        for source, epoch, numbers in step.sequences:
            used.setdefault((source, epoch), []).extend(numbers)
    found = []
    for source, table in lake.items():
        newest = max((epoch for name, epoch in used if name == source), default=0)
        for epoch in range(newest + 1):
            counted, complete = used.get((source, epoch), []), epoch < newest
            once = int(np.isin(table, np.array(counted, np.int64)).sum())
            found.append(
                TokenCount(
                    source=source,
                    epoch=epoch,
                    complete=complete,
                    counted=len(counted),
                    lost=len(table) - once if complete else 0,
                    repeated=len(counted) - once,
                )
            )
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file without a last line that a kill cut short."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def _launch(launch: int, paths: Sequence[Path]) -> Launch | None:
    """Join the files of all ranks; None if a rank was killed before it had restored."""
    events = [(rank, event) for rank, path in enumerate(paths) for event in _lines(path)]
    starts = [event for _, event in events if event["kind"] == "start"]
    world_size = starts[0]["world_size"] if starts else 1
    if len(starts) < world_size:
        return None
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    digests: dict[int, str] = {}
    for rank, event in events:
        if event["kind"] == "step":
            steps.setdefault(event["step"], {})[rank] = event
        elif event["kind"] == "weights":
            digests[event["step"]] = event["digest"]
    whole = {number: by_rank for number, by_rank in sorted(steps.items()) if len(by_rank) == world_size}
    restored = {event["restored"] for event in starts}
    if len(restored) != 1:
        raise ValueError(f"launch {launch}: the ranks recorded different values of 'restored': {sorted(restored)}")
    return Launch(
        launch=launch,
        world_size=world_size,
        restored=restored.pop(),
        steps={number: _join(launch, number, by_rank, digests.get(number, "")) for number, by_rank in whole.items()},
        ended=any(event["kind"] == "end" for _, event in events),
        began_s=max(event.get("at_s", 0.0) for event in whole[min(whole)].values()) if whole else 0.0,
    )


def _join(launch: int, number: int, by_rank: Mapping[int, Mapping[str, Any]], digest: str) -> RecordedStep:
    events = by_rank.values()
    tokens = sum(len(numbers) for event in events for _, _, numbers in event["used"])
    return RecordedStep(
        launch=launch,
        step=number,
        used={
            rank: tuple((source, epoch, tuple(numbers)) for source, epoch, numbers in event["used"])
            for rank, event in by_rank.items()
        },
        loss=sum(event["loss_sum"] for event in events) / max(1, tokens),
        digest=digest,
    )
