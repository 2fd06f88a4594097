"""A batch says whether it is the last of its epoch: True or False where positions decide that, None where data do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, mix, pack
from tests.data import flow_jobs
from tests.data.growing import Growing
from tests.data.reading import as_json, loader_of, some


def said(batches: Any) -> list[Any]:
    return [batch.receipt.last for batch in batches]


def only_the_last(count: int) -> list[bool]:
    return [False] * (count - 1) + [True] if count else []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("tail", ["short", "drop"])
def test_the_last_batch_of_each_epoch_says_so(lake: Path, tail: str, num_workers: int) -> None:
    loader = loader_of(lake, tail=tail, num_workers=num_workers)
    for _ in range(2):
        assert said(loader) == only_the_last(len(loader))


@pytest.mark.parametrize("batch_size", [4, 1, None])
def test_each_rank_has_one_last_batch_also_where_it_gets_none_of_the_last_rows(
    lake: Path, batch_size: int | None
) -> None:
    for world_size, tail in itertools.product((2, 3, 5), ("short", "drop")):
        for rank in range(world_size):
            loader = loader_of(lake, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail, num_lanes=10)
            assert said(loader) == only_the_last(len(loader))


def test_the_last_batch_says_so_after_a_restart_on_other_ranks(lake: Path) -> None:
    for world_size, steps in itertools.product((1, 2, 4), range(0, 9, 2)):
        before = loader_of(lake, rank=0, world_size=3)
        some(before, steps)
        for rank in range(world_size):
            loader = loader_of(lake, rank=rank, world_size=world_size)
            loader.load_state_dict(as_json(before.state_dict()))
            found = said(loader)
            assert found == only_the_last(len(found)) or not found


def test_a_filter_and_packed_sequences_say_it_too(lake: Path, tmp_path: Path) -> None:
    loader = loader_of(lake, filters=[("id", "<", 11)])
    assert said(loader) == only_the_last(len(loader))
    pq.write_table(pa.table({"tokens": [[1] * size for size in range(9)]}), tmp_path / "a.parquet")
    loader = LakeLoader(pack(LakeDataset(tmp_path, batch_size=2), length=4))
    assert said(loader) == only_the_last(5)


def test_an_endless_stream_has_no_last_batch(lake: Path) -> None:
    assert said(some(loader_of(lake, endless=True), 30)) == [False] * 30


def test_a_mixture_that_ends_says_so(lake: Path) -> None:
    def source() -> LakeDataset:
        return LakeDataset(lake, batch_size=3, columns=["id"])

    for exhausted in ("stop", "continue"):
        loader = LakeLoader(mix({"a": (source(), 3), "b": (source(), 1)}, exhausted=exhausted, num_lanes=2))  # type: ignore[arg-type]
        found = said(loader)
        assert len(found) > 3 and found == only_the_last(len(found))
    assert said(some(LakeLoader(mix({"a": (source(), 3), "b": (source(), 1)})), 40)) == [False] * 40


def test_where_only_the_data_tell_it_is_not_known(lake: Path, tmp_path: Path) -> None:
    assert set(said(flow_jobs.loader_of(lake))) == {None}
    growing = Growing(tmp_path / "growing")
    growing.append(40)
    assert set(said(some(LakeLoader(LakeDataset(growing.folder, batch_size=4, follow=True)), 5))) == {None}
