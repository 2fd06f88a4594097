"""In which file and row group does a null stand that stopped a job?  Looked for only when there is one.

The rows are converted again, less and less of them, until the first one with a null is found; its position then tells
the row group. It reads nothing: the rows are at hand.
"""

from __future__ import annotations

from typing import Literal

from lakeckpt.core.receipts import Receipt
from lakeckpt.errors import NullValueError
from lakeckpt.lake.index import TableIndex
from lakeckpt.reading.convert import convert
from lakeckpt.reading.positions import NullFound

__all__ = ["placed"]


def placed(found: NullFound, receipt: Receipt, *, index: TableIndex, nulls: Literal["error", "mask"]) -> NullValueError:
    """Return what was ``found`` in the micro-batch of ``receipt``, with the file and row group."""
    low, high = 0, found.table.num_rows  # the first ``low`` rows have no null, the first ``high`` have
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(found.table.slice(low, middle - low), nulls=nulls)
            low = middle
        except NullValueError:
            high = middle
    groups, _ = found.layout.locate(found.positions[low : low + 1])
    file, row_group = index.group(int(groups[0]))
    path = index.paths[file]
    return NullValueError(
        f"{found.error} (the first one of micro-batch {receipt.micro_batch}, epoch {receipt.epoch}: row group "
        f"{row_group} of the data file {path!r})",
        file=path,
        row_group=row_group,
        column=found.error.column,
    )
