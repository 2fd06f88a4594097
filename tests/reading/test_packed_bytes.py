"""Tokens of columns of bytes, and the columns of a batch that are asked for, are what lists and all columns give."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, cumulative_lengths, errors, mix, open_table, pack
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.testing import assert_exactly_once

DOCUMENTS = [list(range(50 * place, 50 * place + length)) for place, length in enumerate([7, 0, 31, 12] * 20)]


def column_of(kind: pa.DataType, dtype: str, documents: list[list[int]]) -> pa.Array:
    octets = [np.asarray(one, np.dtype(dtype).newbyteorder("<")).tobytes() for one in documents]
    return pa.array([one or None if place % 8 == 1 else one for place, one in enumerate(octets)], kind)


def write(folder: Path, columns: dict[str, Any], rows: int = 9) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "0.parquet", row_group_size=rows)
    return folder


def batches(folder: Path, *, shuffle: bool = True, output: Any = "torch", lanes: int = 2, **given: Any) -> list[Any]:
    dataset = LakeDataset(
        folder,
        batch_size=3,
        shuffle=shuffle,
        shuffle_window=2,
        output=output,
        options=ReadOptions(num_lanes=lanes),
    )
    return list(LakeLoader(pack(dataset, **{"length": 16, **given})))


def values(every: list[Any]) -> list[dict[str, Any]]:
    return [{name: column.tolist() for name, column in batch.items()} for batch in every]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("dtype", "delivered"),
    [("uint16", torch.int32), ("int32", torch.int32), ("uint32", torch.int64), ("int64", torch.int64)],
)
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_bytes_are_the_tokens_that_lists_are(
    kind: pa.DataType, dtype: Any, delivered: torch.dtype, shuffle: bool, tmp_path: Path
) -> None:
    lists = write(tmp_path / "lists", {"tokens": pa.array(DOCUMENTS, pa.list_(pa.int32()))})
    octets = write(tmp_path / "bytes", {"tokens": column_of(kind, dtype, DOCUMENTS)})
    options: dict[str, Any] = {"shuffle": shuffle, "labels": True, "after": 1, "length": 8}
    found = batches(octets, dtype=dtype, **options)
    assert {batch["tokens"].dtype for batch in found} == {delivered}
    assert sorted(itertools.chain(*(batch["tokens"][batch["loss_mask"]].tolist() for batch in found))) == sorted(
        itertools.chain(*([*one, 1] for one in DOCUMENTS if one))
    )
    if not shuffle:  # else another packing is another order
        assert values(found) == values(batches(lists, **options))


def test_bytes_of_fixed_size_are_documents_of_one_length_and_nulls_are_none(tmp_path: Path) -> None:
    documents = [list(range(place, place + 8)) for place in range(0, 800, 8)]
    octets = [None if place % 7 == 3 else np.asarray(one, "<u2").tobytes() for place, one in enumerate(documents)]
    folder = write(tmp_path, {"tokens": pa.array(octets, pa.binary(16))})
    found = batches(folder, shuffle=False, lanes=1, dtype="uint16")
    tokens = list(itertools.chain(*(batch["tokens"][batch["loss_mask"]].tolist() for batch in found)))
    assert tokens == list(itertools.chain(*(one for place, one in enumerate(documents) if place % 7 != 3)))


def test_every_token_of_bytes_counts_once_on_any_chain_of_topologies(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokens": column_of(pa.binary(), "uint16", DOCUMENTS)})

    def make(rank: int, world_size: int, workers: int) -> LakeLoader:
        dataset = LakeDataset(folder, batch_size=2, shuffle=True, seed=3, rank=rank, world_size=world_size)
        return LakeLoader(pack(dataset, length=16, dtype="uint16"), num_workers=workers)

    assert_exactly_once(make, topologies=[(1, 0), (2, 0), (3, 0)])


def test_a_length_that_is_no_whole_number_of_tokens_is_refused_by_file_and_row(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokens": pa.array([b"\1\0", b"\2\0\3\0", b"\4\0\5"], pa.binary())}, rows=2)
    with pytest.raises(errors.DataFileDamaged, match=r"row 0 of row group 1 of the data file '0.parquet' has 3 bytes"):
        batches(folder, dtype="uint16")


def test_tokens_are_counted_by_a_column_of_their_numbers_and_the_bytes_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [len(one) for one in DOCUMENTS]
    columns = {"tokens": column_of(pa.binary(), "uint16", DOCUMENTS), "num_tokens": pa.array(numbers, pa.int32())}
    folder = write(tmp_path / "right", columns)
    read: list[list[str]] = []
    decode = RowGroupDecoder.decode

    def spied(self: RowGroupDecoder, group: int, start: int, stop: int) -> pa.Table:
        read.append(self.schema.names)
        return decode(self, group, start, stop)

    monkeypatch.setattr(RowGroupDecoder, "decode", spied)
    dataset = pack(LakeDataset(folder, batch_size=1), length=16, after=1, dtype="uint16")
    added = sum(numbers) + sum(map(bool, numbers))
    assert len(LakeLoader(dataset)) == -(-added // 16)
    assert read and set(map(tuple, read)) == {("num_tokens",)}
    wrong = write(tmp_path / "wrong", {**columns, "num_tokens": pa.array([*numbers[:-1], 99], pa.int32())})
    with pytest.raises(errors.DataFileChanged, match=r"its column 'num_tokens' has other numbers"):
        batches(wrong, dtype="uint16")


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (pa.binary(), {}, r"is binary: say what the bytes of a token are, pack\(…, dtype=…\), one of uint16"),
        (pa.list_(pa.int32()), {"dtype": "uint16"}, r"dtype='uint16'\) takes a column of bytes: leave dtype= out"),
        (pa.string(), {"dtype": "int32"}, r"takes a column of bytes"),
    ],
)
def test_a_dtype_that_the_column_does_not_fit_is_refused(
    kind: pa.DataType, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, {"tokens": pa.array([], kind)})
    with pytest.raises(errors.SchemaError, match=message):
        batches(folder, **given)


def test_another_dtype_is_another_place(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokens": pa.array([b"12345678"] * 40, pa.binary())})
    loaders = [
        LakeLoader(pack(LakeDataset(folder, batch_size=1), length=2, dtype=dtype))  # type: ignore[arg-type]
        for dtype in ("uint16", "uint32")
    ]
    next(iter(loaders[0]))
    with pytest.raises(errors.StateMismatch):
        loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_the_columns_that_are_asked_for_are_those_of_all_columns(tmp_path: Path, shuffle: bool, output: str) -> None:
    folder = write(tmp_path, {"tokens": pa.array(DOCUMENTS, pa.list_(pa.uint16()))})
    every = batches(folder, shuffle=shuffle, output=output, labels=True)
    for columns in (["tokens"], ["tokens", "loss_mask"], ["labels", "tokens"], ["tokens", "cu_seqlens"]):
        found = batches(folder, shuffle=shuffle, output=output, columns=columns)
        assert [list(batch) for batch in found] == [columns] * len(every)
        for batch, whole in zip(found, every, strict=True):
            assert all((batch[name] == whole[name]).all() for name in columns if name != "cu_seqlens")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("documents", ["cut", "whole"])
def test_cu_seqlens_are_where_documents_begin_in_the_whole_batch(
    tmp_path: Path, shuffle: bool, workers: int, documents: Any
) -> None:
    folder = write(tmp_path, {"tokens": pa.array(DOCUMENTS, pa.list_(pa.uint16()))})
    names = ["tokens", "cu_seqlens", "position_ids"]
    dataset = LakeDataset(folder, batch_size=3, shuffle=shuffle, shuffle_window=2)
    loader = LakeLoader(pack(dataset, length=32, columns=names, documents=documents), num_workers=workers)
    found = list(loader)
    assert len(found) > 5
    for batch in found:
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == cumulative_lengths(batch["position_ids"]).tolist()


def by_words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_texts_that_are_tokenized_where_they_are_read_have_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path, {"text": pa.array(["a bb ccc " * place for place in range(20)])})
    dataset = LakeDataset(folder, batch_size=2)
    packed = pack(
        dataset, length=8, column="text", tokenizer=by_words, columns=["tokens", "cu_seqlens", "position_ids"]
    )
    for batch in LakeLoader(packed):
        assert list(batch) == ["tokens", "cu_seqlens", "position_ids"]
        assert batch["cu_seqlens"].tolist() == cumulative_lengths(batch["position_ids"]).tolist()


def test_a_mixture_has_cu_seqlens_of_its_rows(tmp_path: Path) -> None:
    names = ["tokens", "cu_seqlens", "position_ids"]
    folder = write(tmp_path, {"tokens": pa.array(DOCUMENTS, pa.list_(pa.uint16()))})
    one, other = (
        pack(LakeDataset(folder, batch_size=4, shuffle=True, seed=seed), length=16, columns=names) for seed in (1, 2)
    )
    loader = LakeLoader(mix({"one": (one, 0.7), "other": (other, 0.3)}))
    for batch in itertools.islice(loader, 60):
        assert batch["cu_seqlens"].tolist() == cumulative_lengths(batch["position_ids"]).tolist()
    fewer = pack(LakeDataset(folder, batch_size=4), length=16, columns=names[:2])
    with pytest.raises(errors.SchemaError, match=r"'position_ids'.*name the same in columns="):
        mix({"one": (one, 0.7), "other": (fewer, 0.3)})


@pytest.mark.parametrize(
    "given",
    [
        {"columns": ["position_ids"]},
        {"columns": ["tokens", "tokens"]},
        {"columns": ["tokens", "masks"]},
        {"columns": "tokens"},
        {"columns": ["tokens"], "labels": True},
        {"dtype": "float32"},
        {"dtype": "uint16", "tokenizer": by_words},
    ],
    ids=["no tokens", "twice", "unknown", "a text", "no labels", "no integers", "texts"],
)
def test_columns_and_types_that_there_are_not_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    folder = write(tmp_path, {"tokens": pa.array(DOCUMENTS, pa.list_(pa.uint16()))})
    with pytest.raises(errors.ConfigError):
        pack(LakeDataset(open_table(folder), batch_size=2), length=8, **given)


@pytest.mark.parametrize("rows", [9, 100])
def test_what_the_loop_writes_into_a_batch_is_in_no_other_batch(tmp_path: Path, rows: int) -> None:
    folder = write(tmp_path, {"tokens": column_of(pa.binary(), "int32", DOCUMENTS)}, rows=rows)
    expected = values(batches(folder, shuffle=False, dtype="int32"))
    dataset = LakeDataset(folder, batch_size=3, options=ReadOptions(num_lanes=2))
    for number, batch in enumerate(LakeLoader(pack(dataset, length=16, dtype="int32"))):
        assert batch["tokens"].tolist() == expected[number]["tokens"]
        batch["tokens"].fill_(-1)
