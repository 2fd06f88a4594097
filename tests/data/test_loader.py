"""LakeLoader in one process: epochs, breaks, ends, and where it says that it is."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, open_table
from lakeckpt.data.base.ahead import Ahead
from lakeckpt.errors import ConfigError, StateError, StateMismatch, StateUnavailable
from tests.data.reading import ROWS, as_json, dataset_of, flat, ids, loader_of, some
from tests.examples import examples
from tests.lakes import LakeSpec

EVERY = list(range(ROWS))


def test_it_is_a_torch_dataloader_whose_iterations_are_epochs(lake: Path) -> None:
    loader = loader_of(lake)
    assert isinstance(loader, DataLoader) and loader.dataset.table is loader.table
    epochs = []
    orders = []
    for _ in range(3):
        epochs.append(loader.epoch)
        orders.append(flat(loader))
    assert epochs == [0, 1, 2] and loader.epoch == 3
    assert [sorted(order) for order in orders] == [EVERY] * 3 and len({tuple(order) for order in orders}) == 3
    assert [flat(again) for again in itertools.repeat(loader_of(lake), 3)] == orders


def test_unshuffled_one_rank_reads_in_table_order(lake: Path) -> None:
    assert flat(loader_of(lake, shuffle=False)) == EVERY


def test_shuffled_rows_come_from_their_window_only(lake: Path) -> None:
    order = flat(loader_of(lake, shuffle_window=1))
    groups = [range(7), range(7, 12), range(12, 21), range(21, 25), range(25, 26), range(26, 37)]
    runs = [next(i for i, group in enumerate(groups) if row in group) for row in order]
    assert len([run for run, _ in itertools.groupby(runs)]) == len(groups)
    assert order != sorted(order)


def test_after_a_break_the_next_iteration_goes_on(lake: Path) -> None:
    whole = ids(loader_of(lake))
    loader = loader_of(lake)
    found: list[Any] = []
    for count in (1, 3, 0, 2):
        found += ids(some(loader, count))
        assert loader.epoch == 0
    assert found + ids(loader) == whole and loader.epoch == 1


def test_rewind_begins_the_epoch_at_hand_again(lake: Path) -> None:
    loader = loader_of(lake)
    list(loader)
    some(loader, 4)
    loader.rewind()
    assert loader.last_receipt is None and loader.epoch == 1
    reference = loader_of(lake)
    reference.set_epoch(1)
    assert ids(loader) == ids(reference)


def test_set_epoch_goes_there_and_does_nothing_in_the_middle_of_it(lake: Path) -> None:
    loader = loader_of(lake)
    first = ids(some(loader, 3))
    loader.set_epoch(0)
    assert first + ids(loader) == ids(loader_of(lake))
    loader.set_epoch(1)  # where it is anyway
    assert loader.epoch == 1 and len(some(loader, 2)) == 2
    loader.set_epoch(7)
    assert loader.epoch == 7 and flat(loader) != flat(loader_of(lake)) and loader.epoch == 8
    with pytest.raises(ConfigError, match="counted from 0"):
        loader.set_epoch(-1)


def test_the_usual_loop_over_epochs_goes_on_where_a_state_was_made(lake: Path) -> None:
    def train(loader: LakeLoader, stop_after: int | None = None) -> list[tuple[int, int]]:
        seen = []
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                seen += [(epoch, row) for row in batch["id"].tolist()]
                if stop_after is not None and len(seen) >= stop_after:
                    return seen
        return seen

    whole = train(loader_of(lake))
    for stop in (0, 1, 30, 37, 60, 74, 111):
        loader = loader_of(lake)
        before = train(loader, stop) if stop else []
        resumed = loader_of(lake)
        resumed.load_state_dict(as_json(loader.state_dict()))
        assert before + train(resumed) == whole, stop


@pytest.mark.parametrize("change", ["iterate", "load", "rewind", "set_epoch", "the dataset"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_from_before_a_change_of_place_is_refused(lake: Path, change: str, workers: int) -> None:
    loader = loader_of(lake, num_workers=workers, loader={"persistent_workers": True} if workers else {})
    old = iter(loader)
    before = ids([next(old), next(old)])
    again = None
    if change == "iterate":
        again = iter(loader)
    elif change == "load":
        loader.load_state_dict(loader.state_dict())
    elif change == "rewind":
        loader.rewind()
    elif change == "set_epoch":
        loader.set_epoch(3)
    else:
        again = iter(loader.dataset)
        next(again)
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises((StateUnavailable, StopIteration), match=r"out of date|^$"):
            next(old)
    assert loader.state_dict() == state
    if change == "iterate":
        assert again is not None
        assert before + ids(again) == ids(loader_of(lake, num_lanes=1))


@pytest.mark.parametrize("of_loader", [True, False])
def test_a_state_loaded_after_iter_began_puts_the_iterator_out_of_date(lake: Path, of_loader: bool) -> None:
    wide = loader_of(lake, rank=0, world_size=2)
    some(wide, 2)
    loader = loader_of(lake)
    reader = loader if of_loader else loader.dataset
    old = iter(reader)
    reader.load_state_dict(wide.state_dict())
    with pytest.raises(StateUnavailable, match="out of date"):
        next(old)
    assert len(flat(reader)) == ROWS - 16


def test_a_loader_that_is_let_go_of_takes_its_workers_with_it(lake: Path) -> None:
    gc.collect()
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        loader = loader_of(lake, num_workers=1, loader={"persistent_workers": True})
        list(loader)
        made = set(multiprocessing.active_children()) - before
        assert made
        del loader
        assert not made & set(multiprocessing.active_children())
    finally:
        gc.enable()


def test_len_is_the_steps_of_this_rank_before_during_and_after(lake: Path) -> None:
    for world_size, tail in itertools.product((1, 2, 5), ("short", "drop")):
        for rank in range(world_size):
            loader = loader_of(lake, rank=rank, world_size=world_size, tail=tail)
            told = len(loader)
            taken = len(some(loader, told - 1))
            assert len(loader) == told
            assert len([1 for _ in loader]) + taken == told == len(loader)
    with pytest.raises(TypeError, match="no length"):
        len(loader_of(lake, endless=True))


def test_row_wise_len_is_the_rows_of_this_rank(lake: Path) -> None:
    for world_size, tail in itertools.product((1, 2, 5), ("short", "drop")):
        counts = []
        for rank in range(world_size):
            loader = loader_of(lake, batch_size=None, rank=rank, world_size=world_size, tail=tail, num_lanes=10)
            rows = flat(loader)
            assert len(loader) == len(rows) == len(loader.dataset)
            counts.append(len(rows))
        assert max(counts) - min(counts) <= (tail == "short")
        assert sum(counts) == ROWS or (tail == "drop" and sum(counts) >= ROWS - 10 - world_size)


@pytest.mark.parametrize("of_rank", [0, 2])
@pytest.mark.parametrize("tail", ["short", "drop"])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("through_torch", [False, True])
def test_a_loop_that_counts_leaves_epochs_that_have_nothing_for_its_rank(
    tmp_path: Path, batch_size: int | None, tail: str, of_rank: int, through_torch: bool
) -> None:
    """It takes nothing, and so never hears of an end."""
    dataset = LakeDataset(
        LakeSpec(files=((2,),)).write(tmp_path),
        batch_size=batch_size,
        drop_last=tail == "drop",
        rank=of_rank,
        world_size=3,
        options=ReadOptions(num_lanes=3),
    )
    loader: Any = DataLoader(dataset, batch_size=None) if through_torch else LakeLoader(dataset)
    found = []
    for _ in range(4):
        items = iter(loader)
        found.append((dataset._progress.epoch, len([next(items) for _ in range(len(dataset))])))
    assert found == [(epoch, len(dataset)) for epoch in range(4)]


@pytest.mark.parametrize("batch_size", [None, 4])
def test_an_iterator_of_which_nothing_was_asked_ends_no_epoch(lake: Path, batch_size: int | None) -> None:
    loader = loader_of(lake, batch_size=batch_size, rank=1, world_size=2)
    empty = LakeLoader(LakeDataset(loader.table, batch_size=None, rank=38, world_size=39))
    for one, looks in ((loader, 3), (empty, 1)):
        state = one.state_dict()
        for _ in range(looks):
            iter(one)
        assert one.state_dict() == state and one.epoch == 0
        iter(one)
        one.load_state_dict(state)  # what was begun before is not of this place
        iter(one)
        assert one.epoch == 0
        one.load_state_dict(state)
        for epoch in range(3):  # a loop that asks hears of each end once, whatever is asked in between
            assert one.epoch == epoch and one.state_dict()["epoch"] == epoch
            list(one)


def test_dropped_tails_are_only_the_ends_of_lanes(lake: Path) -> None:
    batches = ids(loader_of(lake, drop_last=True, num_lanes=2))
    assert all(len(batch) == 4 for batch in batches) and len(batches) == 8
    assert len({row for batch in batches for row in batch}) == 32


def test_an_endless_stream_goes_on_over_epochs_and_restores(lake: Path) -> None:
    loader = loader_of(lake, endless=True, num_lanes=3)
    whole = ids(some(loader, 60))
    assert all(len(batch) == 4 for batch in whole)
    counts = [[row for batch in whole for row in batch].count(row) for row in EVERY]
    assert sum(counts) == 240 and max(counts) - min(counts) <= 2
    assert loader.epoch == 0
    resumed = loader_of(lake, endless=True, num_lanes=3)
    middle = loader_of(lake, endless=True, num_lanes=3)
    before = ids(some(middle, 25))
    resumed.load_state_dict(as_json(middle.state_dict()))
    assert before + ids(some(resumed, 35)) == whole
    for call in (loader.rewind, lambda: loader.set_epoch(4)):
        with pytest.raises(ConfigError, match="endless"):
            call()


@pytest.mark.parametrize("files", [((),), ((0,),), ((1,),), ((0, 1), ()), ((2, 1),)])
def test_tables_of_no_row_one_row_or_fewer_rows_than_ranks(tmp_path: Path, files: Any) -> None:
    spec = LakeSpec(files=files)
    folder = spec.write(tmp_path / "few")
    for batch_size, num_workers in ((4, 0), (None, 0), (4, 1)):
        counts = []
        rows = []
        for rank in range(5):
            loader = loader_of(folder, batch_size=batch_size, rank=rank, world_size=5, num_workers=num_workers)
            items = list(loader)
            counts.append(len(items))
            rows += flat(items)
            assert all(item["id"].shape == ((0,) if not item.receipt.rows else (1,)) for item in items if batch_size)
            assert loader.epoch == 1
            resumed = loader_of(folder, batch_size=batch_size, rank=rank, world_size=5)
            resumed.load_state_dict(as_json(loader.state_dict()))
            assert len(list(resumed)) == counts[-1]
        assert sorted(rows) == list(range(spec.rows))
        assert batch_size is None or len(set(counts)) == 1
    if not spec.rows:
        with pytest.raises(ConfigError, match="at least one row"):
            loader_of(folder, endless=True)


def test_unicode_column_names_and_projection_in_the_order_asked_for(tmp_path: Path) -> None:
    table = pa.table({"größe": [1, 2], "日本": ["a", "b"], "a b.c": [0.5, 1.5]})
    pq.write_table(table, tmp_path / "ü.parquet")
    (batch,) = LakeLoader(LakeDataset(tmp_path, batch_size=2, columns=["a b.c", "größe"]))
    assert list(batch) == ["a b.c", "größe"] and batch["größe"].tolist() == [1, 2]
    (batch,) = LakeLoader(LakeDataset(tmp_path, batch_size=2))
    assert batch["日本"] == ["a", "b"]


def test_a_dataset_goes_through_pickle_and_copies_with_its_place(lake: Path) -> None:
    dataset = LakeDataset(open_table(lake), batch_size=4, shuffle=True)
    whole = flat(LakeDataset(lake, batch_size=4, shuffle=True))
    before = flat(some(dataset, 3))
    for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert before + flat(other) == whole
    assert before + flat(dataset) == whole


def test_a_copy_of_a_loader_whose_workers_persist_goes_on_with_workers_of_its_own(lake: Path) -> None:
    dataset = LakeDataset(lake, batch_size=4, shuffle=True)
    whole = flat(LakeDataset(lake, batch_size=4, shuffle=True))
    loader = LakeLoader(dataset, num_workers=1, persistent_workers=True)
    before = flat(some(loader, 3))
    assert before + flat(copy.deepcopy(loader)) == whole
    assert before + flat(loader) == whole


@settings(max_examples=examples(40))
@given(
    rows=st.integers(0, 30),
    batch_size=st.integers(1, 7),
    tail=st.sampled_from(["short", "drop"]),
    steps=st.integers(0, 8),
)
def test_states_of_rows_and_of_batches_go_on_in_each_other(
    tmp_path_factory: pytest.TempPathFactory, rows: int, batch_size: int, tail: str, steps: int
) -> None:
    folder = LakeSpec(files=((rows // 2, rows - rows // 2),)).write(tmp_path_factory.mktemp("t"))
    whole = set(range(rows))
    for first, second in itertools.permutations([batch_size, None]):
        one = loader_of(folder, batch_size=first, tail=tail, num_lanes=2)
        before = flat(some(one, steps if first else 5 * steps))
        other = loader_of(folder, batch_size=second, tail=tail, num_lanes=2)
        other.load_state_dict(as_json(one.state_dict()))
        after = flat(other) if other.epoch == 0 else []
        found = before + after
        assert len(set(found)) == len(found) and set(found) <= whole
        if tail == "short":
            assert set(found) == whole


def test_a_stream_read_row_by_row_goes_on_in_batches(lake: Path) -> None:
    for taken in range(10):
        rows = loader_of(lake, endless=True, batch_size=None, num_lanes=2)
        before = flat(some(rows, taken))
        batches = loader_of(lake, endless=True, num_lanes=2)
        batches.load_state_dict(as_json(rows.state_dict()))
        found = before + flat(some(batches, 30))
        counts = [found.count(row) for row in EVERY]
        assert sum(counts) == taken + 120 and max(counts) - min(counts) <= 2
        first = {row for row in EVERY if row in found[: ROWS + 16]}
        assert len(first) == ROWS, taken


def test_an_accepted_change_of_the_tail_reads_what_is_left_exactly(lake: Path) -> None:
    for taken in range(10):
        short = loader_of(lake, num_lanes=3)
        before = ids(some(short, taken))
        refused = loader_of(lake, num_lanes=3, drop_last=True)
        with pytest.raises(StateMismatch, match=r"tail: 'drop' in this dataset, 'short' in the state.*accept_changes"):
            refused.load_state_dict(short.state_dict())
        dropping = loader_of(lake, num_lanes=3, drop_last=True, accept_changes=["tail"])
        dropping.load_state_dict(short.state_dict())
        rest = ids(dropping)
        rows = [row for batch in before + rest for row in batch]
        assert len(set(rows)) == len(rows) and all(len(batch) == 4 for batch in rest)
        assert len(rows) > ROWS - 3 * 4 - 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer up to 2147483648, got 0"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"num_lanes": -1}, "num_lanes"),
        ({"shuffle_window": 0}, "shuffle_window"),
        ({"drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"output": "jax"}, "output"),
        ({"nulls": "zero"}, "nulls"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank must be in"),
        ({"rank": 0, "world_size": 0}, "rank must be in"),
        ({"columns": "id"}, "columns must be a list of names"),
        ({"columns": ["id", "id"]}, "twice"),
        ({"columns": ["id", 3]}, "columns"),
        ({"columns": ["di"]}, "no column 'di'"),
        ({"columns": []}, "at least one"),
        ({"transform": 3}, "transform must be callable"),
        ({"seed": 2**64}, "seed must fit 64 bits"),
        ({"seed": "7"}, "seed must be an integer, got '7'"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"shuffle": "yes"}, "shuffle must be True or False, got 'yes'"),
        ({"endless": 1}, "endless must be True or False"),
        ({"rank": "0", "world_size": 2}, "rank must be an integer"),
        ({"batch_size": 2**40}, "up to 2147483648"),
        ({"accept_changes": ["rows"]}, "accept_changes may name"),
        ({"accept_changes": "table"}, "accept_changes"),
        ({"accept_changes": 5}, "accept_changes is a list of names, got 5"),
        ({"accept_changes": [["tail"]]}, r"accept_changes may name .*, got \[\['tail'\]\]"),
    ],
)
def test_arguments_that_cannot_be_are_named(lake: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataset_of(lake, **{"batch_size": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": 1.0}, "num_workers"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"persistent_workers": True}, "persistent_workers"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "multiprocessing_context"),
        ({"num_workers": 1, "timeout": -1}, "timeout"),
    ],
)
def test_loader_arguments_that_cannot_be_are_named(lake: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LakeLoader(LakeDataset(lake, batch_size=4), **arguments)


def test_a_loader_reads_a_lakedataset_only(lake: Path) -> None:
    with pytest.raises(ConfigError, match=r"reads a lakeckpt\.LakeDataset, got list"):
        LakeLoader([1])  # type: ignore[arg-type]


def test_more_lanes_than_can_be_planned_are_refused(lake: Path) -> None:
    loader = loader_of(lake, num_lanes=2**21)
    with pytest.raises(ConfigError, match="at most 1048576 lanes"):
        iter(loader)


@pytest.mark.parametrize("state", [None, [], "x", {}, {"format": "lakeckpt.reader/2"}, {"format": "lakeckpt.worker/1"}])
def test_what_is_no_state_is_refused_without_a_change(lake: Path, state: Any) -> None:
    loader = loader_of(lake)
    some(loader, 2)
    before = loader.state_dict()
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 8}, "seed: 8 in this dataset, 0 in the state"),
        ({"shuffle": False}, "shuffle: False in this dataset, True in the state"),
        ({"shuffle_window": 2}, "window: 2 in this dataset, 4 in the state"),
        ({"endless": True}, "endless: True in this dataset, False in the state"),
    ],
)
def test_a_state_of_another_order_is_refused_and_says_what_differs(
    lake: Path, change: dict[str, Any], match: str
) -> None:
    source = loader_of(lake)
    some(source, 2)
    other = loader_of(lake, **change)
    some(other, 1)
    before = other.state_dict()
    with pytest.raises(StateMismatch, match=match):
        other.load_state_dict(source.state_dict())
    assert other.state_dict() == before


def test_another_table_of_as_many_rows_is_read_only_when_accepted(lake: Path, tmp_path: Path) -> None:
    other = LakeSpec(files=((ROWS,),)).write(tmp_path / "other")
    source = loader_of(lake)
    before = flat(some(source, 3))
    with pytest.raises(StateMismatch, match=r"table: '\w+' in this dataset, '\w+' in the state.*accept_changes"):
        loader_of(other).load_state_dict(source.state_dict())
    accepted = loader_of(other, accept_changes=["table"])
    accepted.load_state_dict(source.state_dict())
    assert len(before) + len(flat(accepted)) == ROWS
    fewer = loader_of(LakeSpec().write(tmp_path / "fewer"), accept_changes=["table"])
    with pytest.raises(StateMismatch, match="rows: 12 in this dataset, 37 in the state"):
        fewer.load_state_dict(source.state_dict())


def test_integers_of_numpy_are_integers(lake: Path) -> None:
    made = {"batch_size": np.int64(4), "seed": np.uint8(3), "rank": np.int32(0), "world_size": np.int64(1)}
    loader = loader_of(lake, num_workers=np.int8(0), **made)  # type: ignore[arg-type]
    some(loader, 1)
    resumed = loader_of(lake, seed=3)
    resumed.load_state_dict(as_json(loader.state_dict()))
    assert ids(resumed) == ids(loader)


@pytest.mark.parametrize("batch_size", [4, None])
def test_what_ends_too_early_is_not_taken_for_the_end_of_the_epoch(
    lake: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int | None
) -> None:
    class Short(Ahead):
        def __init__(self, source: Any, stretches: Any, rank: int, **given: Any) -> None:
            super().__init__(source, [(plan, step, 2) for plan, step, _ in stretches], rank, **given)

    monkeypatch.setattr("lakeckpt.data.dataset.base_dataset.Ahead", Short)
    loader = loader_of(lake, batch_size=batch_size)
    for reads in (loader, loader.dataset):
        with pytest.raises(StateUnavailable, match="ended before step 2 of"):
            list(reads)
        assert reads.epoch == 0 and reads.state_dict()["step"] == 2
        reads.rewind()


def test_a_dataset_is_read_by_a_loader_that_goes_on_or_by_one_that_begins_anew(lake: Path) -> None:
    dataset = dataset_of(lake, batch_size=5)
    training = LakeLoader(dataset)
    with pytest.raises(ConfigError, match=r"read by another LakeLoader already.* a LakeDataset of its own"):
        LakeLoader(dataset, restart=True)
    assert training.dataset is LakeLoader(dataset).dataset  # one more that goes on is as before
    del training
    gc.collect()
    assert LakeLoader(dataset, restart=True)._restarts == 0
