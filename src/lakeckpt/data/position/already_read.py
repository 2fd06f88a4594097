"""This module begins an epoch of which another system has read a part: its rest is a selection of the table's rows.

The rows that were read are named by file and row, or by the values of a key column. They are treated as deleted in the
first epoch, and exist again from the second epoch on. The module decodes the key column, if there is one, in this
thread; it starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import ConfigError
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import RestOfEpoch, TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import RowGroupDecoder, select_columns

__all__ = ["Consumed", "rest_of_first_epoch"]

Consumed = Mapping[str, Sequence[tuple[int, int]]] | tuple[str, Any]
"""File → half-open intervals of its rows, counted from its first row; or (name of a key column, its values)."""
Int64Array = npt.NDArray[np.int64]


def rest_of_first_epoch(table: Table, consumed: Consumed) -> Table:
    """Return ``table`` with an index that is of the rest of epoch 0, without the rows that were ``consumed``.

    Raises `ConfigError` for what names no rows of the table; `SchemaError` for a key column that it does not have.
    """
    if isinstance(consumed, Mapping):
        taken = _of_intervals(table.index, consumed)
    elif isinstance(consumed, tuple) and len(consumed) == 2 and isinstance(consumed[0], str):
        taken = _of_values(table, *consumed)
    else:
        raise ConfigError(
            "consumed= takes {file: [(first row, one past the last row), …]} or (name of a key column, its values), "
            f"got {type(consumed).__name__}"
        )
    index = replace(table.index, rest=RestOfEpoch(epoch=0, taken=Deletes.of(taken)))
    if not index.num_rows:
        raise ConfigError(f"consumed= names every row of {table.uri!r}: there is no rest of the first epoch to read")
    return table.at(index)


def _of_intervals(index: TableIndex, consumed: Mapping[str, Sequence[tuple[int, int]]]) -> dict[int, Int64Array]:
    files = {path: file for file, path in enumerate(index.paths)}
    found: dict[int, Int64Array] = {}
    for path, intervals in consumed.items():
        if path not in files:
            raise ConfigError(f"consumed= names the file {path!r}, which the table does not have: {index.paths[:5]} …")
        file = files[path]
        rows = int(index.stored_rows[index.first_group[file] : index.first_group[file + 1]].sum())
        for start, stop in intervals:
            if not 0 <= start <= stop <= rows:
                raise ConfigError(f"consumed= names rows [{start}, {stop}) of {path!r}, which has {rows}")
        found[file] = np.concatenate([np.zeros(0, np.int64), *(np.arange(*pair) for pair in intervals)])
    return found


def _of_values(table: Table, key: str, values: Iterable[Any]) -> dict[int, Int64Array]:
    index, kind = table.index, select_columns(table.schema, [key]).field(key).type
    try:
        wanted = pc.unique(pa.array(values, kind) if not isinstance(values, pa.Array) else values.cast(kind))
    except pa.ArrowException as error:
        raise ConfigError(f"the values of consumed= do not fit the column {key!r}, which is {kind}: {error}") from error
    found: dict[int, list[Int64Array]] = {}
    with closing(RowGroupDecoder(table, [key])) as decoder:
        for group, rows in enumerate(index.group_rows.tolist()):
            mask = pc.is_in(decoder.decode(group, 0, rows)[key], wanted).to_numpy()
            left, start = index.surviving(group), index.stored_start(group)
            inside = np.arange(index.stored_rows[group]) if left is None else np.flatnonzero(left)
            found.setdefault(index.group(group)[0], []).append(start + inside[mask])
    count = sum(len(part) for parts in found.values() for part in parts)
    if count != len(wanted):
        raise ConfigError(
            f"consumed= has {len(wanted):,} values of {key!r}, and {count:,} rows of {table.uri!r} have them: each "
            "value of a key column is in one row"
        )
    return {file: np.concatenate(parts) for file, parts in found.items()}
