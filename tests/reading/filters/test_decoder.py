"""Of row groups that a filter keeps whole, only the columns asked for are read; of others the filter's columns, too."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.filters.decoder import FilteredDecoder
from lakeckpt.reading.filters.row_filter import row_filter


def test_only_the_columns_asked_for_are_returned_of_whole_and_of_cut_row_groups(tmp_path: Path) -> None:
    content = pa.table({"x": [1, 2, 3, 4, 5, 6], "y": list("abcdef")})
    pq.write_table(content, tmp_path / "a.parquet", row_group_size=2)
    table = open_table(tmp_path)
    keep = row_filter(pc.field("x") > 3, table.schema)
    counts, _ = count_rows(table, keep)
    decoder = FilteredDecoder(table, ["y"], keep, counts)
    found = [decoder.decode(group, 0, int(rows)) for group, rows in enumerate(counts.group_rows)]
    assert [one.to_pydict() for one in found] == [{"y": []}, {"y": ["d"]}, {"y": ["e", "f"]}]
