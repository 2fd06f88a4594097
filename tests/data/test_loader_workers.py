"""LakeLoader with worker processes: the same rows in the same order, read ahead, decoded once, failing clearly."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import Batch, LakeLoader, TransformContext
from lakeckpt.errors import DataFileDamaged, NullValueError
from lakeckpt.reading.windows.cache import WindowCache
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import ROWS, as_json, dataset_of, flat, ids, loader_of, some, until_error
from tests.lakes import LakeSpec


@pytest.fixture(scope="module")
def expected(lake: Path) -> list[list[int]]:
    return ids(loader_of(lake, num_lanes=6))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_the_order_does_not_depend_on_workers(lake: Path, num_workers: int, expected: list[list[int]]) -> None:
    assert ids(loader_of(lake, num_lanes=6, num_workers=num_workers)) == expected


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_start_method_gives_the_same(lake: Path, method: str, expected: list[list[int]]) -> None:
    options = {"multiprocessing_context": method, "persistent_workers": True, "prefetch_factor": 1}
    num_workers = 1 if method == "spawn" else 2  # each would load torch
    loader = loader_of(lake, num_lanes=6, num_workers=num_workers, loader=options)
    assert ids(loader) == expected
    assert sorted(flat(loader)) == list(range(ROWS)) and loader.epoch == 2


def test_breaks_with_batches_in_flight_lose_nothing(lake: Path, expected: list[list[int]]) -> None:
    for persistent in (False, True):
        options = {"persistent_workers": persistent, "prefetch_factor": 4}
        loader = loader_of(lake, num_lanes=6, num_workers=2, loader=options)
        found = ids(some(loader, 2)) + ids(some(loader, 3))
        assert found + ids(loader) == expected
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (1, 0)
        some(loader, 2)
        resumed = loader_of(lake)
        resumed.load_state_dict(as_json(loader.state_dict()))
        assert sorted(flat(resumed) + flat_of_two(lake)) == list(range(ROWS))


def kill_one(before: set[Any]) -> None:
    process = next(iter(set(multiprocessing.active_children()) - before))
    process.kill()
    process.join()


@pytest.mark.parametrize("then_starts", [False, True])
def test_a_persistent_worker_that_is_killed_between_two_iterations_is_replaced(
    lake: Path, expected: list[list[int]], then_starts: bool
) -> None:
    before = set(multiprocessing.active_children())
    loader = loader_of(lake, num_lanes=6, num_workers=2, loader={"persistent_workers": True})
    found = ids(some(loader, 2))
    for rest in (3, None):  # in the midst of an epoch, and for the next one
        if then_starts:
            loader._reader.start()
        kill_one(before)
        found += ids(loader if rest is None else some(loader, rest))
    assert found == expected
    if then_starts:
        loader._reader.start()
    kill_one(before)
    assert sorted(flat(loader)) == list(range(ROWS)) and loader.epoch == 2
    del loader
    assert set(multiprocessing.active_children()) <= before


def flat_of_two(lake: Path) -> list[int]:
    reference = loader_of(lake, num_lanes=6)
    reference.set_epoch(1)
    return flat(some(reference, 2))


def test_an_endless_stream_is_read_ahead_and_goes_on(lake: Path) -> None:
    whole = ids(some(loader_of(lake, endless=True, num_lanes=4), 50))
    loader = loader_of(lake, endless=True, num_lanes=4, num_workers=2, loader={"persistent_workers": True})
    assert ids(some(loader, 20)) + ids(some(loader, 30)) == whole


def test_rows_come_from_workers_as_from_none(lake: Path) -> None:
    for case in ({}, {"drop_last": True}):
        alone = ids(loader_of(lake, batch_size=None, num_lanes=4, **case))
        loader = loader_of(lake, batch_size=None, num_lanes=4, num_workers=2, **case)
        before = ids(some(loader, 7))
        resumed = loader_of(lake, batch_size=None, num_workers=3, **case)
        resumed.load_state_dict(as_json(loader.state_dict()))
        assert before + ids(resumed) == alone


def decodes(batch: Batch, context: TransformContext) -> Any:
    """How many windows this process has decoded so far, and which process it is."""
    return {"id": batch["id"], "decoded": torch.tensor(_DECODED["windows"]), "process": torch.tensor(os.getpid())}


_DECODED = {"windows": 0}


def test_each_window_is_decoded_once_by_the_worker_that_owns_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = WindowCache._begin

    def counted(self: WindowCache, needed: Any) -> Any:
        _DECODED["windows"] += 1
        return inner(self, needed)

    monkeypatch.setattr(WindowCache, "_begin", counted)
    monkeypatch.setitem(_DECODED, "windows", 0)
    folder = LakeSpec(files=((10,) * 6,) * 4).write(tmp_path / "lake")  # 24 row groups of 10 rows
    for num_workers, num_lanes in ((0, 3), (2, 4), (3, 4), (2, 3), (2, 1)):
        _DECODED["windows"] = 0
        loader = loader_of(
            folder,
            num_workers=num_workers,
            num_lanes=num_lanes,
            shuffle_window=2,
            transform=decodes,
            loader={"multiprocessing_context": "fork"} if num_workers else {},
        )
        items = list(loader)
        assert sorted(flat(items)) == list(range(240))
        most = Counter[int]()
        lanes: dict[int, set[int]] = {}
        for item in items:
            process = int(item["process"])
            most[process] = max(most[process], int(item["decoded"]))
            lanes.setdefault(process, set()).add(item.receipt.lane)
        assert len(most) == max(1, min(num_workers, num_lanes))
        # 24 row groups in windows of two, and a lane border inside of a row group or window cuts it once.
        assert 12 <= most.total() <= 12 + 2 * (num_lanes - 1), (num_workers, num_lanes, most)
        owned = [lane for mine in lanes.values() for lane in mine]
        assert sorted(owned) == list(range(num_lanes)), lanes


def test_one_warning_at_most_tells_of_too_many_workers(lake: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader_of(lake, num_workers=7)
    assert len([one for one in caught if "worker processes" in str(one.message)]) <= 1


@pytest.fixture(autouse=True)
def _many_workers_are_meant(recwarn: pytest.WarningsRecorder) -> None:
    warnings.filterwarnings("ignore", message="This DataLoader will create")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what happens without an accelerator")
def test_pinning_without_an_accelerator_warns_and_reads_on(lake: Path) -> None:
    for num_workers in (0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = loader_of(lake, num_workers=num_workers, loader={"pin_memory": True}, columns=["id", "string"])
            batches = list(loader)
        assert sorted(flat(batches)) == list(range(ROWS))
        assert all(batch.receipt.rows == len(batch["id"]) for batch in batches)
        # from 3.12 on Python warns of a fork beside threads, too
        assert all("pin_memory" in str(one.message) or "use of fork()" in str(one.message) for one in caught)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_file_is_named_from_workers_too(tmp_path: Path, num_workers: int) -> None:
    folder = LakeSpec(files=((40,), (40,), (40,))).write(tmp_path / "lake")
    loader = loader_of(folder, shuffle=False, num_workers=num_workers)
    path = folder / "part-00001.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[4:120] = bytes(116)
    path.write_bytes(damaged)
    batches, error = until_error(loader)
    assert isinstance(error, DataFileDamaged) and "part-00001.parquet" in str(error)
    assert (error.file, error.row_group) == ("part-00001.parquet", 0)
    assert flat(batches) == list(range(40))
    # The state is that of what was received, and once the file is back the loader goes on.
    assert loader.state_dict()["step"] == 10


def fails_at_20(batch: Batch) -> Batch:
    if (batch["id"] == 20).any():
        raise KeyError("twenty")
    return batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_transform_reaches_the_loop_with_the_state_intact(lake: Path, num_workers: int) -> None:
    loader = loader_of(lake, shuffle=False, transform=fails_at_20, num_workers=num_workers, num_lanes=2)
    got, error = until_error(loader)
    assert isinstance(error, KeyError) and "twenty" in str(error)
    state = loader.state_dict()
    assert state["step"] == len(got)
    resumed = loader_of(lake, shuffle=False)
    resumed.load_state_dict(state)
    assert sorted(flat(got) + flat(resumed)) == list(range(ROWS))


def has_no_more(batch: Batch) -> Batch:
    return batch if 20 not in batch["id"] else next(iter(()))


def begins_with_nothing(worker: int) -> None:
    next(iter(()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_whose_own_iterator_is_at_its_end_does_not_end_the_epoch(lake: Path, num_workers: int) -> None:
    for rows in ({}, {"batch_size": None}):
        loader = loader_of(lake, shuffle=False, transform=has_no_more, num_workers=num_workers, **rows)
        got, error = until_error(loader)
        assert isinstance(error, RuntimeError) and "StopIteration" in str(error), rows
        assert flat(got) == list(range(20)) and loader.epoch == 0
    if num_workers:
        _, error = until_error(loader_of(lake, num_workers=1, loader={"worker_init_fn": begins_with_nothing}))
        assert isinstance(error, RuntimeError) and "StopIteration" in str(error)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_null_is_named_from_workers_too(tmp_path: Path, num_workers: int) -> None:
    folder = LakeSpec(columns=("int32",), null_every=3).write(tmp_path / "lake")
    _, error = until_error(loader_of(folder, num_workers=num_workers))
    assert isinstance(error, NullValueError) and "int32" in str(error)


def test_workers_of_every_rank_read_their_share_and_end_with_the_epoch(lake: Path) -> None:
    before = set(multiprocessing.active_children())
    rows = []
    for rank in range(2):
        loader = loader_of(lake, rank=rank, world_size=2, num_workers=2)
        assert loader.dataset.topology == (rank, 2)
        rows += flat(loader)
    assert sorted(rows) == list(range(ROWS))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.soak
def test_the_law_holds_with_workers_at_every_offset(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> LakeLoader:
        dataset = dataset_of(lake, batch_size=7, shuffle=True, rank=rank, world_size=world_size, **options)
        return LakeLoader(dataset, num_workers=num_workers, prefetch_factor=3 if num_workers else None)

    assert_exactly_once(make_loader, topologies=[(1, 2), (3, 1), (2, 0)], offsets=3, chains=1)
