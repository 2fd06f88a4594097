"""With LakeLoader and a real table: crashes at any step, other numbers of workers, and every row counts once."""

from __future__ import annotations

from collections import Counter as Bag
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import index_path, read_history
from lakeckpt.core.intervals import Intervals
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.tracking.readers import TrackedReader, reader_of
from tests.checkpoint.rig import Counter, MemoryStorage, manager
from tests.data.reading import dataset_of
from tests.lakes import LakeSpec

ROWS = 103


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    ids = list(range(ROWS))
    pq.write_table(pa.table({"id": ids[:60]}), folder / "a.parquet", row_group_size=9)
    pq.write_table(pa.table({"id": ids[60:]}), folder / "b.parquet", row_group_size=17)
    return folder


def loader_of(lake: Path, *, workers: int = 0, **options: object) -> LakeLoader:
    settings = {"batch_size": 5, "shuffle": True, "seed": 4, **options}
    return LakeLoader(dataset_of(open_table(lake), **settings), num_workers=workers)  # type: ignore[arg-type]


def test_a_loader_is_a_tracked_reader(lake: Path) -> None:
    assert isinstance(reader_of(loader_of(lake)), TrackedReader)


@pytest.mark.parametrize("crash_after", [1, 2, 3, 4, 7])
def test_crashes_at_any_step_lose_and_repeat_nothing(lake: Path, tmp_path: Path, crash_after: int) -> None:
    """A job of two epochs that saves every 3 steps dies now and then; one attempt has a worker process."""
    run, attempts = tmp_path / "run", 0
    history: list[int] = []
    while True:
        attempts += 1
        loader = loader_of(lake, workers=int(attempts == 3))
        book = Counter([])  # the ids that the surviving history trained on
        manager = CheckpointManager(run, {"reader": loader, "book": book}, persist_every=3, keep=1)
        done = manager.restore()
        crashed = False
        for _ in range(loader.epoch, 2):
            for batch in loader:
                book.value = [*book.value, *batch["id"].tolist()]
                manager.step(batch)
                # Each attempt outlives one more save, so that the job ends.
                crashed = manager.steps_done >= done + 3 + crash_after and manager.steps_done < 38
                if crashed:
                    break
            if crashed:
                break
        if not crashed:
            manager.save()
            history = book.value
            break
    assert attempts > 2
    assert Bag(history) == Bag(dict.fromkeys(range(ROWS), 2))
    chain = read_history(LocalStorage(run)).chain
    for epoch in (0, 1):
        rows = [one.readers["reader"].consumed().get(epoch, Intervals.empty()) for one in chain]
        assert Intervals.empty().union(*rows) == Intervals.whole(ROWS) and sum(one.size for one in rows) == ROWS


def test_the_index_of_the_table_lies_beside_the_checkpoints_once(lake: Path, tmp_path: Path) -> None:
    loader = loader_of(lake)
    with CheckpointManager(tmp_path / "run", {"reader": loader}, persist_every=2) as manager:
        manager.restore()
        for batch in loader:
            manager.step(batch)
    storage = LocalStorage(tmp_path / "run")
    (info,) = storage.list("index")
    digest = loader.table.index.digest
    assert info.path == index_path(digest)
    assert TableIndex.loads(storage.read(info.path)).digest == digest
    assert {one.readers["reader"].index for one in read_history(storage).chain} == {digest}


def test_accumulation_and_a_break_in_the_middle_of_it(lake: Path, tmp_path: Path) -> None:
    """Four micro-batches per optimizer step; what was delivered after the last step is delivered again."""
    loader = loader_of(lake)
    seen = []
    manager = CheckpointManager(tmp_path / "run", {"reader": loader}, persist_every=1)
    manager.restore()
    for at, batch in enumerate(loader):
        seen.append(batch["id"].tolist())
        if at % 4 == 3:
            manager.step(batch)
        if at == 9:
            break
    fresh = loader_of(lake)
    manager = CheckpointManager(tmp_path / "run", {"reader": fresh}, persist_every=10**9)
    assert manager.restore() == 2
    rest = [batch["id"].tolist() for batch in fresh]
    assert rest[:2] == seen[8:10]
    assert sorted(row for batch in [*seen[:8], *rest] for row in batch) == list(range(ROWS))
    record = read_history(LocalStorage(tmp_path / "run")).tip.readers["reader"]
    assert record.steps.frontier(2).step == 8


def test_a_cut_can_be_saved_again_after_the_epoch_has_ended(lake: Path, tmp_path: Path) -> None:
    loader = loader_of(lake)
    manager = CheckpointManager(tmp_path / "run", {"reader": loader}, persist_every=1)
    manager.restore()
    for batch in loader:
        manager.step(batch)
    manager.save()
    manager.step(batch)  # an optimizer step without new data
    history = read_history(LocalStorage(tmp_path / "run"))
    assert [one.readers["reader"].consumed() for one in history.chain[-2:]] == [{}, {}]
    last = history.chain[-1].readers["reader"].steps
    assert last.frontier(22) is not None
    fresh = loader_of(lake)
    CheckpointManager(tmp_path / "run", {"reader": fresh}).restore()
    assert fresh.epoch == 1  # the last save was after the end of epoch 0, and what the script does there is in it


def test_epochs_after_a_restore_at_the_end_of_one(lake: Path, tmp_path: Path) -> None:
    for expected in (0, 1, 2):
        loader = loader_of(lake)
        with CheckpointManager(tmp_path / "run", {"reader": loader, "n": Counter(torch.ones(1))}) as manager:
            manager.restore()
            assert loader.epoch == expected
            rows = [row for batch in loader for row in batch["id"].tolist() if manager.step(batch) is None]
            assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("every", [1, 7, 21, 4])  # an epoch has 21 steps
def test_a_save_after_the_end_of_an_epoch_whose_last_step_was_saved_goes_on_with_the_next_epoch(
    lake: Path, tmp_path: Path, every: int
) -> None:
    """What a script does once at an epoch's end (a scheduler's step) is in that save, and is not done again."""
    done_at_ends: list[int] = []
    rows: dict[int, list[int]] = {0: [], 1: []}
    for attempt in range(2):
        loader, ends = loader_of(lake), Counter(0)
        manager = CheckpointManager(tmp_path / "run", {"reader": loader, "ends": ends}, persist_every=every)
        manager.restore()
        for epoch in range(loader.epoch, 2):
            rows[epoch] += [row for batch in loader for row in (batch["id"].tolist(), manager.step(batch))[0]]
            ends.value += 1
            manager.save()
            if not attempt:
                break  # and the job dies
        done_at_ends.append(ends.value)
    assert done_at_ends == [1, 2]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(ROWS))
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.exactly_once, report.words


def test_an_epoch_that_is_read_again_is_recorded_to_its_last_batch(tmp_path: Path) -> None:
    lake = LakeSpec(files=((25,) * 4,)).write(tmp_path / "lake")
    storage = MemoryStorage()

    def made() -> dict[str, Any]:
        return {"reader": LakeLoader(LakeDataset(lake, batch_size=10, shuffle=True)), "book": Counter([])}

    objects = made()
    saver = manager(storage, objects, persist_every=10)
    saver.restore()
    for _ in range(2):
        objects["reader"].set_epoch(0)  # the same order: the same receipts
        for batch in objects["reader"]:
            objects["book"].value = [*objects["book"].value, batch["id"].tolist()]
            saver.step(batch)
    again = made()
    manager(storage, again).restore()
    assert len(again["book"].value) == 20
    state = again["reader"].state_dict()
    assert (state["epoch"], state["step"]) in ((0, 10), (1, 0))
