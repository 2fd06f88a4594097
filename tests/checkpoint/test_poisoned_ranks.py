"""A row that ends a job of several ranks again and again leaves the deal, also if other numbers of ranks go on then."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt import LakeLoader
from lakeckpt.checkpoint.ledger.audit import audit
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, manager, run_ranks
from tests.checkpoint.test_excluded_steps import ROWS, keys_of, read
from tests.patience import PATIENCE_S
from tests.reading.cases import write_file

POISON = 77


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A table of 240 rows in row groups of twenty; each row has its id, and a document of three tokens."""
    ids = [np.arange(start, start + 20) for start in range(0, ROWS, 20)]
    groups = [pa.table({"id": one, "tokens": [[3 * at, 3 * at + 1, 3 * at + 2] for at in one.tolist()]}) for one in ids]
    write_file(tmp_path / "a" / "part.parquet", groups)
    return tmp_path


class Job:
    """Attempts of one run, as torchelastic starts them. ``used``: step → the keys of each micro-batch."""

    def __init__(self, lake: Path, patch: pytest.MonkeyPatch, kind: str, **options: Any) -> None:
        self.lake, self.kind, self.options, self._patch = lake, kind, options, patch
        self.used: dict[int, list[list[int]]] = {}
        self.starts = 0
        self.storage = MemoryStorage()
        patch.setenv("TORCHELASTIC_RUN_ID", "job")

    @property
    def poison(self) -> int:
        return POISON if self.kind == "rows" else 3 * POISON

    def attempt(self, ranks: int, *, steps: int | None = None, workers: int = 0) -> list[str]:
        """Train to the end, or for so many ``steps``; the names of the errors of all ranks."""
        self._patch.setenv("TORCHELASTIC_RESTART_COUNT", str(self.starts))
        self.starts += 1
        storage = self.storage
        barrier, dying = threading.Barrier(ranks), [False] * ranks
        waiter = EventWaiter(storage)

        def body(rank: int, exchange: HubExchange) -> dict[int, list[int]]:
            loader = LakeLoader(read(self.lake, self.kind, rank, ranks), num_workers=workers)
            options = {"exchange": exchange, "waiter": waiter, "keep": 99, "persist_every": 3, **self.options}
            found: dict[int, list[int]] = {}
            with manager(
                storage, {"reader": loader}, arenas=self.lake / "arenas", on_crash_loop="exclude", **options
            ) as saver:
                begun = saver.restore()
                for batch in loader if loader.epoch == 0 else ():
                    dying[rank] = self.poison in keys_of(batch)
                    barrier.wait(PATIENCE_S)  # as a collective does
                    is_over = any(dying)
                    barrier.wait(PATIENCE_S)
                    if is_over:
                        raise ValueError("a bad row") if dying[rank] else RuntimeError("Connection closed by peer")
                    found[saver.steps_done + 1] = keys_of(batch)
                    saver.step(batch)
                    if steps is not None and saver.steps_done == begun + steps:
                        break
            return found

        results = run_ranks(ranks, body, waiters=[waiter])
        well = [one for one in results if not isinstance(one, BaseException)]
        for step in {step for found in well for step in found}:
            self.used[step] = [found[step] for found in well]
        return [type(one).__name__ for one in results if isinstance(one, BaseException)]


@pytest.mark.parametrize("kind", ["rows", "packed"])
@pytest.mark.parametrize(("ranks", "then", "workers"), [(2, 4, 0), (4, 2, 0), (3, 1, 1)])
def test_a_row_that_ends_several_ranks_three_times_leaves_the_deal_on_any_number_of_ranks(
    lake: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int, then: int, workers: int
) -> None:
    job = Job(lake, monkeypatch, kind)
    for _ in range(3):
        assert Counter(job.attempt(ranks, workers=workers)) == {"ValueError": 1, "RuntimeError": ranks - 1}
    assert job.attempt(ranks, steps=1, workers=workers) == []
    assert job.attempt(then) == []
    size = 1 if kind == "rows" else 5
    every = Counter(range(ROWS if kind == "rows" else 3 * ROWS))
    counts = Counter(key for batches in job.used.values() for keys in batches for key in keys)
    missing = every - counts
    assert not counts - every and job.poison in missing
    assert all(keys for batches in job.used.values() for keys in batches), "no batch is empty"
    report = audit(job.storage)
    assert report.verdict == "except" and report.excluded * size == sum(missing.values()), report
