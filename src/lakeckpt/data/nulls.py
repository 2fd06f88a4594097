"""In which file and row group does a null stand that stopped a job?  Looked for only when there is one.

The micro-batch is converted again, less and less of it, until the first row with a null is found; its position then
tells the row group. It reads nothing: the rows are at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa

from lakeckpt.core.order import EpochLayout
from lakeckpt.core.receipts import Receipt
from lakeckpt.errors import NullValueError
from lakeckpt.lake.index import TableIndex
from lakeckpt.reading.convert import convert

__all__ = ["placed"]


def placed(
    error: NullValueError,
    table: pa.Table,
    receipt: Receipt,
    *,
    layouts: Mapping[int, EpochLayout],
    index: TableIndex,
    nulls: Literal["error", "mask"],
) -> NullValueError:
    """Return ``error``, which converting ``table`` (the rows of ``receipt``) raised, with the file and row group."""
    low, high = 0, table.num_rows  # the first ``low`` rows have no null, the first ``high`` have
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(table.slice(low, middle - low), nulls=nulls)
            low = middle
        except NullValueError:
            high = middle
    file, row_group = index.group(_group_of(low, receipt, layouts))
    path = index.paths[file]
    return NullValueError(
        f"{error} (the first one of micro-batch {receipt.micro_batch}, epoch {receipt.epoch}: row group {row_group} of "
        f"the data file {path!r})",
        file=path,
        row_group=row_group,
        column=error.column,
    )


def _group_of(row: int, receipt: Receipt, layouts: Mapping[int, EpochLayout]) -> int:
    """The row group of the ``row``-th row that came."""
    for span in receipt.spans:
        positions = np.arange(span.start, span.stop)
        groups, _ = layouts[span.epoch].locate(positions)
        came = np.ones(len(positions), bool)
        for skip in receipt.skips:
            if skip.group.epoch == span.epoch:
                for start, stop in skip.group.positions.pairs():
                    came &= (groups != skip.group.group) | (positions < start) | (positions >= stop)
        found = groups[came]
        if row < len(found):
            return int(found[row])
        row -= len(found)
    raise AssertionError("a micro-batch has fewer rows than it was converted from")
