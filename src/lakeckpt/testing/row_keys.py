"""This module makes values that can be counted of rows: of those in batches, and of those that the table has.

A row is by default all of its columns, as plain Python values; or one column; or what a function of the caller's makes
of it. The table's own rows are read by `pyarrow.dataset`, row group after row group, so that the law sees an error of
lakeckpt's decoder. The decoder reads them if pyarrow knows less than the table's format: of partition columns,
renamed columns, and tables that are not local files.

It changes nothing that it looks at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from pyarrow.fs import LocalFileSystem

from lakeckpt.data.base.source import row_of
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.columns.convert import convert
from lakeckpt.reading.columns.ragged import Ragged, to_pylist
from lakeckpt.reading.windows.decode import RowGroupDecoder, select_columns
from lakeckpt.testing.packed_laws import sequences_of

__all__ = ["Key", "RowKeys", "canonical"]

Key = str | Callable[[Any], Iterable[Hashable]] | None


class RowKeys:
    """Says which rows an item of a loader holds, and which the table does.

    ``key``: None (whole rows), a column's name, or a function that returns the keys of an item's rows. ``single`` says
    that an item is one row.
    """

    def __init__(self, dataset: LakeDataset, key: Key, *, single: bool) -> None:
        if dataset.packing is not None:
            _check_packed(dataset, key)
        self.dataset = dataset
        self.single = single
        self._key = key

    @property
    def comparable(self) -> bool:
        """True if keys of items can be compared with those of the table itself."""
        return not callable(self._key) and not (self.dataset.has_transform and self._key is None)

    def of_item(self, item: Any) -> list[Hashable]:
        """Return the key of each row of ``item``, in order; of packed sequences, the tokens of each."""
        if callable(self._key):
            return [canonical(key) for key in self._key(item)]
        if self.dataset.packing is not None:
            return sequences_of(item)
        if isinstance(item, pa.Table):
            return _arrow_rows(item, self._key)
        if not isinstance(item, Mapping):
            raise ConfigError(
                f"the loader gives {type(item).__name__} and not columns: say which rows an item holds by "
                "key=function, from an item to the keys of its rows"
            )
        columns = item if self._key is None else {self._key: _column(item, self._key)}
        if self.single:
            return [_joined([canonical(value) for value in columns.values()])]
        return _column_rows(columns)

    def of_table(self) -> list[list[Hashable]]:
        """Return the key of each row of each row group of the table, decoded without any order."""
        return [self._of_rows(table) for table in self._tables()]

    def documents(self) -> list[dict[int, list[int]]]:
        """Return the tokens of the documents of each row group, by their rows; for packed sequences alone.

        Documents without tokens are skipped, and tokens that packing adds are in their places.
        """
        packing = self.dataset.packing
        assert packing is not None
        columns = (_documents(table[packing.column].to_pylist(), packing.dtype) for table in self._tables())
        return [
            {row: [*packing.before, *tokens, *packing.after] for row, tokens in enumerate(column) if tokens}
            for column in columns
        ]

    def _of_rows(self, table: pa.Table) -> list[Hashable]:
        dataset = self.dataset
        if dataset.output == "arrow":
            return _arrow_rows(table, self._key if isinstance(self._key, str) else None)
        columns: dict[str, Any] = dict(convert(table, nulls=dataset.options.nulls))
        if isinstance(self._key, str):
            return _column_rows({self._key: columns[self._key]})
        if self.single:
            rows = range(table.num_rows)
            return [_joined([canonical(v) for v in row_of(columns, row).values()]) for row in rows]
        return _column_rows(columns)

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the rows of each row group of the table that the dataset reads."""
        dataset = self.dataset
        names = [self._key] if isinstance(self._key, str) else dataset.columns
        wanted = select_columns(dataset.table.schema, names).names
        keep = dataset.row_filter
        decoder = RowGroupDecoder(dataset.table, list(dict.fromkeys([*wanted, *(keep.columns if keep else ())])))
        for group, existing in enumerate(dataset.table.index.group_rows.tolist()):
            table = _read_by_pyarrow(dataset.table, group, decoder.schema)
            table = decoder.decode(group, 0, existing) if table is None else table
            # By pyarrow's own filter, not by what was counted: the law would not notice wrong counts otherwise.
            yield (table if keep is None else table.filter(keep.expression)).select(wanted)
        decoder.close()


def _documents(column: list[Any], dtype: str | None) -> list[Any]:
    """Return the tokens of each row, of lists or of bytes."""
    if dtype is None:
        return column
    return [row and np.frombuffer(row, np.dtype(dtype).newbyteorder("<")).tolist() for row in column]


def _check_packed(dataset: LakeDataset, key: Key) -> None:
    """Refuse keys that say nothing of tokens."""
    if isinstance(key, str):
        raise ConfigError(
            f"key={key!r} tells rows apart, and this loader gives packed sequences, whose tokens are counted: leave "
            "key= out, or give a function from a batch to its tokens"
        )
    if key is None and dataset.has_transform:
        raise ConfigError(
            "a transform may change the tokens of packed batches: say which tokens an item holds by key=function, such "
            "as lambda batch: batch['tokens'][batch['loss_mask']].tolist(), or check the loader without the transform"
        )
    if key is not None and dataset.identity.endless:
        raise ConfigError(
            "the tokens of an endless stream of packed sequences are counted by their documents: check the loader "
            "without key= (and without a transform)"
        )


def _read_by_pyarrow(table: Table, group: int, schema: pa.Schema) -> pa.Table | None:
    """Return the rows of a row group that are not deleted; None if pyarrow alone cannot tell them."""
    index, storage = table.index, table.storage
    if index.partitions or index.columns or not isinstance(storage, LocalStorage):
        return None
    ordinal, inside = index.group(group)
    file = Path(storage.name, index.paths[ordinal])
    if not set(schema.names) <= set(pq.read_schema(file).names):  # a column that this file lacks
        return None
    fragment = ds.ParquetFileFormat().make_fragment(str(file), LocalFileSystem(), row_groups=[inside])
    rows = fragment.to_table(columns=schema.names).cast(schema)
    surviving = index.surviving(group)
    return rows if surviving is None else rows.filter(pa.array(surviving))


def _column(item: Mapping[str, Any], name: str) -> Any:
    if name not in item:
        raise ConfigError(f"key={name!r} is not among the columns of an item: {list(item)}")
    return item[name]


def _arrow_rows(table: pa.Table, name: str | None) -> list[Hashable]:
    if name is not None:
        table = table.select([name])
    return [_joined([canonical(value) for value in row.values()]) for row in table.to_pylist()]


def _column_rows(columns: Mapping[str, Any]) -> list[Hashable]:
    rows = [_rows_of(columns, name) for name in columns]
    lengths = {len(one) for one in rows}
    if len(lengths) > 1:
        raise ConfigError(f"columns {list(columns)} of one item have {sorted(lengths)} rows: give key=function")
    return [_joined([canonical(value) for value in row]) for row in zip(*rows, strict=True)]


def _rows_of(columns: Mapping[str, Any], name: str) -> list[Any]:
    column = columns[name]
    if isinstance(column, torch.Tensor):
        return [one.tolist() for one in column.unbind()] if column.is_nested else list(column.tolist())
    if isinstance(column, (list, tuple)):
        return list(column)
    if isinstance(column, (Ragged, dict)):
        return to_pylist({name: column}, name)
    return list(column.tolist())


def _joined(values: list[Hashable]) -> Hashable:
    return values[0] if len(values) == 1 else tuple(values)


def canonical(value: Any) -> Hashable:
    """Return ``value`` as a hashable value that is equal if the contents are: arrays and tensors become tuples."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if value is None or isinstance(value, (str, bytes, int)):
        return value
    if isinstance(value, torch.Tensor) and value.is_nested:
        return tuple(canonical(one) for one in value.unbind())
    if isinstance(value, Ragged) or hasattr(value, "tolist"):
        return canonical(value.tolist())
    if isinstance(value, Mapping):
        return tuple(itertools.chain.from_iterable((name, canonical(one)) for name, one in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(canonical(one) for one in value)
    if isinstance(value, Hashable):
        return value
    raise ConfigError(f"rows hold a {type(value).__name__}, which cannot be counted: give key=function")
