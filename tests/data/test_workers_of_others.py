"""LakeDataset in the workers of a plain torch DataLoader: every row once an epoch, and no state that would lie."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader

from lakeckpt import LakeDataset, LakeLoader, ReadOptions
from lakeckpt.data.base.ahead import Ahead
from lakeckpt.errors import ConfigError, StateError, StateMismatch, StateUnavailable
from tests.data.reading import ROWS, dataset_of, flat, ids, some, until_error
from tests.lakes import LakeSpec

EVERY = list(range(ROWS))


def plain(lake: Path, num_workers: int, *, batch: int | None = None, loader: Any = None, **dataset: Any) -> Any:
    made = dataset_of(lake, **{"batch_size": None if batch else 4, "shuffle": True, **dataset})
    return DataLoader(made, batch_size=batch, num_workers=num_workers, **(loader or {}))


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("loader", [{}, {"persistent_workers": True, "prefetch_factor": 3}])
def test_each_row_once_an_epoch_over_several_epochs(lake: Path, batch: int | None, loader: dict[str, Any]) -> None:
    reader = plain(lake, 2, batch=batch, loader=loader)
    orders = []
    for epoch in range(3):
        reader.dataset.set_epoch(epoch)
        orders.append([row for item in reader for row in item["id"].tolist()])
    assert [sorted(order) for order in orders] == [EVERY] * 3
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_the_same_shuffled_epoch_again_warns_and_another_order_needs_set_epoch(
    lake: Path, persistent: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = plain(lake, 2, loader={"persistent_workers": persistent, "worker_init_fn": show_warnings})
    first = flat(reader)
    assert "set_epoch" not in capfd.readouterr().err
    assert flat(reader) == first and sorted(first) == EVERY
    assert capfd.readouterr().err.count("dataset.set_epoch(epoch) before this iteration") == 1
    reader.dataset.set_epoch(1)
    assert sorted(flat(reader)) == EVERY
    assert "set_epoch" not in capfd.readouterr().err


def show_warnings(worker: int) -> None:
    """Write them to stderr, as they are where pytest does not record them."""
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: os.write(2, str(message).encode())  # type: ignore[assignment]


def test_in_table_order_every_iteration_is_the_table(lake: Path) -> None:
    reader = plain(lake, 2, shuffle=False)
    assert [sorted(flat(reader)) for _ in range(3)] == [EVERY] * 3


def test_in_the_main_process_a_users_own_loader_batches_rows_exactly(lake: Path) -> None:
    whole = flat(plain(lake, 0, batch=5))
    reader = plain(lake, 0, batch=5)
    before = flat(some(reader, 3))
    state = reader.dataset.state_dict()
    other = plain(lake, 0, batch=5)
    other.dataset.load_state_dict(state)
    assert before + flat(other) == whole
    assert sorted(flat(other)) == EVERY and other.dataset.epoch == 2


def test_workers_read_ahead_so_the_main_process_gives_no_state(lake: Path) -> None:
    reader = plain(lake, 2)
    reader.dataset.state_dict()  # nothing was read yet: it is known
    some(reader, 1)
    with pytest.raises(StateUnavailable, match=r"LakeLoader.*StatefulDataLoader"):
        reader.dataset.state_dict()
    reader.dataset.set_epoch(3)
    assert reader.dataset.state_dict()["epoch"] == 3


def test_set_epoch_and_rewind_reach_workers_old_and_new(lake: Path) -> None:
    expected = {}
    for epoch in (0, 1, 4, 5):
        reference = LakeDataset(lake, batch_size=4, shuffle=True, options=ReadOptions(num_lanes=2))
        reference.set_epoch(epoch)
        expected[epoch] = flat(reference)
    for persistent in (False, True):
        reader = plain(lake, 2, loader={"persistent_workers": persistent})
        dataset = reader.dataset
        assert dataset.epoch == 0
        assert flat(reader) == expected[0] and dataset.epoch == 0
        dataset.set_epoch(4)
        assert dataset.epoch == 4
        assert flat(reader) == expected[4] and dataset.epoch == 4
        dataset.set_epoch(5)
        assert flat(reader) == expected[5] and dataset.epoch == 5
        dataset.rewind()
        assert flat(reader) == expected[5]
        dataset.set_epoch(1)
        dataset.set_epoch(0)
        assert flat(reader) == expected[0]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_refuse_a_place_in_the_midst_of_an_epoch_and_begin_the_one_after_an_end(
    lake: Path, persistent: bool
) -> None:
    source = LakeLoader(LakeDataset(lake, batch_size=4, shuffle=True))
    some(source, 3)
    inside = source.state_dict()
    reader = plain(lake, 2, loader={"persistent_workers": persistent})
    if persistent:
        flat(reader)  # workers now have an old copy of the dataset
    reader.dataset.load_state_dict(inside)
    _, error = until_error(reader)
    assert isinstance(error, StateUnavailable) and "middle of an epoch" in str(error)
    flat(source)
    reader.dataset.load_state_dict(source.state_dict())
    assert sorted(flat(reader)) == EVERY and reader.dataset.epoch == 1


def test_len_told_before_workers_begin_stays_true(lake: Path) -> None:
    for world_size, num_workers in itertools.product((1, 2), (0, 3)):
        reader = plain(lake, num_workers, rank=0, world_size=world_size, num_lanes=None if world_size == 1 else 6)
        told = len(reader)
        items = []
        for epoch in range(2):
            reader.dataset.set_epoch(epoch)
            items.append(len([1 for _ in reader]))
        assert items == [told, told] == [len(reader)] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_rank_that_asks_for_the_length_does_not_read_otherwise_than_the_others(
    lake: Path, num_workers: int
) -> None:
    found = []
    for rank in range(2):
        reader = plain(lake, num_workers, rank=rank, world_size=2)
        if rank == 0:
            with pytest.raises(TypeError, match="num_lanes"):
                len(reader)
        found += flat(reader)
        assert len(reader) > 0  # by now it is known
    assert sorted(found) == EVERY


def test_the_length_behind_a_state_of_other_lanes_is_not_guessed_either(lake: Path) -> None:
    state = plain(lake, 0, rank=0, world_size=1, num_lanes=1).dataset.state_dict()
    found = []
    for rank in range(2):
        reader = plain(lake, 2, rank=rank, world_size=2)
        reader.dataset.load_state_dict(state)
        if rank == 0:
            with pytest.raises(TypeError, match="num_lanes"):
                len(reader)
        found += flat(reader)
    assert sorted(found) == EVERY


def test_an_endless_stream_is_one_iteration(lake: Path) -> None:
    reader = plain(lake, 2, endless=True)
    found = flat(some(reader, 40))
    assert len(found) == 160 and all(3 <= found.count(row) <= 6 for row in EVERY)
    _, error = until_error(reader)
    assert isinstance(error, StateUnavailable) and "LakeLoader" in str(error)


# --- inside of workers, without processes


@contextlib.contextmanager
def inside_worker(dataset: LakeDataset, worker: int, workers: int, seed: int = 100) -> Iterator[None]:
    torch_worker._worker_info = torch_worker.WorkerInfo(  # type: ignore[attr-defined]
        id=worker, num_workers=workers, seed=seed + worker, dataset=dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = None


class Workers:
    """Copies of a dataset as forked workers have them, one per worker; they live on over `iterate` calls."""

    def __init__(self, dataset: LakeDataset, workers: int, seed: int = 100) -> None:
        self.dataset = dataset
        self.copies = [pickle.loads(pickle.dumps(dataset)) for _ in range(workers)]
        for one in self.copies:
            one._shared = dataset._shared
        self.seed = seed

    def call(self, worker: int, method: str, *arguments: Any) -> Any:
        with inside_worker(self.copies[worker], worker, len(self.copies), self.seed):
            return getattr(self.copies[worker], method)(*arguments)

    def take(self, order: list[int], steps: int = 10**6) -> dict[int, list[list[int]]]:
        """Begin an iteration in the workers in ``order``, then take up to ``steps`` items of each."""
        iterators = {worker: self.call(worker, "__iter__") for worker in order}
        found = {}
        for worker, iterator in iterators.items():
            with inside_worker(self.copies[worker], worker, len(self.copies), self.seed):
                found[worker] = ids(itertools.islice(iterator, steps))
        return found


def rows_of(found: dict[int, list[list[int]]]) -> list[int]:
    return sorted(row for batches in found.values() for batch in batches for row in batch)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_workers_that_live_on_agree_whatever_their_order(lake: Path, order: list[int]) -> None:
    dataset = LakeDataset(lake, batch_size=4, shuffle=True)
    workers = Workers(dataset, 3)
    epochs = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        found = workers.take(order)
        assert rows_of(found) == EVERY
        epochs.append(dataset.epoch)
        order = order[1:] + order[:1]
    assert epochs == [0, 1, 2]


@pytest.mark.parametrize("loaded", [[0, 1], [1, 0]])
def test_restored_workers_that_live_on_agree_on_what_follows(lake: Path, loaded: list[int]) -> None:
    dataset = LakeDataset(lake, batch_size=4, shuffle=True)
    first = Workers(dataset, 2)
    dataset.set_epoch(1)
    before = first.take([0, 1], 2)
    states = {worker: first.call(worker, "state_dict") for worker in (0, 1)}
    later = Workers(LakeDataset(lake, batch_size=4, shuffle=True), 2)
    for worker in loaded:
        later.call(worker, "load_state_dict", states[worker])
    rest = later.take(loaded)
    assert sorted(rows_of(before) + rows_of(rest)) == EVERY
    for epoch, order in ((2, [0, 1]), (3, [1, 0])):
        later.dataset.set_epoch(epoch)
        found = later.take(order)
        assert rows_of(found) == EVERY and later.copies[0].epoch == epoch
        dataset.set_epoch(epoch)
        assert found == first.take(order)


def test_restored_lanes_are_those_of_the_epochs_that_follow(lake: Path) -> None:
    wide = LakeDataset(lake, batch_size=4, shuffle=True, options=ReadOptions(num_lanes=6))
    first = Workers(wide, 2)
    first.take([0, 1], 1)
    states = {worker: first.call(worker, "state_dict") for worker in (0, 1)}
    later = Workers(LakeDataset(lake, batch_size=4, shuffle=True), 2)
    for worker in (0, 1):
        later.call(worker, "load_state_dict", states[worker])
    later.take([0, 1])
    for dataset in (wide, later.dataset):
        dataset.set_epoch(1)
    following = first.take([0, 1])
    fresh = Workers(later.dataset, 2, seed=200)  # the workers of the next iteration, where they do not live on
    assert fresh.take([0, 1]) == following
    assert fresh.copies[0].epoch == 1


@pytest.mark.parametrize("endless", [False, True])
def test_what_ends_before_the_epoch_does_is_an_error_and_not_the_end(
    lake: Path, monkeypatch: pytest.MonkeyPatch, endless: bool
) -> None:
    class Ends(Ahead):
        def __next__(self) -> Any:
            found = super().__next__()
            if found[0].step >= 4:
                raise StopIteration
            return found

    monkeypatch.setattr("lakeckpt.data.dataset.foreign_workers.Ahead", Ends)
    with pytest.raises(StateUnavailable, match=r"worker 0 of 2.*epoch 0.*step 4.*iter\(loader\)"):
        Workers(LakeDataset(lake, batch_size=4, endless=endless), 2).take([0])


def test_set_epoch_to_the_epoch_that_workers_read_reads_it_again(lake: Path) -> None:
    dataset = LakeDataset(lake, batch_size=4, shuffle=True)
    first = Workers(dataset, 1, seed=1).take([0])
    dataset.set_epoch(0)
    assert Workers(dataset, 1, seed=2).take([0]) == first


def test_states_of_other_workers_tables_or_jobs_are_refused(lake: Path, tmp_path: Path) -> None:
    first = Workers(LakeDataset(lake, batch_size=4), 2)
    first.take([0, 1], 1)
    state = first.call(1, "state_dict")
    cases = [
        (
            LakeDataset(lake, batch_size=4),
            0,
            2,
            StateError,
            "worker 1 of 2, of 1 ranks, given to worker 0 of 2",
        ),
        (LakeDataset(lake, batch_size=4), 1, 3, StateError, "given to worker 1 of 3.*LakeLoader"),
        (
            LakeDataset(lake, batch_size=4, rank=0, world_size=2),
            1,
            2,
            StateError,
            "given to worker 1 of 2, of 2 ranks",
        ),
        (
            LakeDataset(LakeSpec().write(tmp_path / "o"), batch_size=4),
            1,
            2,
            StateMismatch,
            "rows: 12 in this dataset, 37 in the state",
        ),
        (LakeDataset(lake, batch_size=4, seed=3), 1, 2, StateMismatch, "seed: 3 in this dataset, 0 in the state"),
    ]
    for dataset, worker, workers, error, match in cases:
        other = Workers(dataset, workers)
        other.call(worker, "load_state_dict", state)
        with pytest.raises(error, match=match):
            other.call(worker, "__iter__")


def test_a_worker_that_has_not_begun_has_no_state(lake: Path) -> None:
    with pytest.raises(StateUnavailable, match="not begun"):
        Workers(LakeDataset(lake, batch_size=4), 1).call(0, "state_dict")


@pytest.mark.parametrize(
    "wrong",
    [{"worker": 2}, {"workers": 0}, {"worker": "0"}, {"state": {}}, {"state": None}],
)
def test_malformed_parts_are_refused(lake: Path, wrong: dict[str, Any]) -> None:
    workers = Workers(LakeDataset(lake, batch_size=4), 2)
    workers.take([0, 1], 1)
    state = {**workers.call(0, "state_dict"), **wrong}
    workers.call(0, "load_state_dict", state)
    with pytest.raises(StateError):
        workers.call(0, "__iter__")


def test_a_copy_within_the_process_reads_apart(lake: Path) -> None:
    dataset = LakeDataset(lake, batch_size=4)
    some(DataLoader(dataset, batch_size=None, num_workers=1), 1)
    other = copy.deepcopy(dataset)
    assert other.state_dict()["step"] == 0 and flat(other) == EVERY
    with pytest.raises(StateUnavailable):
        dataset.state_dict()


def test_an_endless_stream_has_no_epoch_to_go_to(lake: Path) -> None:
    dataset = LakeDataset(lake, batch_size=4, endless=True)
    with pytest.raises(ConfigError, match="no epoch"):
        dataset.set_epoch(2)
