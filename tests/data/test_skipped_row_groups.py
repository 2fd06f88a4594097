"""``on_bad_row_group="skip"``: what is damaged is missing, everything else stays as it is."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt import LakeDataset, LakeLoader, SkipList, SkipWarning, Table, errors, open_table
from lakeckpt.core.receipts import Receipt
from tests.data.reading import flat, some, until_error
from tests.reading.cases import counted, write_file
from tests.reading.damage import Damage

ROWS = 60
pytestmark = pytest.mark.filterwarnings("ignore::lakeckpt.SkipWarning")


@pytest.fixture
def damage(tmp_path: Path) -> Damage:
    """A table of 60 rows in two files of three row groups of ten rows."""
    groups = [pa.table({"id": np.arange(start, start + 10), "x": np.ones(10)}) for start in range(0, ROWS, 10)]
    write_file(tmp_path / "a.parquet", groups[:3], write_page_checksum=True)
    write_file(tmp_path / "b.parquet", groups[3:], write_page_checksum=True)
    return Damage(open_table(tmp_path))


def loader_of(table: Table, *, num_workers: int = 0, **dataset: Any) -> LakeLoader:
    options = {"batch_size": 4, "shuffle": True, "shuffle_window": 2, "on_bad_row_group": "skip", **dataset}
    return LakeLoader(LakeDataset(table, **options), num_workers=num_workers)


def ranks_of(table: Table, world_size: int, **dataset: Any) -> list[LakeLoader]:
    return [loader_of(table, rank=rank, world_size=world_size, **dataset) for rank in range(world_size)]


def skipped_rows(receipts: list[Receipt]) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for receipt in receipts:
        for skip in receipt.skips:
            found[skip.group.file, skip.group.row_group] += skip.rows
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize("output", ["torch", "numpy", "arrow"])
def test_every_row_but_those_of_the_damaged_row_group_comes_once_and_no_position_moves(
    damage: Damage, shuffle: bool, num_lanes: int, output: str
) -> None:
    options = {"shuffle": shuffle, "num_lanes": num_lanes, "output": output}
    whole = [ids_of(batch) for batch in loader_of(damage.table, **options)]
    damage.hurt("b.parquet", 1)
    loader = loader_of(damage.table, **options)
    found, receipts = [], []
    for batch in loader:
        found.append(ids_of(batch))
        receipts.append(loader.last_receipt)
    assert found == [[row for row in batch if not 40 <= row < 50] for batch in whole]
    assert [receipt.rows - receipt.skipped for receipt in receipts] == [len(batch) for batch in found]
    assert skipped_rows(receipts) == {("b.parquet", 1): 10}
    assert len(loader.skipped()) == 1


def ids_of(batch: Any) -> list[int]:
    return batch.column("id").to_pylist() if isinstance(batch, pa.Table) else batch["id"].tolist()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_skip_as_the_main_process_does(damage: Damage, num_workers: int) -> None:
    damage.hurt("a.parquet", 0)
    expected = [(ids_of(batch), batch.receipt) for batch in loader_of(damage.table, num_lanes=2)]
    loader = loader_of(damage.table, num_workers=num_workers, num_lanes=2)
    assert [(ids_of(batch), batch.receipt) for batch in loader] == expected
    assert loader.skipped() == SkipList(skip.group for _, receipt in expected for skip in receipt.skips)


def test_ranks_keep_step_and_a_row_weighs_the_same_on_every_rank(damage: Damage) -> None:
    damage.hurt("a.parquet", 1)
    damage.hurt("b.parquet", 2)
    ranks = [list(loader) for loader in ranks_of(damage.table, 3)]
    assert len({len(batches) for batches in ranks}) == 1
    assert Counter(itertools.chain(*map(flat, ranks))) == Counter([*range(10), *range(20, 50)])
    for step in zip(*ranks, strict=True):
        dealt = step[0].receipt.step_rows
        for batch in step:
            assert batch.receipt.weight == pytest.approx(len(batch["id"]) * 3 / dealt if dealt else 0)


def test_a_script_is_warned_once_for_each_row_group(damage: Damage) -> None:
    damage.hurt("a.parquet", 1)
    with pytest.warns(SkipWarning) as told:
        flat(loader_of(damage.table))
    assert [str(one.message).count("row group 1 of 'a.parquet' is skipped") for one in told] == [1]
    assert "column 'id' of row group 1 of the data file 'a.parquet' cannot be decoded" in str(told[0].message)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_that_has_healed_since_it_was_recorded_stays_skipped_on_every_topology(
    damage: Damage, num_workers: int
) -> None:
    """The rest of the stretch that was begun short: what is told of it stays true."""
    first = loader_of(damage.table, num_lanes=2, shuffle_window=4)
    damage.hurt("a.parquet", 1)
    came, told = [], []
    for batch in itertools.islice(first, 8):
        came += ids_of(batch)
        told.append(batch.receipt)
    state, skips = first.state_dict(), SkipList.from_plain(first.skipped().to_plain())
    assert 0 < sum(receipt.skipped for receipt in told) < 10
    rest = flat(first)
    damage.heal("a.parquet")
    for world_size in (1, 2, 3):
        after: list[int] = []
        receipts: list[Receipt] = []
        for loader in ranks_of(damage.table, world_size, shuffle_window=4, num_workers=num_workers):
            loader.load_state_dict(state)
            loader.load_skipped(skips)
            for batch in loader:
                after += ids_of(batch)
                receipts.append(batch.receipt)
        assert Counter(after) == Counter(rest)
        assert skipped_rows([*told, *receipts]) == {("a.parquet", 1): 10}


def test_a_stretch_that_was_found_damaged_is_not_tried_again_though_it_heals(damage: Damage) -> None:
    damage.hurt("b.parquet", 0)
    loader = loader_of(damage.table, shuffle_window=6)
    before = [ids_of(batch) for batch in some(loader, 5)]
    damage.heal("b.parquet")
    after = flat(loader)  # a new iteration: windows are decoded again
    assert Counter([*itertools.chain(*before), *after]) == Counter([*range(30), *range(40, 60)])
    assert Counter(flat(loader)) == Counter(range(60))  # the next epoch tries again


def test_the_other_half_of_a_row_group_that_a_lane_border_cuts_is_tried_for_itself(damage: Damage) -> None:
    loader = loader_of(damage.table, shuffle=False, num_lanes=4)  # a border cuts rows 10 to 19 at 15
    damage.hurt("a.parquet", 1)
    before = flat(some(loader, 4))
    damage.heal("a.parquet")
    assert sorted([*before, *flat(loader)]) == [*range(15), *range(20, 60)]


def test_what_was_delivered_before_the_damage_stays_delivered(damage: Damage) -> None:
    """Half of a row group may have come: positions say which."""
    loader = loader_of(damage.table, shuffle=False)
    before = flat(some(loader, 3))
    damage.hurt("a.parquet", 1)
    batches = list(loader)
    assert [*before, *flat(batches)] == [*range(12), *range(20, 60)]
    assert skipped_rows([batch.receipt for batch in batches]) == {("a.parquet", 1): 8}


def test_the_list_as_of_a_receipt_is_what_had_been_skipped_by_then(damage: Damage) -> None:
    damage.hurt("a.parquet", 0)
    damage.hurt("b.parquet", 2)
    loader = loader_of(damage.table, shuffle=False)
    receipts = [batch.receipt for batch in loader]
    assert [entry.file for entry in loader.skipped(receipts[5])] == ["a.parquet"]
    loader.mark(receipts[5])
    assert [entry.file for entry in loader.skipped()] == ["a.parquet", "b.parquet"]
    loader.mark()
    next(iter(loader))
    loader.mark()
    assert [entry.epoch for entry in loader.skipped()] == [1]  # of an epoch that is over, the ledger keeps it


def test_an_endless_stream_skips_in_each_of_its_epochs_anew(damage: Damage) -> None:
    damage.hurt("a.parquet", 1)
    loader = loader_of(damage.table, endless=True, num_lanes=2)
    receipts = [batch.receipt for batch in itertools.islice(loader, 45)]
    by_epoch: Counter[int] = Counter()
    for receipt in receipts:
        by_epoch.update({skip.group.epoch: skip.rows for skip in receipt.skips})
    assert (by_epoch[0], by_epoch[1]) == (10, 10)
    assert {entry.epoch for entry in loader.skipped()} == set(by_epoch)


def test_all_row_groups_damaged_leave_steps_of_no_rows(damage: Damage) -> None:
    for group in range(3):
        damage.hurt("a.parquet", group)
        damage.hurt("b.parquet", group)
    for shuffle in (False, True):
        batches = list(loader_of(damage.table, shuffle=shuffle))
        assert len(batches) == 15 and flat(batches) == []
        assert {(batch["id"].dtype, batch["x"].shape) for batch in batches} == {(batches[0]["id"].dtype, (0,))}
        assert {batch.receipt.weight for batch in batches} == {0.0}


@pytest.mark.parametrize("what", ["gone", "cut", "written again"])
def test_a_file_that_is_not_the_pinned_one_is_never_skipped(damage: Damage, what: str) -> None:
    loader = loader_of(damage.table, shuffle=False, batch_size=10)  # begins to read ahead when it is iterated over
    path = damage.path("b.parquet")
    if what == "gone":
        path.unlink()
    elif what == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(errors.DataFileChanged, match=r"b\.parquet"):
        list(loader)


@pytest.mark.parametrize("failure", [errors.StorageError("away"), TimeoutError(110, "away"), OSError("away")])
def test_a_store_that_fails_is_never_skipped(damage: Damage, failure: Exception) -> None:
    table, storage = counted(damage.table)
    loader = loader_of(table, shuffle=False, batch_size=10)
    storage.fail = failure  # before anything can have been read ahead
    with pytest.raises(errors.StorageError, match="away"):
        list(loader)


def test_damage_is_raised_where_nothing_is_said(damage: Damage) -> None:
    damage.hurt("a.parquet", 1)
    with pytest.raises(errors.DataFileDamaged, match=r"row group 1 of the data file 'a\.parquet'"):
        flat(loader_of(damage.table, on_bad_row_group="raise"))


def test_a_list_is_held_to_though_new_damage_is_raised(damage: Damage) -> None:
    damage.hurt("a.parquet", 1)
    first = loader_of(damage.table, shuffle=False)
    came = flat(some(first, 4))
    second = loader_of(damage.table, shuffle=False, on_bad_row_group="raise")
    second.load_state_dict(first.state_dict())
    second.load_skipped(first.skipped())
    damage.hurt("b.parquet", 0)
    found, error = until_error(second)
    assert isinstance(error, errors.DataFileDamaged) and (error.file, error.row_group) == ("b.parquet", 0)
    assert [*came, *flat(found)] == [*range(10), *range(20, 28)]


def test_single_rows_cannot_be_skipped(damage: Damage) -> None:
    with pytest.raises(errors.ConfigError, match="needs a batch_size"):
        LakeDataset(damage.table, batch_size=None, on_bad_row_group="skip")
    damage.hurt("a.parquet", 0)
    first = loader_of(damage.table, shuffle=False)
    some(first, 1)
    rows = LakeLoader(LakeDataset(damage.table, batch_size=None))
    with pytest.raises(errors.StateMismatch, match="single rows cannot"):
        rows.load_skipped(first.skipped())
    rows.load_skipped(SkipList())


def test_receipts_with_skips_go_through_json(damage: Damage) -> None:
    damage.hurt("a.parquet", 0)
    for batch in loader_of(damage.table):
        assert Receipt.from_plain(batch.receipt.to_plain()) == batch.receipt


def test_nothing_is_warned_of_where_nothing_is_skipped(damage: Damage) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(flat(loader_of(damage.table))) == list(range(ROWS))


def test_too_many_damaged_row_groups_in_an_epoch_are_no_odd_damage(
    damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeckpt.reading.skipping.MOST_SKIPPED", 2)
    damage.hurt("a.parquet", 0)
    damage.hurt("b.parquet", 0)
    loader = loader_of(damage.table, shuffle=False)
    for _ in range(3):
        assert len(flat(loader)) == 40  # two in each epoch
    damage.hurt("b.parquet", 2)
    with pytest.raises(errors.DataFileDamaged) as e:
        flat(loader)
    assert e.value.row_group == 2 and "2 row groups were skipped in this epoch" in e.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_null_is_told_with_its_file_and_row_group(tmp_path: Path, shuffle: bool, num_workers: int) -> None:
    values = [[1, 2, 3], [4, None, 6], [7, 8, 9]]
    groups = [pa.table({"id": row, "x": [{"y": one} for one in row]}) for row in values]
    write_file(tmp_path / "a.parquet", groups, write_page_checksum=True)
    write_file(tmp_path / "b.parquet", [groups[0], groups[2]], write_page_checksum=True)
    damage = Damage(open_table(tmp_path))
    damage.hurt("a.parquet", 0)  # and what is skipped is left out of the count
    options = {"batch_size": 15, "shuffle": shuffle, "num_workers": num_workers}
    with pytest.raises(errors.NullValueError, match=r"row group 1 of the data file 'a\.parquet'") as e:
        flat(loader_of(damage.table, columns=["id"], **options))
    assert (e.value.file, e.value.row_group, e.value.column) == ("a.parquet", 1, "id")
    with pytest.raises(errors.NullValueError) as e:
        flat(loader_of(damage.table, columns=["x"], **options))
    assert (e.value.file, e.value.row_group, e.value.column) == ("a.parquet", 1, "x.y")
