"""A job that goes on with other numbers of ranks keeps its global batch: more or fewer micro-batches make a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt import LakeLoader, open_table
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import ConfigError, RestartWarning
from tests.checkpoint.agent.rig import take_checksums
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.data.reading import dataset_of
from tests.patience import PATIENCE_S
from tests.reading.cases import write_file

ROWS, BATCH, GLOBAL = 480, 4, 48


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    groups = [pa.table({"id": np.arange(start, start + 20)}) for start in range(0, ROWS, 20)]
    write_file(tmp_path / "lake" / "part.parquet", groups)
    return tmp_path / "lake"


class Job:
    """Attempts of one run, which die; what they have captured stays in the memory of their node."""

    def __init__(self, lake: Path, memory: Path) -> None:
        self.lake, self.memory, self.storage = lake, memory, MemoryStorage()
        self.steps: dict[int, list[int]] = {}
        """Step → the rows of all its micro-batches, on all ranks."""

    def attempt(self, ranks: int, steps: int | None = None) -> tuple[int, int]:
        """Take ``steps`` steps (None: to the end of the epoch). Returns where it began, and how many micro-batches
        each rank accumulated."""
        waiter, savers = EventWaiter(self.storage), list[Any]()

        def body(rank: int, exchange: HubExchange) -> tuple[int, int, dict[int, list[int]]]:
            options = {"batch_size": BATCH, "shuffle": True, "shuffle_window": 3, "num_lanes": 12}
            loader = LakeLoader(dataset_of(open_table(self.lake), rank=rank, world_size=ranks, **options))
            objects = {"n": Counter(0), "reader": loader}
            saver = manager(
                self.storage,
                objects,
                exchange=exchange,
                waiter=waiter,
                capture_every=1,
                arenas=self.memory,
                timeout_s=PATIENCE_S,
            )
            savers.append(saver)
            done, count = saver.restore(), saver.accumulation(global_batch=GLOBAL)
            found: dict[int, list[int]] = {}
            waiting: list[int] = []
            micro_batches = 0
            for batch in loader:
                waiting += batch["id"].tolist()
                micro_batches += 1
                if micro_batches < count and not batch.receipt.last:
                    continue
                saver.step(batch)
                assert isinstance(saver._saves, Background)
                saver._saves._engine.wait()
                found[saver.steps_done], waiting, micro_batches = waiting, [], 0
                if saver.steps_done == 1:
                    saver.save()
                if steps is not None and saver.steps_done == done + steps:
                    return done, count, found
            saver.save()
            return done, count, found

        results = good(run_ranks(ranks, body, waiters=[waiter]))
        for saver in savers:
            saver._saves._engine.close()  # as the kernel does for a process that ends
        take_checksums(self.memory)
        for _, _, found in results:
            for step, rows in found.items():
                self.steps.setdefault(step, []).extend(rows)
        return results[0][:2]


def test_fewer_and_more_ranks_go_on_from_memory_with_the_same_global_batches(lake: Path, tmp_path: Path) -> None:
    job, alone = Job(lake, tmp_path / "memory"), Job(lake, tmp_path / "alone")
    assert job.attempt(4, 3) == (0, 3)
    assert job.attempt(3, 3) == (3, 4)
    assert job.attempt(6, 2) == (6, 2)
    assert job.attempt(1) == (8, 12)
    assert alone.attempt(2) == (0, 6)
    assert {step: sorted(rows) for step, rows in job.steps.items()} == {
        step: sorted(rows) for step, rows in alone.steps.items()
    }
    assert sorted(row for rows in job.steps.values() for row in rows) == list(range(ROWS))
    assert audit(job.storage).verdict == "proved"


def test_ranks_that_do_not_divide_the_lanes_or_the_global_batch_go_on_with_every_row_once(
    lake: Path, tmp_path: Path
) -> None:
    job = Job(lake, tmp_path / "memory")
    assert job.attempt(4, 3) == (0, 3)
    with pytest.warns(RestartWarning, match=r"5 ranks.* cannot make a global batch of 48 rows: 3 .* are 60"):
        assert job.attempt(5, 3) == (3, 3)
    assert job.attempt(2) == (6, 6)
    assert sorted(row for rows in job.steps.values() for row in rows) == list(range(ROWS))
    assert {len(job.steps[step]) for step in (1, 2, 3)} == {48} and {len(job.steps[step]) for step in (4, 5, 6)} == {60}


def test_what_cannot_be_accumulated_is_refused(lake: Path) -> None:
    def loader(**options: Any) -> LakeLoader:
        return LakeLoader(dataset_of(open_table(lake), **{"batch_size": 4, "rank": 1, "world_size": 5, **options}))

    saver = manager(MemoryStorage(), {"n": Counter(0), "reader": loader()})
    assert saver.accumulation(global_batch=40) == saver.accumulation(global_batch=40, exact=True) == 2
    with pytest.raises(ConfigError, match=r"5 ranks .*cannot make a global batch of 42 rows: 3 .* are 60"):
        saver.accumulation(global_batch=42, exact=True)
    for wrong in (0, -4, 4.0, True, "48"):
        with pytest.raises(ConfigError, match="global_batch is"):
            saver.accumulation(global_batch=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"one of \['reader'\]; got 'other'"):
        saver.accumulation(global_batch=40, reader="other")
    several = manager(MemoryStorage(), {"train": loader(), "val": loader(batch_size=2)})
    assert several.accumulation(global_batch=40, reader="val") == 4
    with pytest.raises(ConfigError, match=r"one of \['train', 'val'\]"):
        several.accumulation(global_batch=40)
    with pytest.raises(ConfigError, match="gives single rows"):
        manager(MemoryStorage(), {"reader": loader(batch_size=None)}).accumulation(global_batch=40)
