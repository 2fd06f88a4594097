"""Which rows were lost, which came twice?  Counted exactly, from the ids of all rows that a job was given.

A job consumes some rows, saves, dies; another goes on from what was saved. What the first consumed before the save and
what the second consumed must together be every row once. Nothing is estimated, and an id that the table does not have
is an error of the measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Count", "count"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What became of the rows of one epoch."""

    rows: int
    """Rows of the table."""
    lost: int
    """Rows that nobody was given."""
    repeated: int
    """Deliveries beyond the first of each row: a row that came three times counts two."""

    @property
    def exact(self) -> bool:
        """Every row came once."""
        return not self.lost and not self.repeated


def count(rows: int, delivered: Iterable[Ids]) -> Count:
    """Count the ids in ``delivered`` (of all ranks, before and after) against the table's ids 0 … ``rows`` - 1.

    Raises ValueError for an id that is not the table's.
    """
    ids = np.concatenate([np.empty(0, np.int64), *delivered])
    if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
        raise ValueError(f"ids {ids.min()} … {ids.max()} were delivered of a table of {rows} rows: not this table's")
    times = np.bincount(ids, minlength=rows)
    lost = int(np.count_nonzero(times == 0))
    return Count(rows=rows, lost=lost, repeated=len(ids) - (rows - lost))
