"""Filtered reading keeps the law: in lockstep, exact at every offset and topology; rows are counted once, by anyone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lakeckpt import LakeDataset, LakeLoader, Table, open_table
from lakeckpt.data.base import selecting
from lakeckpt.errors import ConfigError, SchemaError, StateMismatch
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import dataset_of, ids
from tests.data.test_workers_of_others import show_warnings
from tests.examples import examples
from tests.reading.filters.filtering import expressions, kept_by_pyarrow, tables, with_deletes
from tests.tracking.processes import run_processes

f = pc.field
KEPT = [i for i in range(60) if i % 3 != 1 and i >= 12]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows in row groups of 8: ``x`` is null, 0 or 1 in turn, so that each is cut into, or kept, or not."""
    folder = tmp_path_factory.mktemp("filtered")
    whole = pa.table({"id": range(60), "x": [None if i % 3 == 1 else i % 2 for i in range(60)], "y": range(60)})
    for part in range(2):
        pq.write_table(whole.slice(30 * part, 30), folder / f"{part}.parquet", row_group_size=8)
    return folder


FILTER = f("x").is_valid() & (f("y") >= 12)


def make_of(table: Table, *, count_once: bool = False, **fixed: Any) -> Callable[..., LakeLoader]:
    counted: list[RowSelection] = []

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> LakeLoader:
        chosen = {"batch_size": 4, "columns": ["id"], "filters": FILTER, **fixed, **options}
        dataset = dataset_of(table, **chosen, rank=rank, world_size=world_size)
        for one in counted:
            LakeLoader(dataset)._reader.tables[""].offer_selection(one)
        if count_once and not counted and dataset.selection is not None:
            counted.append(dataset.selection)
        return LakeLoader(dataset, num_workers=num_workers)

    return make_loader


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"shuffle": True, "drop_last": True, "num_lanes": 6},
        {"shuffle": True, "endless": True},
        {"shuffle": True, "batch_size": None},
        {"columns": None, "nulls": "mask", "output": "numpy"},
        {"batch_size": 64, "filters": [("y", ">", 57)]},
        {"filters": [("y", ">", 570)]},
    ],
    ids=str,
)
def test_every_kept_row_counts_once_restored_everywhere(lake: Path, case: dict[str, Any]) -> None:
    shapes = [(1, 0), (2, 0), (3, 0)] if case.get("batch_size", 4) else [(1, 0), (2, 0)]
    assert_exactly_once(make_of(open_table(lake), count_once=True, **case), topologies=shapes, offsets=2, chains=1)


def with_rows(found: RowSelection, rows: Any) -> RowSelection:
    """``found`` with other counts."""
    return replace(found, group_rows=rows, group_digests=np.where(rows == 0, np.uint64(0), found.group_digests))


def test_the_law_sees_a_count_that_is_wrong(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row too few of a row group: decoding says so. None where there are some: the law does."""

    def wrong(*args: Any, **options: Any) -> Any:
        found, counted = count_rows(*args, **options)
        rows = found.group_rows.copy()
        rows[2] -= 1
        return with_rows(found, rows), counted

    monkeypatch.setattr(selecting, "count_rows", wrong)
    with pytest.raises(Exception, match="that were counted"):
        assert_exactly_once(make_of(open_table(lake)), topologies=[(1, 0)], chains=0)

    def fewer(*args: Any, **options: Any) -> Any:
        found, counted = count_rows(*args, **options)
        rows = found.group_rows.copy()
        rows[2] = 0
        return with_rows(found, rows), counted

    monkeypatch.setattr(selecting, "count_rows", fewer)  # a row group of which nothing is read is not checked
    with pytest.raises(AssertionError):
        assert_exactly_once(make_of(open_table(lake)), topologies=[(1, 0)], chains=0)


@settings(max_examples=examples(8))
@given(data=st.data(), shuffle=st.booleans(), ranks=st.integers(1, 3))
def test_delivered_rows_are_those_of_pyarrows_filter(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, shuffle: bool, ranks: int
) -> None:
    whole = data.draw(tables())
    expression = data.draw(expressions(whole.schema))
    kept = kept_by_pyarrow(whole, expression)["id"].to_pylist()
    deleted = data.draw(st.sets(st.integers(0, whole.num_rows - 1), max_size=5))
    folder = tmp_path_factory.mktemp("t")
    pq.write_table(whole, folder / "a.parquet", row_group_size=5)
    table = with_deletes(open_table(folder), {0: sorted(deleted)})
    wanted = [one for one in kept if one not in deleted]
    make = make_of(table, filters=expression, shuffle=shuffle, output="arrow", batch_size=3)
    loaders = [make(rank, ranks, 0) for rank in range(ranks)]
    found = [[batch["id"].to_pylist() for batch in loader] for loader in loaders]
    assert len({len(one) for one in found}) == 1, "every rank has as many steps"
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(found))) == wanted
    assert_exactly_once(
        make_of(
            table, count_once=True, filters=expression, shuffle=shuffle, output="arrow", batch_size=3, columns=None
        ),
        topologies=[(1, 0), (2, 0)],
        offsets=1,
        chains=1,
    )


def test_a_state_of_another_filter_is_refused_by_name(lake: Path) -> None:
    table = open_table(lake)
    state = make_of(table)(0, 1, 0).state_dict()
    for other, said in (
        ({"filters": [("y", ">", 13)]}, r"this dataset, \(y > 13\), keeps other rows"),
        ({"filters": None}, "this dataset has none"),
    ):
        with pytest.raises(StateMismatch, match=said):
            make_of(table, **other)(0, 1, 0).load_state_dict(state)
    with pytest.raises(StateMismatch, match="this dataset has a filter"):
        make_of(table)(0, 1, 0).load_state_dict(make_of(table, filters=None)(0, 1, 0).state_dict())
    make_of(table, filters=(f("y") >= 12) & f("x").is_valid())(0, 1, 0).load_state_dict(state)


def test_a_filter_that_keeps_as_many_rows_may_be_accepted(lake: Path) -> None:
    table = open_table(lake)
    state = make_of(table, filters=[("y", "<", 30)])(0, 1, 0).state_dict()
    other = {"filters": [("y", ">=", 30)]}
    with pytest.raises(StateMismatch, match="keeps other rows"):
        make_of(table, **other)(0, 1, 0).load_state_dict(state)
    make_of(table, **other, accept_changes=["selection"])(0, 1, 0).load_state_dict(state)


def test_wrong_filters_are_refused_when_the_dataset_is_made(lake: Path) -> None:
    with pytest.raises(SchemaError, match=r"FieldRef\.Name\(z\)"):
        LakeDataset(open_table(lake), batch_size=4, filters=[("z", ">", 1)])
    loader = LakeLoader(LakeDataset(open_table(lake), batch_size=4, filters=[("y", "<", 0)], endless=True))
    with pytest.raises(ConfigError, match=r"\(y < 0\) keeps none"):
        iter(loader)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """How often rows were counted, in this process or one that it forked."""
    log = tmp_path / "counts"
    log.touch()

    def noted(*args: Any, **options: Any) -> Any:
        with log.open("a") as file:
            file.write("x")
        return count_rows(*args, **options)

    monkeypatch.setattr(selecting, "count_rows", noted)
    return lambda: log.stat().st_size


def test_rows_are_counted_once_and_only_when_they_must_be(lake: Path, counts: Callable[[], int]) -> None:
    loader = make_of(open_table(lake), shuffle=True)(0, 1, 2)
    assert counts() == 0
    for _ in range(2):
        assert sorted(row for batch in ids(loader) for row in batch) == KEPT
    assert loader.dataset.selection is not None and loader.dataset.selection.num_rows == len(KEPT)
    assert counts() == 1


def test_workers_of_another_loader_have_the_counts_that_the_main_process_asked_for(
    lake: Path, counts: Callable[[], int]
) -> None:
    dataset = LakeDataset(open_table(lake), batch_size=4, columns=["id"], filters=FILTER)
    assert dataset.selection is not None
    for _ in range(2):
        rows = ids(DataLoader(dataset, batch_size=None, num_workers=3, multiprocessing_context="fork"))
        assert sorted(row for batch in rows for row in batch) == KEPT
    assert counts() == 1


def test_workers_that_count_each_for_itself_say_how_to_count_once(
    lake: Path, capfd: pytest.CaptureFixture[str], counts: Callable[[], int]
) -> None:
    dataset = LakeDataset(open_table(lake), batch_size=4, columns=["id"], filters=FILTER)
    rows = ids(DataLoader(dataset, batch_size=None, num_workers=1, worker_init_fn=show_warnings))
    assert sorted(row for batch in rows for row in batch) == KEPT
    assert counts() == 1 and "ask for dataset.selection before you iterate" in capfd.readouterr().err


def test_workers_that_get_a_pickled_dataset_have_the_counts(lake: Path) -> None:
    loader = make_of(open_table(lake))(0, 1, 0)
    started = LakeLoader(loader.dataset, num_workers=1, multiprocessing_context="forkserver")
    assert sorted(row for batch in ids(started) for row in batch) == KEPT


@pytest.mark.filterwarnings("ignore:each worker of this DataLoader counts")
def test_a_stateful_dataloader_goes_on_exactly_under_a_filter(lake: Path) -> None:
    def loader() -> StatefulDataLoader:
        dataset = LakeDataset(open_table(lake), batch_size=4, columns=["id"], filters=FILTER, shuffle=True)
        return StatefulDataLoader(dataset, batch_size=None, num_workers=2)

    whole = [batch["id"].tolist() for batch in loader()]
    assert sorted(row for batch in whole for row in batch) == KEPT
    for taken in (1, len(whole) // 2):
        first, again = loader(), loader()
        iterator = iter(first)
        before = [next(iterator)["id"].tolist() for _ in range(taken)]
        again.load_state_dict(first.state_dict())
        assert before + [batch["id"].tolist() for batch in again] == whole


@pytest.mark.soak
def test_every_kept_row_counts_once_on_ranks_with_workers(lake: Path) -> None:
    for case in ({"shuffle": True}, {"shuffle": True, "drop_last": True, "num_lanes": 6}):
        assert_exactly_once(
            make_of(open_table(lake), count_once=True, **case),
            topologies=[(1, 0), (2, 2), (3, 1), (4, 0)],
            chains=4,
        )


# --- ranks that count once


def job(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    counted: list[int] = []
    selecting.count_rows = lambda *of, **how: counted.append(1) or count_rows(*of, **how)  # type: ignore[func-returns-value]
    dataset = LakeDataset(f"{folder}/lake", batch_size=4, columns=["id"], filters=[("id", ">=", 100)])
    if rank == 0:  # alone, as savers ask: nobody answers, and nothing hangs
        assert dataset.state_dict()["identity"]["rows"] == 1500
    dist.barrier()
    assert dataset.selection is not None and dataset.selection.num_rows == 1500
    rows = [row for batch in LakeLoader(dataset) for row in batch["id"].tolist()]
    Path(folder, f"rows.{rank}").write_text(",".join(map(str, rows)))
    Path(folder, f"counted.{rank}").write_text(str(len(counted)))
    broken = LakeDataset(f"{folder}/lake", batch_size=4, columns=["id"], filters=[("id", ">=", 200)])
    if rank == 0:  # it fails, and the others count for themselves
        selecting.count_rows = fails  # type: ignore[assignment]
        with pytest.raises(OSError, match="no counts here"):
            _ = broken.selection
    dist.barrier()
    assert rank == 0 or (broken.selection is not None and broken.selection.num_rows == 1400)
    dist.barrier()
    dist.destroy_process_group()


def fails(*of: Any, **how: Any) -> Any:
    raise OSError("no counts here")


def test_ranks_of_a_job_count_once_and_one_may_need_it_alone(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    for part in range(16):
        pq.write_table(pa.table({"id": range(100 * part, 100 * part + 100)}), tmp_path / "lake" / f"{part:02}.parquet")
    run_processes(2, job, str(tmp_path))
    rows = [int(one) for rank in range(2) for one in (tmp_path / f"rows.{rank}").read_text().split(",")]
    assert sorted(rows) == list(range(100, 1600))
    assert [(tmp_path / f"counted.{rank}").read_text() for rank in range(2)] == ["1", "0"]
