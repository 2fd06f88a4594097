"""How many micro-batches does a lane give, and how many rows has each?  The ends of an epoch.

All lanes of an epoch give the same number T of micro-batches though they differ by a row:

=========  ==========================================  ==========================================================
tail       T, of lanes of q or q + 1 rows              rows
=========  ==========================================  ==========================================================
``short``  ceil(rows of the longest lane / B)          B each; the last two share what remains, the first of them
                                                       getting the odd row; none is dropped
``drop``   floor(q / B)                                B each; up to B of each lane are dropped
``even``   ceil(q / B)                                 as ``short`` over q rows; only a lane's extra row is dropped
``rows``   ceil(q / B), and one more if any lane has   as ``even``; then a lane's extra row is a micro-batch of its own
           an extra row
=========  ==========================================  ==========================================================

``even`` is what ``drop`` means in row-wise use, where every rank must see the same number of *rows*; ``rows`` is what
``short`` means there: ranks that go on row by row are at the same place in the same micro-batch until the very last
row.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Tail", "lane_limit", "micro_batches", "rows_before"]

Int64Array = npt.NDArray[np.int64]
Tail = Literal["short", "drop", "even", "rows"]


def micro_batches(rows: int, num_lanes: int, batch_size: int, tail: Tail) -> int:
    """Return T: how many micro-batches each of ``num_lanes`` lanes gives, ``rows`` being those of all lanes.

    >>> micro_batches(41, 4, 5, "short"), micro_batches(41, 4, 5, "drop")
    (3, 2)
    """
    if tail == "drop":
        return rows // num_lanes // batch_size
    longest = -(-rows // num_lanes) if tail == "short" else rows // num_lanes
    extra = tail == "rows" and rows % num_lanes > 0
    return -(-longest // batch_size) + extra


def lane_limit(lane_rows: Int64Array, rows: int, num_lanes: int, count: int, batch_size: int, tail: Tail) -> Int64Array:
    """Return how many of each lane's rows are given at all (int64, same shape as ``lane_rows``)."""
    if tail in ("short", "rows"):
        return lane_rows
    whole = count * batch_size if tail == "drop" else rows // num_lanes
    return np.minimum(lane_rows, whole)


def rows_before(
    limit: Int64Array, count: int, batch_size: int, turns: Int64Array, *, extra: Int64Array | None = None
) -> Int64Array:
    """Return how many rows a lane gives in its first ``turns`` of ``count`` micro-batches.

    ``limit`` (rows that the lane gives) and ``turns`` are int64 of one shape; ``extra``, of the same, says how many of
    the rows are the last micro-batch's alone (0 or 1; None: the last two micro-batches share what remains).

    >>> one = lambda n: np.array([n])
    >>> [int(rows_before(one(11), 3, 5, one(turn))[0]) for turn in range(4)]
    [0, 5, 8, 11]
    >>> [int(rows_before(one(11), 3, 5, one(turn), extra=one(1))[0]) for turn in range(4)]
    [0, 5, 10, 11]
    """
    if extra is not None:
        return np.where(turns >= count, limit, rows_before(limit - extra, count - 1, batch_size, turns))
    full = np.minimum(turns, max(count - 2, 0)) * batch_size
    shared = limit - max(count - 2, 0) * batch_size
    middle = full + (shared + 1) // 2 if count >= 2 else full
    return np.where(turns >= count, limit, np.where(turns == count - 1, middle, full))
