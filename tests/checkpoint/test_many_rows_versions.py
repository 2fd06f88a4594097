"""A table that is not as it was when the places of a transform's rows were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, ReadOptions, open_table
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import DamageWarning, DataFileChanged
from lakeckpt.lake.storage.open import open_storage
from tests.data.flow_jobs import cut, items, whole

ROWS = 40


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    for part in range(4):
        pq.write_table(pa.table({"id": range(part * 10, part * 10 + 10)}), folder / f"{part}.parquet", row_group_size=5)
    return folder


def go_on(lake: Path, run: Path, steps: int | None, **options: Any) -> list[Any]:
    """Restore, take steps, and save; the items of each."""
    read = ReadOptions(num_lanes=2, **options)
    dataset = LakeDataset(open_table(lake), batch_size=4, transform=cut, rows="many", options=read)
    loader, model = LakeLoader(dataset), torch.nn.Linear(1, 1)
    found = []
    with CheckpointManager(str(run), {"model": model, "reader": loader}) as manager:
        manager.restore()
        for number, batch in enumerate(loader, 1):
            found += items(batch)
            manager.step(batch)
            if number == steps:
                break
    return found


def test_the_rest_goes_on_at_the_version_that_the_checkpoint_names(lake: Path, tmp_path: Path) -> None:
    first = go_on(lake, tmp_path / "run", 5)
    pq.write_table(pa.table({"id": [1000]}), lake / "4.parquet")
    assert sorted(first + go_on(lake, tmp_path / "run", None)) == whole(ROWS)


def test_a_version_that_is_gone_can_be_left_for_the_next_epoch(lake: Path, tmp_path: Path) -> None:
    go_on(lake, tmp_path / "run", 5)
    pq.write_table(pa.table({"id": range(5)}), lake / "1.parquet")
    with pytest.raises(DataFileChanged, match=r"1\.parquet"):
        go_on(lake, tmp_path / "run", None)
    with pytest.warns(DamageWarning, match="skips the rest of its epoch"):
        found = go_on(lake, tmp_path / "run", None, on_version_gone="next_epoch")
    assert sorted(found) == sorted([item for item in whole(ROWS) if not 10 <= item[0] < 20] + whole(5))
    (reader,) = audit(open_storage(tmp_path / "run")).readers
    assert [one.status for one in reader.epochs] == ["skipped", "complete"] and not reader.doubts
