"""This module describes the Parquet tables that tests read, writes them, and draws them for properties.

A `LakeSpec` holds files, row groups, columns and nulls. Values are functions of the row's number alone, so that a spec
is small and prints well, and a row is known wherever it turns up. Column ``id`` (int64) is the row's number in the
table's own order.
"""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from lakeckpt.errors import ConfigError

__all__ = ["COLUMNS", "LakeSpec", "tables"]

_WORDS = ("", "sea", "lake", "öde", "日本", "🌊", "a longer piece of text, to be cut by offsets")


def _word(i: int) -> str:
    return f"{_WORDS[i % len(_WORDS)]}{i % 11}"


_KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int8": (pa.int8(), lambda i: i % 200 - 100),
    "int16": (pa.int16(), lambda i: i * 37 % 60_000 - 30_000),
    "int32": (pa.int32(), lambda i: i * 2_654_435 % 2**31),
    "uint8": (pa.uint8(), lambda i: i % 256),
    "uint64": (pa.uint64(), lambda i: 2**64 - 1 - i),
    "float32": (pa.float32(), lambda i: i / 8),
    "float64": (pa.float64(), lambda i: float("nan") if i % 17 == 5 else -i / 3),
    "bool": (pa.bool_(), lambda i: i % 3 == 0),
    "timestamp": (pa.timestamp("us"), lambda i: datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=i)),
    "date": (pa.date32(), lambda i: datetime.date(2020, 1, 1) + datetime.timedelta(days=i % 4000)),
    "decimal": (pa.decimal128(12, 2), lambda i: decimal.Decimal(i) / 4),
    "string": (pa.string(), _word),
    "binary": (pa.binary(), lambda i: _word(i).encode()[::-1]),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), lambda i: _WORDS[i % 5]),
    "list": (pa.list_(pa.int32()), lambda i: list(range(i % 4))),
    "large_list": (pa.large_list(pa.float32()), lambda i: [i / 2] * (i % 3)),
    "fixed": (pa.list_(pa.int16(), 3), lambda i: [i % 7, i % 5, i % 3]),
    "struct": (pa.struct([("a", pa.int32()), ("b", pa.string())]), lambda i: {"a": i % 100, "b": _word(i)}),
    "nested": (pa.list_(pa.list_(pa.int8())), lambda i: [[i % 9] * (k + 1) for k in range(i % 3)]),
}

COLUMNS = tuple(_KINDS)
"""The kinds of columns that a spec may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeSpec:
    """A table to be written: ``files`` holds the rows of each row group of each file."""

    files: tuple[tuple[int, ...], ...] = ((5, 3), (4,))
    columns: tuple[str, ...] = ()
    """Kinds of columns beside ``id`` (see `COLUMNS`); a column is called by its kind."""
    null_every: int = 0
    """Every how-manieth row is null in the columns beside ``id``; 0: none is."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.columns if name not in _KINDS]
        if unknown or len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"columns are some of {', '.join(COLUMNS)}, each once, got {list(self.columns)}")
        if not self.files or any(rows < 0 for groups in self.files for rows in groups) or self.null_every < 0:
            raise ConfigError(f"a table has files of row groups of 0 or more rows, got {self.files}")

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(rows for groups in self.files for rows in groups)

    @property
    def schema(self) -> pa.Schema:
        """The schema of every file."""
        fields = [pa.field("id", pa.int64(), nullable=False)]
        return pa.schema(
            fields + [pa.field(name, _KINDS[name][0], nullable=self.null_every > 0) for name in self.columns]
        )

    def table(self, start: int, stop: int) -> pa.Table:
        """Return rows [start, stop) as they are written."""
        columns: list[list[Any]] = [list(range(start, stop))]
        for name in self.columns:
            make = _KINDS[name][1]
            columns.append([None if self._is_null(row) else make(row) for row in range(start, stop)])
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self.schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def _is_null(self, row: int) -> bool:
        return self.null_every > 0 and row % self.null_every == 0

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write the files into ``folder``, which is made, and return it."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        start = 0
        for number, groups in enumerate(self.files):
            with pq.ParquetWriter(root / f"part-{number:05d}.parquet", self.schema) as writer:
                for rows in groups:
                    writer.write_table(self.table(start, start + rows), row_group_size=max(rows, 1))
                    start += rows
        return root


@st.composite
def tables(
    draw: st.DrawFn,
    *,
    max_files: int = 3,
    max_row_groups: int = 4,
    max_group_rows: int = 12,
    columns: tuple[str, ...] = COLUMNS,
    max_columns: int = 3,
    nulls: bool = False,
) -> LakeSpec:
    """Tables of up to ``max_files`` files of up to ``max_row_groups`` row groups of up to ``max_group_rows`` rows each.

    Row groups and files may be empty. ``columns``: the kinds to choose from; ``nulls``: whether some may be null.
    """
    group = st.integers(0, max_group_rows)
    files = draw(st.lists(st.lists(group, max_size=max_row_groups).map(tuple), min_size=1, max_size=max_files))
    chosen = draw(st.lists(st.sampled_from(columns), max_size=max_columns, unique=True)) if columns else []
    null_every = draw(st.sampled_from([0, 2, 3, 7])) if nulls else 0
    return LakeSpec(files=tuple(files), columns=tuple(chosen), null_every=null_every)
