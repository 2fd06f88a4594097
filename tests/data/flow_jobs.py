"""Jobs of several ranks that read a flow, each rank in a thread, with a store in memory between them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lakeckpt import LakeLoader, TransformContext, merge_states
from tests.data.reading import as_json, dataset_of, table_of
from tests.patience import PATIENCE_S

Item = tuple[int, int]
"""(id of the row, number of the yielded row)."""


def count_of(row: int) -> int:
    """How many rows `cut` yields of a row."""
    return 17 if row == 11 else (row * 7) % 4


def cut(row: dict[str, Any], context: TransformContext) -> Iterator[dict[str, Any]]:
    """0 to 3 rows of a row, and 17 of one."""
    noise = torch.rand(17, generator=context.generator())
    for part in range(count_of(int(row["id"]))):
        yield {"id": row["id"], "part": part, "noise": noise[part], "name": f"{int(row['id'])}/{part}"}


def whole(rows: int) -> list[Item]:
    """All that `cut` yields of an epoch."""
    return [(row, part) for row in range(rows) for part in range(count_of(row))]


def items(batch: Any) -> list[Item]:
    """The items of a batch."""
    return list(zip(batch["id"].tolist(), batch["part"].tolist(), strict=True)) if len(batch) else []


def loader_of(lake: Path, *, num_workers: int = 0, loader: dict[str, Any] | None = None, **options: Any) -> LakeLoader:
    """A loader of what `cut` yields, in batches of 4, where nothing else is said."""
    made = {"batch_size": 4, "shuffle": True, "transform": cut, "rows": "many", **options}
    return LakeLoader(dataset_of(table_of(lake), **made), num_workers=num_workers, **(loader or {}))


@pytest.fixture
def job_store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A store of a job whose ranks are threads."""
    store = dist.HashStore()
    monkeypatch.setattr("lakeckpt.data.flows.ends.job_store", lambda world_size: store)
    return store


@dataclass
class Ran:
    """What the ranks of a job did in one epoch, or in the first steps of it."""

    batches: list[list[Any]] = field(default_factory=list)
    """The batches of each rank."""
    states: list[dict[str, Any]] = field(default_factory=list)
    """The state of each rank at the end."""
    errors: list[Exception] = field(default_factory=list)

    @property
    def state(self) -> Any:
        """The state of the whole job."""
        return as_json(merge_states(self.states))

    @property
    def items(self) -> list[Item]:
        """All that the ranks got."""
        return [item for rank in self.batches for batch in rank for item in items(batch)]


def run_ranks(lake: Path, world_size: int, *, state: Any = None, steps: int | None = None, **options: Any) -> Ran:
    """Run an epoch, or its rest, or ``steps`` of it, on so many ranks, which do not wait for each other's steps."""
    return run_loaders(
        lambda rank: loader_of(lake, rank=rank, world_size=world_size, **options), world_size, state, steps
    )


def run_loaders(make: Callable[[int], LakeLoader], world_size: int, state: Any, steps: int | None) -> Ran:
    """As `run_ranks`, with the loaders that ``make`` makes of ranks."""
    ran = Ran(batches=[[] for _ in range(world_size)], states=[{} for _ in range(world_size)])

    def rank(number: int) -> None:
        try:
            loader = make(number)
            if state is not None:
                loader.load_state_dict(state)
            ran.batches[number] = list(itertools.islice(iter(loader), steps))
            ran.states[number] = loader.state_dict()
        except Exception as error:
            ran.errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), f"a rank hangs; {ran.errors}"
    if ran.errors:
        raise ran.errors[0]
    return ran
