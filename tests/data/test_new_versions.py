"""A loader that goes on with newer versions of its table does so where an epoch begins, never inside of one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, open_table
from tests.data.reading import as_json, flat, some


def write(lake: Path, first: int, stop: int) -> None:
    lake.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": range(first, stop)}), lake / f"{first}.parquet", row_group_size=6)


def loader_of(lake: Path, workers: int) -> LakeLoader:
    dataset = LakeDataset(open_table(lake), batch_size=4, shuffle=True, on_new_version="next_epoch")
    return LakeLoader(dataset, num_workers=workers)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_gone_on_with_stays_at_its_version(tmp_path: Path, workers: int, loaded: bool) -> None:
    write(tmp_path / "lake", 0, 20)
    loader = loader_of(tmp_path / "lake", workers)
    before = flat(some(loader, 2))
    write(tmp_path / "lake", 20, 33)
    if loaded:
        loader.load_state_dict(as_json(loader.state_dict()))
    assert sorted(before + flat(loader)) == list(range(20))
    assert sorted(flat(loader)) == list(range(33))
