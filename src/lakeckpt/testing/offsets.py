"""At how many offsets of an epoch is a job restored, and at which?

The caller says; else the environment variable that the pytest plugin sets; else a dozen, the first and the last among
them.
"""

from __future__ import annotations

import os
from typing import Literal

__all__ = ["DEFAULT_OFFSETS", "VARIABLE", "Offsets", "chosen", "wanted"]

Offsets = int | Literal["all"]

VARIABLE = "LAKECKPT_TEST_OFFSETS"
DEFAULT_OFFSETS = 12


def wanted(offsets: Offsets | None) -> Offsets:
    """Return ``offsets``, or what this run wants where it is None."""
    if offsets is not None:
        return offsets
    told = os.environ.get(VARIABLE, str(DEFAULT_OFFSETS))
    return "all" if told == "all" else int(told)


def chosen(offsets: Offsets, count: int) -> list[int]:
    """Return which of the offsets 0 … ``count`` - 1 to restore at: evenly spread, the first and the last among them.

    >>> chosen(3, 11), chosen("all", 3), chosen(1, 9)
    ([0, 5, 10], [0, 1, 2], [4])
    """
    if offsets == "all" or count <= offsets:
        return list(range(count))
    if offsets < 2:
        return [count // 2][:offsets]
    return sorted({round(i * (count - 1) / (offsets - 1)) for i in range(offsets)})
