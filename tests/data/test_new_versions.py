"""A loader that goes on with newer versions of its table does so where an epoch begins, never inside of one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, open_table
from tests.data.reading import as_json, flat, some


def write(lake: Path, first: int, stop: int) -> None:
    lake.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": range(first, stop)}), lake / f"{first}.parquet", row_group_size=6)


def loader_of(lake: Path, workers: int) -> LakeLoader:
    dataset = LakeDataset(
        open_table(lake), batch_size=4, shuffle=True, options=ReadOptions(on_new_version="next_epoch")
    )
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


def test_after_the_end_of_an_epoch_of_other_ranks_the_next_one_is_of_the_newest_version_and_these_ranks(
    tmp_path: Path,
) -> None:
    write(tmp_path / "lake", 0, 20)
    table = open_table(tmp_path / "lake")
    of_two = LakeLoader(
        LakeDataset(table, batch_size=5, shuffle=True, options=ReadOptions(num_lanes=2), rank=0, world_size=2)
    )
    assert len(flat(some(of_two, 2))) == 10
    write(tmp_path / "lake", 20, 33)
    loader = LakeLoader(
        LakeDataset(table, batch_size=5, shuffle=True, options=ReadOptions(on_new_version="next_epoch"))
    )
    loader.load_state_dict(as_json(of_two.state_dict()))
    assert flat(loader) == []
    assert sorted(flat(loader)) == list(range(33))
