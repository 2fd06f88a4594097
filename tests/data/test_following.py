"""A loader that follows a growing table delivers each row once, in full batches, on any chain of topologies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import Follow, LakeDataset, LakeLoader, ReadOptions, Table, mix, open_table, pack, prefetch
from lakeckpt.data.base import selecting
from lakeckpt.errors import (
    ConfigError,
    DataFileChanged,
    LakeckptError,
    SchemaError,
    StateMismatch,
    TableError,
    TableRewritten,
)
from lakeckpt.reading.filters.row_filter import RowFilter
from tests.data.growing import AT_ONCE, NOT_THIRDS, Growing, Run, follower, ranks_in_one_process
from tests.data.reading import as_json, flat, some
from tests.examples import examples
from tests.tracking.processes import run_processes


@pytest.fixture
def lake(tmp_path: Path) -> Growing:
    made = Growing(tmp_path / "lake")
    made.append(40)
    return made


ATTEMPTS = st.tuples(
    st.integers(1, 4),  # ranks
    st.integers(1, 12),  # steps
    st.integers(0, 4),  # of which are lost
    st.fixed_dictionaries({"batch_size": st.integers(1, 5), "num_lanes": st.sampled_from([None, 1, 2, 4, 6])}),
)


@settings(max_examples=examples(15))
@given(
    first=st.integers(0, 60),
    attempts=st.lists(ATTEMPTS, min_size=1, max_size=6),
    every=st.integers(1, 4),
    appended=st.lists(st.integers(0, 30), min_size=4, max_size=12),
    how=st.fixed_dictionaries({"shuffle": st.booleans(), "shuffle_window": st.integers(1, 4)}),
    filters=st.sampled_from([None, NOT_THIRDS]),
)
def test_any_history_of_appends_topologies_and_kills_counts_every_row_once(
    first: int, attempts: list[Any], every: int, appended: list[int], how: dict[str, Any], filters: Any
) -> None:
    appends = {every * number: rows for number, rows in enumerate(appended, 1)}
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Growing(Path(folder, "lake")), {**how, "filters": filters})
        run.lake.append(first)
        for ranks, steps, lost, dataset in attempts:
            if run.attempt(ranks, steps, appends, lost=lost, **dataset):
                run.lake.append(9)
        while not run.attempt(1, 1000, appends):
            pass
        assert sorted(run.ids) == [row for row in range(run.lake.rows) if filters is None or row % 3]


@pytest.mark.parametrize("filters", [None, NOT_THIRDS], ids=["all", "filtered"])
def test_a_history_on_changing_ranks_counts_every_row_once(tmp_path: Path, filters: Any) -> None:
    run = Run(Growing(tmp_path / "lake"), {"filters": filters, "shuffle_window": 2})
    run.lake.append(83)
    appends = {step: 7 * step % 23 for step in range(2, 40, 2)}
    run.attempt(3, 5, appends, num_lanes=6, lost=1)
    run.attempt(2, 6, appends, batch_size=3)
    run.attempt(1, 9, appends, batch_size=5, lost=2)
    run.attempt(4, 7, appends, batch_size=2)
    assert run.attempt(1, 1000, appends)
    run.lake.append(11)
    run.attempt(3, 2, {}, num_lanes=6, batch_size=2)  # in the last rows of the stream
    assert run.states[-1][0]["identity"]["tail"] == "short"
    assert run.attempt(2, 1000, {})
    assert run.states[-1][0]["epoch"] > 5
    assert sorted(run.ids) == [row for row in range(run.lake.rows) if filters is None or row % 3]


def test_batches_are_full_over_the_borders_of_tranches_and_the_rest_comes_at_the_end(lake: Growing) -> None:
    sizes = []
    for batch in (loader := follower(lake.folder, batch_size=6)):
        sizes.append(len(batch["id"]))
        if len(sizes) in (2, 8):
            lake.append(9)
    assert sizes == [6] * 9 + [4]
    assert loader.state_dict()["identity"]["tail"] == "short"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_ended_goes_on_with_what_was_added_since(lake: Growing, workers: int) -> None:
    loader = follower(lake.folder, workers=workers)
    assert sorted(flat(loader)) == list(range(40))
    assert flat(loader) == []
    lake.append(3)
    assert sorted(flat(loader)) == [40, 41, 42]
    lake.append(30)
    assert sorted(flat(some(loader, 4)) + flat(loader)) == list(range(43, 73))


def test_workers_read_each_tranche_and_no_worker_changes_the_rows(lake: Growing) -> None:
    def rows(workers: int) -> list[int]:
        loader, found = follower(table, workers=workers, num_lanes=2), []
        for number, batch in enumerate(loader):
            found += batch["id"].tolist()
            if workers == 0 and number in (3, 14):
                lake.append(17)
        return found

    table = lake.folder
    first = rows(0)
    assert sorted(first) == list(range(74))
    assert sorted(rows(2)) == list(range(74))


def test_batches_that_are_held_ready_are_counted_when_the_loop_gets_them(lake: Growing) -> None:
    loader = follower(lake.folder)
    found = []
    for number, batch in enumerate(prefetch(loader, depth=3)):
        found += batch["id"].tolist()
        assert len(batch["id"]) <= 4
        if number == 4:
            lake.append(10)
    assert sorted(found) == list(range(50))


def test_a_dataset_without_a_loader_follows_too(lake: Growing) -> None:
    dataset = LakeDataset(lake.folder, batch_size=4, follow=AT_ONCE)
    found = []
    for number, batch in enumerate(dataset):
        found += batch["id"].tolist()
        if number == 2:
            lake.append(6)
    assert sorted(found) == list(range(46))


def test_the_state_stays_small_and_its_place_is_a_tranche_and_a_step(lake: Growing) -> None:
    loader = follower(lake.folder)
    for number, _ in enumerate(loader):
        if number < 60 and number % 3 == 0:
            lake.append(8)
    state = loader.state_dict()
    assert state["epoch"] >= 5
    assert len(str(state)) < 600
    assert state["identity"]["rows"] == 3 or state["identity"]["rows"] < 40  # type: ignore[index]


def test_a_filter_is_counted_once_for_each_tranche(lake: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, real = list[int](), selecting.count_rows

    def count(table: Table, keep: RowFilter, **named: Any) -> Any:
        counted.append(table.num_rows)
        return real(table, keep, **named)

    monkeypatch.setattr(selecting, "count_rows", count)
    found = []
    for number, batch in enumerate(follower(lake.folder, filters=[("id", ">=", 10)])):
        found += batch["id"].tolist()
        if number == 1:
            lake.append(20)
    assert sorted(found) == list(range(10, 60))
    assert counted == [40, 22, 2]  # two rows were left of the first tranche, and two of the second


# --- waiting


class Clock:
    """A clock that only sleeping moves. ``then`` is called with the number of each sleep."""

    def __init__(self, patch: pytest.MonkeyPatch, then: Callable[[int], object] = lambda number: None) -> None:
        self.now, self.slept, self._then = 0.0, list[float](), then
        patch.setattr("lakeckpt.data.position.following.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self._then(len(self.slept))


def test_the_stream_waits_for_rows_and_ends_when_none_came_for_long_enough(
    lake: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda number: lake.append(2) if number in (5, 9) else None)
    loader = follower(lake.folder, batch_size=5, follow=Follow(poll_every_s=10, stop_after_idle_s=60))
    assert [len(batch["id"]) for batch in loader] == [5] * 8 + [4]
    assert clock.slept == [10] * (9 + 6)  # two rows came after 50 s, two more after 40 s: each begins the wait anew


def test_without_a_limit_the_stream_waits_for_ever(lake: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda number: lake.append(20) if number == 5000 else None)
    assert sorted(flat(some(follower(lake.folder, follow=True), 15))) == list(range(60))
    assert clock.slept == [30] * 5000


def test_too_few_rows_for_a_step_of_all_lanes_wait_for_more(lake: Growing) -> None:
    loader = follower(lake.folder, num_lanes=8)
    assert {len(batch["id"]) for batch in some(loader, 8)} == {4}
    lake.append(8)  # 8 rows were left, and 16 fill no step of 8 lanes
    rest = [len(batch["id"]) for batch in loader]
    assert sum(rest) == 16 and loader.state_dict()["epoch"] == 1


# --- what is no append


def test_files_that_are_gone_are_refused_or_ignored(lake: Growing) -> None:
    loader = follower(lake.folder)
    assert len(flat(some(loader, 10))) == 40
    lake.files[0].unlink()
    lake.append(9)
    with pytest.raises(TableRewritten, match=r"1 files of .* are gone"):
        next(iter(loader))
    ignoring = follower(lake.folder, follow=Follow(poll_every_s=0, stop_after_idle_s=0, ignore_deletes=True))
    ignoring.dataset._versions.repin(loader.table.index)
    ignoring.load_state_dict(loader.state_dict())
    assert sorted(flat(ignoring)) == list(range(40, 49))


@pytest.mark.parametrize("ignores", [False, True])
def test_a_file_that_was_written_again_is_refused(lake: Growing, ignores: bool) -> None:
    loader = follower(lake.folder, follow=Follow(poll_every_s=0, ignore_deletes=ignores))
    assert len(flat(some(loader, 10))) == 40
    pq.write_table(pa.table({"id": range(90)}), lake.files[0])
    with pytest.raises(DataFileChanged, match="written again"):
        next(iter(loader))


def test_columns_that_are_read_stay_as_they_were(lake: Growing) -> None:
    loader = follower(lake.folder)
    assert len(some(loader, 10)) == 10
    pq.write_table(pa.table({"id": [40, 41, 42, 43], "more": ["x"] * 4}), lake.folder / "more.parquet")
    (batch,) = some(loader, 1)
    assert list(batch) == ["id"]
    narrow = pa.table({"id": pa.array(range(44, 48), pa.int32())})
    pq.write_table(narrow, lake.folder / "narrow.parquet")
    (batch,) = some(loader, 1)
    assert (batch["id"].dtype, sorted(batch["id"].tolist())) == (torch.int64, [44, 45, 46, 47])
    pq.write_table(pa.table({"id": ["48"] * 4}), lake.folder / "text.parquet")
    with pytest.raises(SchemaError, match=r"'id' of the files that were added .* it is string, and int64 in earlier"):
        next(iter(loader))


def test_columns_that_are_not_read_may_go_or_change(tmp_path: Path) -> None:
    for name, extra in (("a", {"x": [1.0] * 4}), ("b", {"x": ["text"] * 4}), ("c", {})):
        if name == "a":
            (tmp_path / "lake").mkdir()
            pq.write_table(pa.table({"id": range(4), **extra}), tmp_path / "lake" / "a.parquet")
            loader = follower(tmp_path / "lake", columns=["id"], batch_size=2)
            found = flat(some(loader, 2))
        else:
            pq.write_table(pa.table({"id": range(4), **extra}), tmp_path / "lake" / f"{name}.parquet")
            found += flat(some(loader, 2))
    assert sorted(found) == sorted([0, 1, 2, 3] * 3)


def test_partition_columns_keep_their_values(tmp_path: Path) -> None:
    root = tmp_path / "lake"

    def add(day: int, first: int, stop: int) -> None:
        (root / f"day={day}").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": range(first, stop)}), root / f"day={day}" / f"{first}.parquet")

    add(2, 0, 10)
    found: dict[int, int] = {}
    for number, batch in enumerate(follower(root)):
        found |= dict(zip(batch["id"].tolist(), batch["day"].tolist(), strict=True))
        if number == 1:
            add(1, 10, 15)
            add(3, 15, 23)
    assert found == {row: 2 if row < 10 else 1 if row < 15 else 3 for row in range(23)}


# --- restoring


def test_row_groups_that_are_excluded_stay_out_in_every_tranche(lake: Growing) -> None:
    with pytest.warns(UserWarning, match="7-1.parquet"):  # which comes later
        table = open_table(lake.folder, exclude=[("0-0.parquet", 1), ("7-1.parquet", 0)])
    loader = LakeLoader(LakeDataset(table, batch_size=4, follow=AT_ONCE))
    found = []
    for number, batch in enumerate(loader):
        found += batch["id"].tolist()
        if number == 1:
            lake.append(20)
    assert sorted(found) == [*range(7), *range(14, 40), *range(47, 60)]


def test_a_state_of_a_tranche_is_refused_where_no_run_has_its_index(lake: Growing) -> None:
    loader = follower(lake.folder)
    for number, _ in enumerate(loader):
        if number == 2:
            lake.append(20)
        if number == 12:
            break
    with pytest.raises(StateMismatch, match="table:"):
        follower(lake.folder).load_state_dict(as_json(loader.state_dict()))
    plain = LakeLoader(LakeDataset(lake.folder, batch_size=4, options=ReadOptions(accept_changes=["tail", "table"])))
    with pytest.raises(StateMismatch, match="tail: 'short' in this dataset, 'carry' in the state"):
        plain.load_state_dict(as_json(follower(lake.folder).state_dict()))


def test_ranks_that_opened_the_table_before_and_after_an_append_read_what_the_first_one_opened(
    lake: Growing,
) -> None:
    with ranks_in_one_process():
        first = follower(lake.folder, rank=0, world_size=2)
        lake.append(10)
        second = follower(lake.folder, rank=1, world_size=2)
        iterators = [iter(first), iter(second)]
        found = []
        while (batches := [next(one, None) for one in iterators])[0] is not None:
            found += [row for batch in batches for row in batch["id"].tolist()]
    assert sorted(found) == list(range(50))


def job(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    lake = Growing(Path(folder, "lake"), rows=40, files=[Path(folder, "lake", "0-0.parquet")])
    loader = follower(lake.folder, rank=None, world_size=None)
    rows: list[int] = []
    for number, batch in enumerate(loader):
        rows += batch["id"].tolist()
        if rank == 0 and number in (1, 3):
            lake.append(13)
    Path(folder, f"rows.{rank}").write_text(",".join(map(str, rows)))
    dist.barrier()
    if rank == 0:
        lake.files[0].unlink()
    dist.barrier()
    with pytest.raises(TableRewritten, match="are gone" if rank == 0 else "on the first rank: .*are gone"):
        flat(loader)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_go_over_together_and_fail_alike(lake: Growing) -> None:
    run_processes(2, job, str(lake.folder.parent))
    rows = [int(one) for rank in range(2) for one in (lake.folder.parent / f"rows.{rank}").read_text().split(",")]
    assert sorted(rows) == list(range(66))


# --- refusals


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": None},
        {"endless": True},
        {"drop_last": True},
        {"consumed": {"0-0.parquet": [(0, 3)]}},
        {"options": ReadOptions(on_new_version="next_epoch")},
        {"options": ReadOptions(on_version_gone="next_epoch")},
        {"options": ReadOptions(accept_changes=["table"])},
        {"follow": "yes"},
        {"follow": 1},
    ],
    ids=str,
)
def test_what_following_cannot_be_is_refused(lake: Growing, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"follow"):
        LakeDataset(lake.folder, **{"batch_size": 4, "follow": True, **arguments})


@pytest.mark.parametrize(
    "arguments", [{"poll_every_s": -1}, {"poll_every_s": None}, {"stop_after_idle_s": "1"}, {"ignore_deletes": 1}]
)
def test_a_follow_that_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Follow(**arguments)


def test_a_followed_dataset_has_no_epochs_no_length_and_no_packing(lake: Growing) -> None:
    dataset = LakeDataset(lake.folder, batch_size=4, follow=True)
    with pytest.raises(ConfigError, match="no epoch"):
        dataset.rewind()
    with pytest.raises(ConfigError, match="no epoch"):
        dataset.set_epoch(2)
    loader = LakeLoader(dataset)
    loader.sampler.set_epoch(2)  # a framework counts its own
    assert loader.epoch == 0
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    with pytest.raises(ConfigError, match="no epochs"):
        LakeLoader(dataset, restart=True)
    with pytest.raises(ConfigError, match="neither packed nor mixed"):
        pack(dataset, length=4)
    with pytest.raises(ConfigError, match="neither packed nor mixed"):
        mix({"one": (dataset, 1.0)})
    with pytest.raises(LakeckptError, match="follow= was given"):
        dataset._versions.check_worker()


def test_a_list_of_files_never_grows(lake: Growing) -> None:
    loader = LakeLoader(LakeDataset([lake.files[0]], batch_size=4, follow=AT_ONCE))
    lake.append(8)
    assert len(flat(loader)) == 40


def test_paths_that_begin_at_another_folder_than_before_are_refused(tmp_path: Path) -> None:
    Growing(tmp_path / "lake" / "a1").append(8)
    table = open_table(str(tmp_path / "lake" / "a*" / "*.parquet"))
    loader = LakeLoader(LakeDataset(table, batch_size=4, follow=AT_ONCE))
    assert len(some(loader, 2)) == 2
    Growing(tmp_path / "lake" / "a2").append(8)
    with pytest.raises(TableError, match="paths differ: begin a new run"):
        next(iter(loader))
