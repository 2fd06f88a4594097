"""A loader that goes on with newer versions of its table does so where an epoch begins, never inside of one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, open_table
from lakeckpt.errors import TableError
from tests.data.reading import as_json, flat, some
from tests.tracking.processes import run_processes


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


def job(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    lake = Path(folder, "lake")
    loader = loader_of(lake, 0)
    assert len(flat(loader)) == 10
    dist.barrier()
    if rank == 0:
        write(lake, 20, 30)
    rows = flat(loader)  # the other rank reads what the first one found
    Path(folder, f"rows.{rank}").write_text(",".join(map(str, rows)))
    dist.barrier()
    if rank == 0:
        for file in lake.iterdir():
            file.unlink()
    with pytest.raises(TableError, match="lake" if rank == 0 else "on the first rank: .*lake"):
        flat(loader)
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_go_on_with_what_the_first_one_found_and_fail_as_it_did(tmp_path: Path) -> None:
    write(tmp_path / "lake", 0, 20)
    run_processes(2, job, str(tmp_path))
    rows = [int(one) for rank in range(2) for one in (tmp_path / f"rows.{rank}").read_text().split(",")]
    assert sorted(rows) == list(range(30))
