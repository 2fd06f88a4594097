"""Is a file read as pyarrow reads it, or refused with an error of ours?"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import LakeckptError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.reading.windows.decode import RowGroupDecoder


def read_by_row_groups(path: Path) -> pa.Table:
    """All rows of a file, row group by row group, without the columns that its folders add."""
    table = open_table([path])
    stored = pq.read_schema(path).names
    names = [name for name in table.schema.names if name in stored]
    decoder = RowGroupDecoder(table, names if len(names) < len(table.schema.names) else None)
    groups = [decoder.decode(group, 0, rows) for group, rows in enumerate(table.index.group_rows.tolist())]
    return pa.concat_tables([decoder.schema.empty_table(), *groups])


def held_to_pyarrow(path: Path) -> Literal["read", "refused"]:
    """Compare with ``pyarrow.parquet.ParquetFile(path).read()``. What pyarrow cannot read must be refused."""
    try:
        expected = pq.ParquetFile(path).read()
    except Exception as error:
        expected = error
    try:
        found = read_by_row_groups(path)
    except LakeckptError:
        return "refused"
    assert isinstance(expected, pa.Table), f"{path}: pyarrow says {expected!r}, and it was read"
    assert found.schema.names == expected.schema.names and found.num_rows == expected.num_rows, path
    for name in found.schema.names:
        column, mine = expected.column(name), found.column(name)
        if column.type != mine.type:  # dictionaries and extension types are delivered as their values
            column = column.cast(mine.type)
        # As text where values do not equal themselves (NaN).
        assert column.equals(mine) or repr(column.to_pylist()) == repr(mine.to_pylist()), f"{path}: column {name!r}"
    return "read"
