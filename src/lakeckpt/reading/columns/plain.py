"""This module says where in memory rows [start, stop) of a window lie, for windows whose columns are plain arrays.

Most windows are arrays of fixed width and nothing else. A reader that only copies their rows needs the address and the
length of each, which costs a hundredth of what an array over them costs. The module copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PlainRows"]

Array: TypeAlias = npt.NDArray[Any]


class PlainRows:
    """The rows of ``columns``, each of them one run of memory, of numbers of the machine's own byte order.

    ``begins``: the address and the bytes of a row of each column; valid as long as this object is.
    """

    __slots__ = ("__weakref__", "begins", "columns")

    def __init__(self, columns: dict[str, Array]) -> None:
        self.columns = columns
        self.begins = [
            (column.__array_interface__["data"][0], column.itemsize * int(np.prod(column.shape[1:])))
            for column in columns.values()
        ]

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> PlainRows | None:
        """Those of a window; None where not all of its columns are plain."""
        plain = {name: column for name, column in columns.items() if type(column) is np.ndarray}
        is_plain = all(one.dtype.kind in "biufc" and one.dtype.isnative for one in plain.values())
        is_plain = is_plain and all(one.flags.c_contiguous and one.size for one in plain.values())
        return cls(plain) if is_plain and len(plain) == len(columns) else None

    def leaves(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the address and the size in bytes of rows [start, stop) of each column."""
        rows = stop - start
        return [(address + start * width, rows * width) for address, width in self.begins]
