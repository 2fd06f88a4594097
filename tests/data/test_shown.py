"""The repr of a dataset and a loader says table, batch size, ranks and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, mix, pack
from tests.data.reading import some


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 40, "text": ["a"] * 40}), tmp_path / "a.parquet")
    return tmp_path


def tokens(text: str) -> list[int]:
    """A tokenizer."""
    return [1, 2, 3]


def dataset_of(lake: Path, **given: Any) -> LakeDataset:
    return LakeDataset(lake, batch_size=4, **given)


def test_a_loader_of_rows_says_its_place(lake: Path) -> None:
    loader = LakeLoader(dataset_of(lake, rank=1, world_size=2, columns=["text"]), num_workers=3)
    table = repr(loader.table.uri)
    assert repr(loader) == (
        f"LakeLoader(LakeDataset({table}, batch_size=4, rank 1 of 2, epoch 0, not begun), num_workers=3)"
    )
    loader = LakeLoader(dataset_of(lake, columns=["text"]))
    some(loader, 3)
    assert repr(loader.dataset) == f"LakeDataset({table}, batch_size=4, rank 0 of 1, epoch 0, step 3)"
    list(loader)
    assert "epoch 1, step 0" in repr(loader)
    again = LakeLoader(dataset_of(lake, columns=["text"]), restart=True)
    assert repr(again).endswith("num_workers=0, restart=True)")


def test_packed_and_mixed_datasets_say_what_they_are(lake: Path) -> None:
    every = {
        "cut": pack(dataset_of(lake), length=8),
        "whole": pack(dataset_of(lake), length=8, documents="whole"),
        "texts": pack(dataset_of(lake), length=8, column="text", tokenizer=tokens),
    }
    for one in every.values():
        some(loader := LakeLoader(one), 2)
        assert f"{loader.table.uri!r} in sequences of 8 tokens, batch_size=4, rank 0 of 1, epoch 0, step 2" in repr(one)
    mixed = mix({"a": (pack(dataset_of(lake), length=8), 1), "b": (pack(dataset_of(lake), length=8), 1)})
    some(LakeLoader(mixed), 2)
    uri = f"{mixed.table.uri!r} in sequences of 8 tokens"
    assert repr(mixed) == f"MixedDataset({{'a': {uri}, 'b': {uri}}}, batch_size=4, rank 0 of 1, step 2)"


def test_it_reads_nothing_and_never_raises(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(lake, columns=["text"], filters=[("text", "==", "a")])
    monkeypatch.setattr("lakeckpt.data.base.selecting.Selecting.get", lambda self: pytest.fail("it counts rows"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "rank not known yet, epoch 0, not begun" in repr(LakeLoader(dataset))
