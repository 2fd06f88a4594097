"""A run's folder that is removed while training goes on: the weights are saved, and it is said what is lost."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import CheckpointManager, LakeLoader
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import index_path
from lakeckpt.checkpoint.persist.indexes import documents_of_all, write_documents
from lakeckpt.errors import AttemptSuperseded, DamageWarning, StorageError
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.data.reading import dataset_of
from tests.lakes import LakeSpec
from tests.patience import PATIENCE_S

LOST = "log/0000000002.lkc in memory [0-9a-f]*, which this run had written, is not there any more"


@pytest.fixture
def lake(tmp_path: Path) -> Any:
    return LakeSpec(files=((6,), (10,))).write(tmp_path / "lake")


def objects(lake: Any, **options: Any) -> dict[str, Any]:
    """A reader with a filter, and a tensor that no step touches: a save refers to the file of the one before."""
    dataset = dataset_of(lake, batch_size=2, filters=[("id", ">=", 2)], **options)
    return {"reader": LakeLoader(dataset), "frozen": Counter([torch.arange(1000.0)])}


def remove(storage: MemoryStorage) -> None:
    for path in list(storage.objects):
        storage.delete(path)


def train(saver: CheckpointManager, live: dict[str, Any], batches: Any) -> None:
    next(batches)
    saver.step()
    saver.save()


@pytest.mark.parametrize("captures", [False, True])
def test_after_the_folder_was_removed_saves_are_whole_again_and_it_is_said_what_is_lost(
    captures: bool, lake: Any, tmp_path: Path
) -> None:
    storage, live = MemoryStorage(), objects(lake)
    more = {"capture_every": 1, "arenas": tmp_path / "arenas", "timeout_s": PATIENCE_S} if captures else {}
    with manager(storage, live, **more) as saver:
        saver.restore()
        batches = iter(live["reader"])
        for _ in range(2):
            train(saver, live, batches)
        remove(storage)
        with pytest.warns(DamageWarning, match=LOST) as told:
            train(saver, live, batches)
        assert len([one for one in told if one.category is DamageWarning]) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(saver, live, batches)
    report = verify(storage)
    assert [(one.step, one.status) for one in report.checkpoints] == [(3, "intact"), (4, "intact")]
    assert index_path(live["reader"].table.index.digest) in storage.objects and report.indexes
    assert {one.path for one in report.every_damage} == {f"log/000000000{slot}.lkc" for slot in range(3)}
    again = objects(lake)
    with pytest.warns(DamageWarning, match="the entry is missing"):
        assert manager(storage, again).restore() == 4
    assert torch.equal(again["frozen"].value[0], torch.arange(1000.0)) and len(list(again["reader"])) == 3


def test_no_rank_fails_where_the_folder_was_removed(lake: Any) -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> int:
        live = objects(lake, rank=rank, world_size=2)
        saver = manager(storage, live, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        batches = iter(live["reader"])
        for _ in range(2):
            train(saver, live, batches)
        exchange.everyone({})
        if rank == 0:
            remove(storage)
        exchange.everyone({})
        train(saver, live, batches)
        return saver.steps_done

    with pytest.warns(DamageWarning, match=LOST):
        assert good(run_ranks(2, body)) == [3, 3]
    assert verify(storage).restorable is not None


def test_a_run_that_began_in_its_place_owns_it() -> None:
    storage = MemoryStorage()
    old, new = manager(storage, {"n": Counter(1)}), manager(storage, {"n": Counter(2)})
    old.restore()
    for _ in range(2):
        old.step()
        old.save()
    remove(storage)
    new.restore()
    for saves in range(3):  # its log is shorter than what the old one knows, as long, and longer
        before = dict(storage.objects)
        with pytest.raises(AttemptSuperseded, match="Another job"):
            old.save()
        assert storage.objects == before, saves
        new.step()
        new.save()


def test_a_document_of_a_table_is_written_where_the_run_lacks_it(lake: Path) -> None:
    storage, every = MemoryStorage(), documents_of_all([dataset_of(lake, batch_size=4), object()])
    paths = write_documents(storage, every)
    assert paths == set(storage.objects) and paths
    before, storage.count = dict(storage.objects), 0
    assert write_documents(storage, every) == paths and storage.count == 0
    remove(storage)
    assert write_documents(storage, every) == paths and storage.objects == before


@pytest.mark.parametrize("times", [1, 100])
def test_a_store_that_cannot_be_asked_is_no_loss(times: int) -> None:
    failures = ["busy"] * times

    class Failing(MemoryStorage):
        def read(self, path: str, *args: Any, **options: Any) -> bytes:
            if path == "log/0000000001.lkc" and failures:
                raise StorageError(failures.pop())
            return super().read(path, *args, **options)

    storage = Failing()
    saver = manager(storage, {"n": Counter(1)})
    saver.restore()
    for _ in range(2):
        saver.step()
        saver.save()
    assert "log/0000000002.lkc" in storage.objects and len(failures) < times


def test_an_error_and_a_listing_of_the_past_are_no_loss() -> None:
    """Some stores list what was; only an entry that is said to be missing is looked for there."""
    failures: list[str] = []

    class Stale(MemoryStorage):
        def read(self, path: str, *args: Any, **options: Any) -> bytes:
            if failures:
                raise StorageError(failures.pop())
            return super().read(path, *args, **options)

        def list(self, prefix: str = "") -> list[Any]:
            return [one for one in super().list(prefix) if one.path != "log/0000000001.lkc"]

    storage = Stale()
    saver = manager(storage, {"n": Counter(1)})
    saver.restore()
    saver.step()
    saver.save()
    saver.step()
    failures.append("busy")
    saver.save()
    assert not failures and "log/0000000002.lkc" in storage.objects
