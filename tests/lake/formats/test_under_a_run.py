"""Iceberg and Hudi tables that change under a killed run: it goes on with its version, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import TableVersionGone
from lakeckpt.lake.storage.local import LocalStorage
from tests.lake.formats.hudi_tables import Crafted
from tests.lake.formats.iceberg_tables import commit, data_files, position_deletes, warehouse

T1, T2, T3 = (f"2024010{day}120000000" for day in (1, 2, 3))


@dataclass
class Lake:
    """A table of ``ids``; ``rewrite`` makes newer versions with other rows, ``clean`` takes the files of older ones."""

    source: Any
    ids: list[int]
    rewrite: Callable[[], None]
    clean: Callable[[], None]


def numbers(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def iceberg(folder: Path) -> Lake:
    """A table of a catalog, some of whose rows were deleted by position before the run began."""
    table = warehouse(folder).create_table("db.t", numbers().schema)
    table.append(numbers(*range(30)))
    table.append(numbers(*range(30, 53)))
    old = data_files(table)
    commit(table, [position_deletes(table, [(old[0], 0), (old[0], 7), (old[1], 3)])])
    left = sorted(row["id"] for row in table.scan().to_arrow().to_pylist())

    def rewrite() -> None:
        table.delete("id < 20")
        table.append(numbers(1000, 1001))
        table.overwrite(numbers(*range(500, 540)))

    def clean() -> None:
        for path in old:
            Path(path.removeprefix("file://")).unlink(missing_ok=True)

    return Lake(table, left, rewrite, clean)


def hudi(folder: Path) -> Lake:
    lake = Crafted(folder / "hudi")
    lake.commit(T1, {("", "f1-0"): numbers(*range(30)), ("", "f2-0"): numbers(*range(30, 50))})

    def rewrite() -> None:
        lake.commit(T2, {("", "f1-0"): numbers(*range(5)), ("", "f3-0"): numbers(1000)})
        lake.commit(T3, {("", "f4-0"): numbers(2000)}, action="replacecommit", replaced={"": ["f2-0"]})

    def clean() -> None:
        next(lake.root.glob(f"f1-0*_{T1}.parquet")).unlink()
        next(lake.root.glob("f2-0*.parquet")).unlink()

    return Lake(str(lake.root), list(range(50)), rewrite, clean)


def loader_of(lake: Lake) -> LakeLoader:
    return LakeLoader(LakeDataset(open_table(lake.source), batch_size=4, shuffle=True, seed=4, columns=["id"]))


def train(run: Path, loader: LakeLoader, *, steps: int | None = None) -> list[int]:
    """Restore, and train for so many steps or to the epoch's end; the ids that were trained on."""
    seen: list[int] = []
    with CheckpointManager(run, {"model": torch.nn.Linear(1, 1), "reader": loader}, persist_every=1) as manager:
        manager.restore()
        for step, batch in enumerate(loader, 1):
            seen += batch["id"].tolist()
            manager.step(batch)
            if step == steps:
                break
    return seen


@pytest.mark.parametrize("make", [iceberg, hudi])
def test_a_run_goes_on_with_the_version_and_the_deletes_that_it_pinned(
    make: Callable[[Path], Lake], tmp_path: Path
) -> None:
    lake = make(tmp_path)
    first = train(tmp_path / "run", loader_of(lake), steps=5)
    lake.rewrite()
    newest = loader_of(lake)
    assert newest.table.num_rows != len(lake.ids)
    rest = train(tmp_path / "run", newest)
    assert sorted(first + rest) == lake.ids and len(first) == 20
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.verdict == "proved", report


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [iceberg, hudi])
def test_files_that_are_cleaned_up_while_they_are_read_are_named_with_what_to_do(
    make: Callable[[Path], Lake], tmp_path: Path, workers: int
) -> None:
    lake = make(tmp_path)
    table = open_table(lake.source)
    loader = LakeLoader(LakeDataset(table, batch_size=4), num_workers=workers)
    lake.clean()
    with pytest.raises(
        TableVersionGone, match=r"is gone \(vacuumed, .*put the pinned files back.*keep-a-version"
    ) as said:
        list(loader)
    (gone,) = said.value.files
    assert gone in table.index.paths and f"{gone!r} is gone" in str(said.value)


@pytest.mark.parametrize("make", [iceberg, hudi])
def test_a_run_whose_version_was_cleaned_up_is_refused_before_any_row(
    make: Callable[[Path], Lake], tmp_path: Path
) -> None:
    lake = make(tmp_path)
    pinned = open_table(lake.source).index
    train(tmp_path / "run", loader_of(lake), steps=5)
    lake.rewrite()
    lake.clean()
    with pytest.raises(TableVersionGone) as refused:
        train(tmp_path / "run", loader_of(lake))
    assert refused.value.files == pinned.paths
    assert str(pinned.version) in str(refused.value)
