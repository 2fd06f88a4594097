"""Packed sequences: every token once in each epoch, documents and labels as a plain model says, counts from footers."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt import Table, errors, open_table
from lakeckpt.core.order import EpochLayout, OrderSpec, Window
from lakeckpt.reading.columns.gather import cut
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.filters.row_filter import row_filter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import COLUMNS, Packing
from lakeckpt.reading.packed.sequences import NO_LABEL
from lakeckpt.reading.packed.token_counts import count_tokens
from lakeckpt.reading.packed.window import SequenceDecoder
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import DecodedWindow

ADDED = 1 << 20
"""Tokens from here on are put beside documents."""


GOLDEN = [
    [18, 19, 3, 4],
    [12, 13, 8, 9],
    [1, 2, 10, 11],
    [14, 15, 16, 17],
    [5, 6, 7, 0],
    [31, 32, 33, 34],
    [35, 36, 37, 20],
    [27, 28, 29, 30],
    [25, 26, 0, 0],
    [21, 22, 23, 24],
]


def write(folder: Path, lengths: Sequence[Sequence[int | None]], kind: pa.DataType, rows: int) -> list[list[int]]:
    """Write one file for each of ``lengths``, ``rows`` to a row group; return the documents. Each token is unique."""
    documents, count = [], itertools.count()
    for number, mine in enumerate(lengths):
        lists = [None if length is None else list(itertools.islice(count, length)) for length in mine]
        documents += [one or [] for one in lists]
        table = pa.table(
            {"tokens": pa.array(lists, kind), "even": [length is not None and length % 2 == 0 for length in mine]}
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=rows)
    return documents


def decoded(table: Table, packing: Packing, counted: RowSelection, spec: OrderSpec, lanes: int) -> list[dict[str, Any]]:
    layout = EpochLayout.build(counted.group_rows, spec, 0, lanes, unit=packing.length)
    rows = RowGroupDecoder(table, ["tokens"])
    decoder = SequenceDecoder(rows, packing, counted, table.index.group_rows, 1, Threads(2))
    found: list[dict[str, Any]] = []
    for window in layout.windows(0, layout.rows):
        columns = decoder.decode(window).columns
        assert columns is not None
        found += [{name: column[row] for name, column in columns.items()} for row in range(window.rows)]  # type: ignore[index]
    return found


documents = st.lists(st.lists(st.one_of(st.none(), st.integers(0, 40)), max_size=12), min_size=1, max_size=3)
kinds = st.sampled_from([pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
added = st.sampled_from([((), ()), ((ADDED,), ()), ((ADDED, ADDED + 1), (ADDED + 2,))])


@given(documents, kinds, st.integers(1, 5), st.integers(1, 24), added, st.booleans(), st.integers(1, 4), st.booleans())
def test_sequences_are_what_a_plain_model_says(
    lengths: list[list[int | None]],
    kind: pa.DataType,
    rows: int,
    length: int,
    added: tuple[tuple[int, ...], tuple[int, ...]],
    shuffle: bool,
    lanes: int,
    masks_ends: bool,
) -> None:
    before, after = added
    packing = Packing(
        column="tokens",
        length=length,
        before=before,
        after=after,
        columns=COLUMNS[:5],
        padding=7,
        masks_ends=masks_ends,
    )
    with tempfile.TemporaryDirectory() as folder:
        texts = write(Path(folder), lengths, kind, rows)
        table = open_table(folder)
        counted = count_tokens(table, packing)
        whole = [[*before, *one, *after] for one in texts if one]
        assert counted.group_rows.sum() == sum(map(len, whole))
        spec = OrderSpec(seed=5, shuffle=shuffle, window=2 if shuffle else 1)
        sequences = decoded(table, packing, counted, spec, lanes)
    assert len(sequences) == counted.num_rows
    real = [one["tokens"][one["loss_mask"]].tolist() for one in sequences]
    assert sorted(itertools.chain(*real)) == sorted(itertools.chain(*whole))
    assert sum(len(one) < length for one in real) == (sum(map(len, whole)) % length > 0)
    if not shuffle:
        assert list(itertools.chain(*real)) == list(itertools.chain(*whole))
    if not before:
        follows = {a: b for one in whole for a, b in itertools.pairwise(one)}
        groups = row_groups(texts, [len(one) for one in lengths], rows)
        in_group = {a: b for one in groups for a, b in itertools.pairwise(itertools.chain(*one))}
        for one in sequences:
            check_sequence(one, follows, follows if masks_ends else in_group, masks_ends=masks_ends)


@pytest.mark.parametrize("lanes", [1, 3])
def test_no_token_inside_of_a_document_has_the_label_of_another_document(lanes: int, tmp_path: Path) -> None:
    texts = write(tmp_path, [[5, 9, 4, 11] * 20], pa.list_(pa.int32()), 8)
    table, packing = (
        open_table(tmp_path),
        Packing(column="tokens", length=16, columns=COLUMNS[:5], masks_ends=False, padding=ADDED),
    )
    counted = count_tokens(table, packing)
    follows = {a: b for one in texts for a, b in itertools.pairwise(one)}
    sequences = decoded(table, packing, counted, OrderSpec(seed=1, shuffle=True, window=2), lanes)
    pairs = [pair for one in sequences for pair in zip(one["tokens"].tolist(), one["labels"].tolist(), strict=True)]
    labels = {token: label for token, label in pairs if token in follows}  # a window or a lane cuts some documents
    assert labels == follows


def row_groups(texts: list[list[int]], files: list[int], rows: int) -> list[list[list[int]]]:
    """Return the documents of each row group; ``files`` has how many documents are in each file."""
    mine = iter(texts)
    each = [list(itertools.islice(mine, count)) for count in files]
    return [one[first : first + rows] for one in each for first in range(0, len(one), rows)]


def check_sequence(
    one: dict[str, Any], follows: dict[int, int], after_sequences: dict[int, int], *, masks_ends: bool
) -> None:
    """Compare the columns of a sequence of unique tokens with which token follows which in its document, and which is
    the label of a sequence's last token."""
    tokens, labels = one["tokens"].tolist(), one["labels"].tolist()
    count = int(one["loss_mask"].sum())
    assert one["loss_mask"].tolist() == [True] * count + [False] * (len(tokens) - count)
    assert tokens[count:] == [7] * (len(tokens) - count)
    begins = [place == 0 or follows.get(tokens[place - 1]) != tokens[place] for place in range(count)]
    number, position = -1, 0
    for place in range(count):
        number, position = (number + 1, 0) if begins[place] else (number, position + 1)
        assert (one["document_ids"][place], one["position_ids"][place]) == (number, position)
        if tokens[place] in follows or masks_ends:  # also where a sequence, a window or a lane cuts the document
            assert labels[place] == follows.get(tokens[place], NO_LABEL)
        elif place + 1 < count:
            assert labels[place] == tokens[place + 1]
        else:
            assert labels[place] == after_sequences.get(tokens[place], NO_LABEL)
    assert labels[count:] == [NO_LABEL] * (len(tokens) - count)


@given(documents, st.integers(1, 12), st.booleans(), st.integers(0, 20), st.integers(0, 20))
def test_a_cut_of_sequences_is_what_they_are_one_by_one(
    lengths: list[list[int | None]], length: int, masks_ends: bool, start: int, rows: int
) -> None:
    packing = Packing(column="tokens", length=length, columns=COLUMNS[:5], masks_ends=masks_ends)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), lengths, pa.list_(pa.int32()), 4)
        window, decoded = first_window(open_table(folder), packing)
    columns: Any = decoded.columns
    start = min(start, window.rows)
    stop = min(start + rows, window.rows)
    for name, found in cut(columns, start, stop, lambda array: array).items():
        assert found.shape == (stop - start, length)
        assert found.tolist() == [columns[name][row].tolist() for row in range(start, stop)]


@given(documents, st.integers(1, 12), st.booleans(), st.integers(1, 5))
def test_parts_of_a_window_are_its_sequences(
    lengths: list[list[int | None]], length: int, shuffle: bool, parts: int
) -> None:
    packing = Packing(column="tokens", length=length, columns=COLUMNS[:5])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), lengths, pa.list_(pa.int32()), 4)
        table = open_table(folder)
        counted = count_tokens(table, packing)
        layout = EpochLayout.build(
            counted.group_rows, OrderSpec(seed=1, shuffle=shuffle, window=2 if shuffle else 1), 0, 1, unit=length
        )
        rows = RowGroupDecoder(table, ["tokens"])
        decoder = SequenceDecoder(rows, packing, counted, table.index.group_rows, 1, Threads(1))
        for window in layout.windows(0, layout.rows):
            whole, at = as_lists(decoder.decode(window), window.rows), window.start
            while at < window.stop:
                part = window.part(at, parts)
                assert part.start == at and part.rows <= -(-window.rows // parts)
                found = as_lists(decoder.decode(part), part.rows)
                at = part.stop
                expected = {name: one[part.start - window.start : at - window.start] for name, one in whole.items()}
                assert found == expected


def as_lists(found: DecodedWindow, rows: int) -> dict[str, list[Any]]:
    assert found.columns is not None
    return {name: one.tolist() for name, one in cut(found.columns, 0, rows, lambda array: array).items()}


@given(documents, st.integers(1, 9), added, st.booleans(), st.integers(1, 3))
def test_the_documents_that_are_named_hold_the_tokens_of_the_sequences(
    lengths: list[list[int | None]],
    length: int,
    added: tuple[tuple[int, ...], tuple[int, ...]],
    shuffle: bool,
    lanes: int,
) -> None:
    before, after = added
    packing = Packing(column="tokens", length=length, before=before, after=after)
    with tempfile.TemporaryDirectory() as folder:
        texts = [[*before, *one, *after] for one in write(Path(folder), lengths, pa.list_(pa.int32()), 3)]
        table = open_table(folder)
        counted = count_tokens(table, packing)
        spec = OrderSpec(seed=5, shuffle=shuffle, window=2 if shuffle else 1)
        layout = EpochLayout.build(counted.group_rows, spec, 0, lanes, unit=length)
        rows = RowGroupDecoder(table, ["tokens"])
        decoder = SequenceDecoder(rows, packing, counted, table.index.group_rows, 1, Threads(2))
        named: list[list[int]] = [[] for _ in range(layout.rows)]
        for window in layout.windows(0, layout.rows):
            found = decoder.name(window)
            for place, group, row, start, stop in zip(
                found.positions, found.groups, found.rows, found.starts, found.stops, strict=True
            ):
                named[place] += texts[table.index.group_rows[:group].sum() + row][start:stop]
        sequences = decoded(table, packing, counted, spec, lanes)
    assert named == [one["tokens"][one["loss_mask"]].tolist() for one in sequences]


def first_window(table: Table, packing: Packing) -> tuple[Window, DecodedWindow]:
    """Return the first window of the table, decoded."""
    counted = count_tokens(table, packing)
    layout = EpochLayout.build(counted.group_rows, OrderSpec(seed=3, shuffle=True, window=2), 0, 1, unit=packing.length)
    window = layout.window_at(0) if layout.rows else Window(start=0, stop=0, fragments=(), key=None)
    decoder = SequenceDecoder(
        RowGroupDecoder(table, ["tokens"]), packing, counted, table.index.group_rows, 1, Threads(2)
    )
    return window, decoder.decode(window)


def test_a_window_takes_the_memory_of_its_tokens_and_little_more(tmp_path: Path) -> None:
    write(tmp_path, [[200] * 64], pa.list_(pa.int32()), 64)
    _, decoded = first_window(open_table(tmp_path), Packing(column="tokens", length=128, columns=COLUMNS[:5]))
    assert decoded.size_bytes == pytest.approx(4 * 200 * 64, rel=0.15)


def test_documents_of_rows_that_a_filter_drops_are_in_no_sequence(tmp_path: Path) -> None:
    texts = write(tmp_path, [[3, 4, 5, 6, None, 8], [2, 7, 7, 0]], pa.list_(pa.int32()), 3)
    table, packing = open_table(tmp_path), Packing(column="tokens", length=4)
    keep = row_filter([("even", "==", True)], table.schema)
    kept = keep, count_rows(table, keep)[0]
    counted = count_tokens(table, packing, kept)
    assert counted.group_rows.sum() == sum(len(one) for one in texts if len(one) % 2 == 0)
    assert counted.digest != count_tokens(table, packing).digest


@pytest.mark.parametrize("changed", [{"length": 5}, {"after": (1,)}, {"before": (1,)}])
def test_another_packing_of_the_same_tokens_is_another_selection(tmp_path: Path, changed: dict[str, Any]) -> None:
    write(tmp_path, [[3, 4, 5]], pa.list_(pa.int32()), 2)
    table = open_table(tmp_path)
    one, other = Packing(column="tokens", length=4), Packing(**{"column": "tokens", "length": 4, **changed})
    assert count_tokens(table, one).digest != count_tokens(table, other).digest
    assert RowSelection.loads(count_tokens(table, one).dumps()) == count_tokens(table, one)


def test_filters_that_keep_other_documents_of_as_many_tokens_are_other_selections(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())), "x": [0, 1]}), tmp_path / "a")
    table, packing = open_table([tmp_path / "a"]), Packing(column="tokens", length=2)
    found = []
    for value in (0, 1):
        keep = row_filter([("x", "==", value)], table.schema)
        found.append(count_tokens(table, packing, (keep, count_rows(table, keep)[0])))
    assert found[0].group_rows.tolist() == found[1].group_rows.tolist() == [2]
    assert found[0].digest != found[1].digest


def test_the_order_of_documents_and_sequences_is_golden(tmp_path: Path) -> None:
    """A run that goes on after an upgrade reads the same sequences: this test may change with a new version only."""
    write(tmp_path, [[3, 5, 2, 4, 6], [7, 1, 8, 2]], pa.list_(pa.int32()), 3)
    table, packing = open_table(tmp_path), Packing(column="tokens", length=4)
    spec = OrderSpec(seed=7, shuffle=True, window=2)
    sequences = decoded(table, packing, count_tokens(table, packing), spec, 2)
    assert [one["tokens"].tolist() for one in sequences] == GOLDEN


def test_a_row_group_of_other_tokens_than_were_counted_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [[3, 4]], pa.list_(pa.int32()), 2)
    table, packing = open_table(tmp_path), Packing(column="tokens", length=2)
    wrong = replace(count_tokens(table, packing), group_rows=np.array([8]))
    with pytest.raises(errors.DataFileChanged, match=r"row group 0 of '0.parquet' has 7 tokens .* and 8 were counted"):
        decoded(table, packing, wrong, OrderSpec(seed=0, shuffle=False, window=1), 1)


def test_a_null_token_is_refused_with_its_row_group(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1, 2], [3, None]], pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    table, packing = open_table(tmp_path), Packing(column="tokens", length=2)
    counted = count_tokens(table, packing)
    with pytest.raises(errors.NullValueError, match=r"row group 0 of the data file 'a.parquet'") as caught:
        decoded(table, packing, counted, OrderSpec(seed=0, shuffle=False, window=1), 1)
    assert (caught.value.file, caught.value.row_group, caught.value.column) == ("a.parquet", 0, "tokens")


@pytest.mark.parametrize(
    "kind",
    [
        pa.int32(),
        pa.string(),
        pa.list_(pa.float32()),
        pa.list_(pa.uint64()),
        pa.list_(pa.string()),
        pa.list_(pa.bool_()),
        pa.list_(pa.list_(pa.int32())),
        pa.struct([("tokens", pa.int32())]),
    ],
    ids=str,
)
def test_a_column_that_is_no_list_of_integers_is_refused(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"tokens": pa.array([], kind)}), tmp_path / "a.parquet")
    with pytest.raises(errors.SchemaError, match="needs a list of integers"):
        count_tokens(open_table(tmp_path), Packing(column="tokens", length=2))


def test_footers_alone_are_read_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [[3, 4, 5], [6, None, 0]], pa.list_(pa.int32()), 2)
    monkeypatch.setattr(RowGroupDecoder, "decode", None)
    assert count_tokens(open_table(tmp_path), Packing(column="tokens", length=4)).group_rows.tolist() == [7, 5, 6, 0]


def test_a_footer_without_statistics_has_its_data_read(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", write_statistics=False)
    assert count_tokens(open_table(tmp_path), Packing(column="tokens", length=4)).group_rows.tolist() == [3]
