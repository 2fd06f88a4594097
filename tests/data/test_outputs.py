"""What a batch holds: torch, numpy or Arrow; text, lists, structs, nulls; memory that is the loop's alone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lakeckpt import Batch, LakeDataset, LakeLoader, Ragged, ReadOptions
from lakeckpt.errors import NullValueError
from tests.data.reading import loader_of
from tests.lakes import COLUMNS, LakeSpec
from tests.reading.cases import PYARROW

SPEC = LakeSpec(files=((6, 4), (5,)), columns=COLUMNS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SPEC.write(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if PYARROW < 25:
        pytest.skip("this pyarrow writes no nulls of fixed-size lists")
    return LakeSpec(files=SPEC.files, columns=COLUMNS, null_every=3).write(tmp_path_factory.mktemp("holes"))


def expected(name: str) -> list[Any]:
    return SPEC.table(0, SPEC.rows).column(name).to_pylist()


TENSORS = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bool": torch.bool,
    "uint64": torch.uint64,
}


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_numbers_are_arrays_of_their_own_type(wide: Path, output: str) -> None:
    batches = list(loader_of(wide, shuffle=False, output=output))
    assert all(list(batch) == ["id", *COLUMNS] for batch in batches)
    for name, dtype in TENSORS.items():
        parts = [batch[name] for batch in batches]
        if output == "torch":
            assert all(isinstance(part, torch.Tensor) and part.dtype == dtype for part in parts)
        else:
            assert all(isinstance(part, np.ndarray) and str(part.dtype) == str(dtype).split(".")[1] for part in parts)
        assert [value for part in parts for value in part.tolist()] == expected(name)
    assert all(batch["fixed"].shape == (len(batch["id"]), 3) for batch in batches)
    assert [row for batch in batches for row in batch["fixed"].tolist()] == expected("fixed")


def test_text_lists_and_structs_keep_their_shape(wide: Path) -> None:
    batches = list(loader_of(wide, shuffle=False))
    for name in ("binary", "list", "large_list", "nested"):
        columns = [batch[name] for batch in batches]
        assert all(isinstance(column, Ragged) for column in columns)
        assert [row for column in columns for row in column.tolist()] == expected(name)
    for batch in batches:
        assert set(batch["struct"]) == {"a", "b"} and isinstance(batch["struct"]["a"], torch.Tensor)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_texts_are_lists_of_str(wide: Path, output: str, num_workers: int) -> None:
    batches = list(loader_of(wide, shuffle=False, output=output, num_workers=num_workers))
    for name in ("string", "dictionary"):
        assert all(type(batch[name]) is list for batch in batches)
        assert [row for batch in batches for row in batch[name]] == expected(name)
    assert [row for batch in batches for row in batch["struct"]["b"]] == [one["b"] for one in expected("struct")]


def test_texts_are_bytes_in_ragged_columns_where_they_are_asked_for(wide: Path) -> None:
    batches = list(loader_of(wide, shuffle=False, text="ragged"))
    columns = [batch["string"] for batch in batches]
    assert all(isinstance(column, Ragged) and column.kind == "str" for column in columns)
    assert [row for column in columns for row in column.tolist()] == expected("string")


def test_lists_are_padded_to_the_longest(wide: Path) -> None:
    for output in ("torch", "numpy"):
        for batch in loader_of(wide, shuffle=False, output=output):
            rows, lengths = batch["list"].tolist(), batch["list"].lengths.tolist()
            padded = batch["list"].to_padded(-7)
            assert lengths == list(map(len, rows)) and type(padded) is type(batch["list"].values)
            assert padded.dtype == batch["list"].values.dtype
            assert padded.tolist() == [row + [-7] * (max(lengths) - len(row)) for row in rows]
            with pytest.raises(TypeError, match="only rows of numbers"):
                batch["nested"].to_padded(0)


def test_arrow_tables_carry_their_columns_and_the_loader_the_receipt(wide: Path) -> None:
    loader = loader_of(wide, shuffle=False, output="arrow", columns=["struct", "id"])
    tables = []
    for table in loader:
        assert isinstance(table, pa.Table) and table.column_names == ["struct", "id"]
        assert loader.last_receipt is not None and loader.last_receipt.rows == table.num_rows
        tables.append(table)
    assert pa.concat_tables(tables).column("struct").to_pylist() == expected("struct")


def test_single_rows_are_elements(wide: Path) -> None:
    rows = list(loader_of(wide, batch_size=None, shuffle=False))
    assert [row["int8"].shape for row in rows] == [()] * SPEC.rows
    assert [row["string"] for row in rows] == expected("string")
    assert [row["binary"] for row in rows] == expected("binary")
    assert [row["list"].tolist() for row in rows] == expected("list")
    assert [row["struct"]["b"] for row in rows] == [one["b"] for one in expected("struct")]
    assert [row.receipt.spans[0].start for row in rows] == list(range(SPEC.rows))
    tables = list(loader_of(wide, batch_size=None, shuffle=False, output="arrow"))
    assert [table.num_rows for table in tables] == [1] * SPEC.rows


def test_nulls_are_an_error_or_a_mask_beside_and_never_a_silent_zero(holes: Path) -> None:
    with pytest.raises(NullValueError, match="int8"):
        list(loader_of(holes, columns=["id", "int8"]))
    for output in ("torch", "numpy"):
        for batch in loader_of(holes, shuffle=False, output=output, nulls="mask"):
            for name in COLUMNS:
                assert batch[f"{name}.is_null"].tolist() == [row % 3 == 0 for row in batch["id"].tolist()], name
            assert "id.is_null" not in batch
    masks = [table.column("int8").null_count for table in loader_of(holes, shuffle=False, output="arrow")]
    assert sum(masks) == 5


def test_nulls_inside_of_lists_are_known_row_by_row_too(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    values = [[1, None], [], [None], [4]]
    pq.write_table(pa.table({"x": values, "s": [{"y": value} for value in values]}), tmp_path / "a.parquet")
    rows = list(LakeLoader(LakeDataset(tmp_path, batch_size=None, options=ReadOptions(nulls="mask"))))
    assert [row["x.values.is_null"].tolist() for row in rows] == [[False, True], [], [True], [False]]
    assert [row["s"]["y.values.is_null"].tolist() for row in rows] == [[False, True], [], [True], [False]]


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Ragged):
        return [*leaves(value.values), value.offsets, *value.masks.values()]
    if isinstance(value, list):  # texts
        return []
    return [leaf for child in value.values() for leaf in leaves(child)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_are_writable_and_writing_to_one_batch_never_changes_another(
    wide: Path, shuffle: bool, num_workers: int
) -> None:
    def fingerprints(batches: list[Batch]) -> list[Any]:
        return [[leaf.tolist() for leaf in leaves(batch)] for batch in batches]

    columns = ["id", "int8", "float32", "bool", "string", "list", "fixed", "struct", "nested", "timestamp", "decimal"]
    arguments = {"shuffle": shuffle, "columns": columns, "num_workers": num_workers, "batch_size": 2, "num_lanes": 3}
    untouched = fingerprints(list(loader_of(wide, **arguments)))
    loader = loader_of(wide, **arguments)
    held = list(loader)
    for number, batch in enumerate(held):
        for leaf in leaves(batch):
            leaf.zero_()
        assert fingerprints(held[number + 1 :]) == untouched[number + 1 :]
    # Nor what is read again: the same rows, once more.
    loader.rewind()
    loader.set_epoch(0)
    assert fingerprints(list(loader)) == untouched


def test_a_rewound_dataset_gives_fresh_memory(wide: Path) -> None:
    dataset = LakeDataset(wide, batch_size=15)
    (first,) = dataset
    first["id"].fill_(-1)
    dataset.set_epoch(0)
    (again,) = dataset
    assert again["id"].tolist() == list(range(15)) and (first["id"] == -1).all()


def test_batches_outlive_the_loader_and_the_epoch(wide: Path) -> None:
    batches = []
    loader = loader_of(wide, shuffle=False)
    for _ in range(2):
        batches += list(loader)
    del loader
    assert [row for batch in batches for row in batch["id"].tolist()] == 2 * list(range(15))


def test_a_batch_goes_through_pickle_copy_and_torchs_helpers_with_its_receipt(wide: Path) -> None:
    batch = next(iter(loader_of(wide, columns=["id", "float32"])))
    for other in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert type(other) is Batch and other.receipt == batch.receipt and other["id"].tolist() == batch["id"].tolist()
    rows = list(LakeDataset(wide, batch_size=None, columns=["id", "float32"]))
    assert default_collate(rows[:3])["id"].tolist() == [0, 1, 2]
    collated = list(DataLoader(LakeDataset(wide, batch_size=None, columns=["id", "string"]), batch_size=4))
    assert collated[0]["string"] == expected("string")[:4]
