"""Rows that another system has trained on: the first epoch is the rest, on any ranks and after any restart."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import write_deltalake

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, ReadOptions, errors, open_table, pack
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.local import LocalStorage
from tests.data.reading import flat
from tests.lake.formats.delta_log import adds, commit, delete_rows, upgrade

INTERVALS = {"0.parquet": [(0, 20), (30, 33)], "2.parquet": [(10, 50)]}
TAKEN = {*range(20), 30, 31, 32, *range(110, 150)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 rows in three files; ``id`` is a key, ``half`` is none."""
    found = tmp_path_factory.mktemp("consumed")
    for file in range(3):
        ids = range(50 * file, 50 * file + 50)
        lists = pa.array([[one] * 3 for one in ids], pa.list_(pa.int32()))
        table = pa.table({"id": list(ids), "half": [one // 2 for one in ids], "tokens": lists})
        pq.write_table(table, found / f"{file}.parquet", row_group_size=10)
    return found


def loader_of(place: Any, consumed: Any, *, rank: int = 0, ranks: int = 1, workers: int = 0) -> LakeLoader:
    dataset = LakeDataset(
        place,
        batch_size=7,
        shuffle=True,
        seed=1,
        rank=rank,
        world_size=ranks,
        consumed=consumed,
        options=ReadOptions(num_lanes=6),
    )
    return LakeLoader(dataset, num_workers=workers)


@pytest.mark.parametrize(
    ("consumed", "taken"),
    [
        (INTERVALS, TAKEN),
        (("id", range(5, 77)), set(range(5, 77))),
        (("id", pa.array([3, 140, 3])), {3, 140}),
        (("id", np.arange(10)), set(range(10))),
        ({}, set()),
    ],
    ids=["intervals", "range", "arrow", "numpy", "nothing"],
)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (3, 1)])
def test_the_first_epoch_is_the_rest_and_later_ones_are_whole(
    folder: Path, consumed: Any, taken: set[int], ranks: int, workers: int
) -> None:
    loaders = [loader_of(folder, consumed, rank=rank, ranks=ranks, workers=workers) for rank in range(ranks)]
    for expected in (sorted(set(range(150)) - taken), list(range(150))):
        assert sorted(itertools.chain.from_iterable(flat(loader) for loader in loaders)) == expected


def test_a_run_goes_on_after_restarts_and_its_audit_says_how_it_began(folder: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for attempt in range(12):
        loader = loader_of(folder, INTERVALS if attempt < 2 else None)  # what the run has saved is enough later
        with CheckpointManager(tmp_path / "run", {"model": model, "reader": loader}, persist_every=1) as manager:
            manager.restore()
            batches = ((epoch, batch) for epoch in range(loader.epoch, 3) for batch in loader)
            for epoch, batch in itertools.islice(batches, 5):
                seen[epoch] += batch["id"].tolist()
                manager.step(batch)
    assert sorted(seen[0]) == sorted(set(range(150)) - TAKEN)
    assert sorted(seen[1]) == list(range(150))
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.verdict == "proved"
    assert any("63 rows were consumed before this run" in note for note in report.readers[0].notes)


def test_a_named_version_goes_on_after_its_first_epoch(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "lake", pa.table({"id": list(range(40))}))
    model, seen = torch.nn.Linear(1, 1), list[int]()
    for _ in range(7):
        loader = loader_of(open_table(tmp_path / "lake", version=0), ("id", range(12)))
        with CheckpointManager(tmp_path / "run", {"model": model, "reader": loader}, persist_every=1) as manager:
            manager.restore()
            batches = (batch for _ in range(loader.epoch, 2) for batch in loader)
            for batch in itertools.islice(batches, 3):
                seen += batch["id"].tolist()
                manager.step(batch)
    assert sorted(seen) == sorted([*range(12, 40), *range(40)])


def test_rows_of_a_delta_table_with_deletes_are_named_as_its_files_store_them(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"id": list(range(40))}))
    commit(tmp_path, [upgrade("deletionVectors")])
    delete_rows(tmp_path, {next(iter(adds(tmp_path))): range(1, 40, 4)})
    assert sorted(flat(loader_of(tmp_path, ("id", [0, 2, 38])))) == sorted(
        one for one in range(40) if one % 4 != 1 and one not in (0, 2, 38)
    )


def test_the_rest_can_be_packed(folder: Path) -> None:
    dataset = LakeDataset(open_table(folder), batch_size=2, consumed=INTERVALS)
    loader = LakeLoader(pack(dataset, length=8))
    for rows in (150 - len(TAKEN), 150):
        assert sum(int(batch["loss_mask"].sum()) for batch in loader) == 3 * rows


@pytest.mark.parametrize(
    ("consumed", "message"),
    [
        ({"x.parquet": [(0, 1)]}, "names the file 'x.parquet', which the table does not have"),
        ({"0.parquet": [(0, 51)]}, r"names rows \[0, 51\) of '0.parquet', which has 50"),
        ({"0.parquet": [(5, 3)]}, r"names rows \[5, 3\)"),
        (("id", [1, 1000]), "has 2 values of 'id', and 1 rows"),
        (("half", [1]), "has 1 values of 'half', and 2 rows"),
        (("id", ["a"]), "do not fit the column 'id'"),
        (("no", [1]), "no column 'no'"),
        ([1], "got list"),
        (("id", range(150)), "names every row"),
    ],
)
def test_what_names_no_rows_is_refused(folder: Path, consumed: Any, message: str) -> None:
    with pytest.raises((errors.ConfigError, errors.SchemaError), match=message):
        loader_of(folder, consumed)


def test_an_endless_stream_has_no_first_epoch(folder: Path) -> None:
    with pytest.raises(errors.ConfigError, match="an endless stream has no epochs"):
        LakeDataset(open_table(folder), batch_size=7, endless=True, consumed=INTERVALS)
