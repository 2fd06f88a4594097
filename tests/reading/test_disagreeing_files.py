"""A column that files of a table do not agree about is refused when it is read, and only then."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import lakeckpt
from lakeckpt.errors import SchemaError
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.joined import SomeFiles, joined
from lakeckpt.lake.table.version import PLAIN

SAID = r"'x' is int32 in '1.parquet', but string in '2.parquet': leave it out"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A table of two files, whose columns ``x`` and ``s`` have types that cannot be unified."""
    stored = {"1": (pa.array([1, 2], pa.int32()), 1), "2": (pa.array(["u", "v"]), "t")}
    for name, (x, inner) in stored.items():
        ids = [2 * int(name), 2 * int(name) + 1]
        columns = {"id": ids, "x": x, "s": [{"a": inner}] * 2, "tokens": [[1, 2], [3]], "text": ["one", "two"]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    return str(tmp_path)


def tokens_of(text: str) -> list[int]:
    return [len(text)]


def ids(dataset: lakeckpt.LakeDataset, **arguments: int) -> list[int]:
    return sorted(i for batch in lakeckpt.LakeLoader(dataset, **arguments) for i in batch["id"].tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_other_columns_are_read(folder: str, num_workers: int) -> None:
    dataset = lakeckpt.LakeDataset(folder, batch_size=3, columns=["id"], filters=[("id", ">", 2)], shuffle=True)
    assert ids(dataset, num_workers=num_workers) == [3, 4, 5]


def test_the_other_columns_are_packed_mixed_and_given_to_a_transform(folder: str) -> None:
    table = lakeckpt.open_table(folder)
    packed = lakeckpt.pack(lakeckpt.LakeDataset(table, batch_size=1, columns=["tokens"]), length=3)
    assert sum(batch["tokens"].numel() for batch in lakeckpt.LakeLoader(packed)) == 6
    sources = {n: (lakeckpt.LakeDataset(table, batch_size=2, columns=["id"], seed=i), 1.0) for i, n in enumerate("ab")}
    assert len(next(iter(lakeckpt.LakeLoader(lakeckpt.mix(sources))))["id"]) == 2
    doubled = lakeckpt.LakeDataset(table, batch_size=2, columns=["id"], transform=lambda batch: {"id": batch["id"] * 2})
    assert ids(doubled) == [4, 6, 8, 10]
    many = lakeckpt.LakeDataset(table, batch_size=2, columns=["id"], transform=lambda row: [row, row], rows="many")
    assert len(ids(many)) == 8


@pytest.mark.parametrize("columns", [None, ["id", "x"]])
@pytest.mark.parametrize("output", ["torch", "arrow"])
def test_a_dataset_that_reads_the_column_is_refused_when_it_is_made(folder: str, columns: object, output: str) -> None:
    with pytest.raises(SchemaError, match=SAID):
        lakeckpt.LakeDataset(folder, batch_size=2, columns=columns, output=output)  # type: ignore[arg-type]


def test_a_nested_column_is_named(folder: str) -> None:
    with pytest.raises(SchemaError, match=r"'s' is struct<a: int64> in '1.parquet', but struct<a: string>"):
        lakeckpt.LakeDataset(folder, batch_size=2, columns=["s"], output="arrow")


@pytest.mark.parametrize(
    "filters",
    [[("x", ">", 1)], [("x", "in", ["u"])], pc.field("x").is_valid(), pc.match_substring(pc.field("x"), "u")],
    ids=str,
)
def test_a_filter_over_the_column_is_refused(folder: str, filters: object) -> None:
    with pytest.raises(SchemaError, match=SAID):
        lakeckpt.LakeDataset(folder, batch_size=2, columns=["id"], filters=filters)  # type: ignore[arg-type]


def test_a_filter_that_is_wrong_for_another_column_does_not_blame_it(folder: str) -> None:
    with pytest.raises(SchemaError, match="does not fit the table") as caught:
        lakeckpt.LakeDataset(folder, batch_size=2, columns=["id"], filters=pc.match_substring(pc.field("id"), "u"))
    assert "leave it out" not in str(caught.value)


def test_packing_and_tokenizing_the_column_name_both_files(folder: str) -> None:
    table = lakeckpt.open_table(folder)
    dataset = lakeckpt.LakeDataset(table, batch_size=1, columns=["id"])
    with pytest.raises(SchemaError, match=SAID):
        lakeckpt.pack(dataset, length=3, column="x")
    with pytest.raises(SchemaError, match=SAID):
        lakeckpt.pack(dataset, length=3, column="x", tokenizer=tokens_of)


def test_an_index_that_was_saved_still_refuses_the_column(folder: str) -> None:
    table = lakeckpt.open_table(folder)
    loaded = table.at(TableIndex.loads(table.index.dumps()))
    assert ids(lakeckpt.LakeDataset(loaded, batch_size=2, columns=["id"])) == [2, 3, 4, 5]
    with pytest.raises(SchemaError, match=SAID):
        lakeckpt.LakeDataset(loaded, batch_size=2, columns=["x"])


def test_files_that_are_added_to_a_table_that_is_followed_may_disagree_about_other_columns(folder: str) -> None:
    index = lakeckpt.open_table(folder).index
    first = lakeckpt.open_table([f"{folder}/1.parquet"]).index
    assert "x" in first.schema.names
    for parts in (
        [SomeFiles(index=first, left={}), SomeFiles(index=index)],
        [SomeFiles(index=index, left={}), SomeFiles(index=first)],
    ):
        assert "x" not in joined(parts, version=PLAIN, known=set(), needed={"id"}).schema.names
        with pytest.raises(SchemaError, match="column 'x' of the files that were added"):
            joined(parts, version=PLAIN, known=set(), needed={"id", "x"})
