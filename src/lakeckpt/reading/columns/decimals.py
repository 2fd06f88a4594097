"""This module converts Arrow decimals to float64, each to the nearest one, ties to even.

A decimal is an integer ``N`` over a power of ten. If both are exact in float64 (15 digits always are, and scales of 0
to 22), one division rounds once. Longer ones are divided with twice the precision of float64, which leaves open how to
round only if the quotient is very close to the middle between two floats. Arrow then parses the decimal's text.

The module does no I/O, and runs no Python per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.reading.columns.forms import view

__all__ = ["nearest"]

Array = npt.NDArray[Any]
_EXACT = 1 << 53
"""Integers up to this one are exact in float64."""
_UNSURE = 2.0**-98
"""More than the relative error of the division with twice the precision."""
_SPLIT = float((1 << 27) + 1)


def nearest(array: pa.Array) -> Array:
    """Return the float64 that is nearest to each value of an array of decimals. Values at nulls are arbitrary."""
    kind = array.type
    word = np.int32 if kind.byte_width == 4 else np.int64
    count = kind.byte_width // np.dtype(word).itemsize
    raw = view(array.buffers()[1], word, array.offset * count, (array.offset + len(array)) * count).reshape(-1, count)
    low, is_divisible = raw[:, 0], 0 <= kind.scale <= 22
    found: Array = low / float(10 ** (kind.scale if is_divisible else 0))
    is_long = np.full(len(raw), not is_divisible)
    for more in raw.T[1:]:
        is_long |= more != low >> 63
    if kind.precision > 15:
        is_long |= (low + _EXACT).view(np.uint64) > 2 * _EXACT
    rows = np.flatnonzero(is_long)
    if len(rows):
        long = raw[rows].astype(np.int64, copy=False)
        found[rows], is_sure = _divided(long, kind.scale)
        rows = rows[~is_sure]
        found[rows] = pc.cast(pc.cast(array.take(pa.array(rows)), pa.string()), pa.float64()).to_numpy(
            zero_copy_only=False
        )
    return found


def _divided(words: Array, scale: int) -> tuple[Array, Array]:
    """Return the quotients of integers of ``words`` (least first, int64) and 10**scale, and which are surely right.

    The product and the sums are those of T. J. Dekker, "A floating-point technique for extending the available
    precision" (1971), and of Knuth.
    """
    low, high = words[:, 0], words[:, 1] if words.shape[1] > 1 else words[:, 0] >> 63
    is_sure = np.full(len(words), scale >= 0)
    for more in words.T[2:]:
        is_sure &= more == high >> 63
    number, rest = (high >> 32) * 2.0**96, np.zeros(len(words))
    for limb, weight in ((high, 2.0**64), (low >> 32, 2.0**32), (low, 1.0)):
        number, error = _sum(number, (limb & 0xFFFFFFFF) * weight)
        rest += error
    number, rest = _sum(number, rest)
    power = 10 ** max(scale, 0)
    divisor = float(power)
    quotient = number / divisor
    product, error = _product(quotient, divisor)
    more = (((number - product) - error) + rest - quotient * float(power - int(divisor))) / divisor
    unsure = np.abs(quotient) * _UNSURE
    return quotient + more, is_sure & (quotient + (more - unsure) == quotient + (more + unsure))


def _sum(one: Array, other: Array) -> tuple[Array, Array]:
    """Return the rounded sum, and what rounding lost."""
    found = one + other
    part = found - one
    return found, (one - (found - part)) + (other - part)


def _product(one: Array, other: float) -> tuple[Array, Array]:
    """Return the rounded product, and what rounding lost."""
    found = one * other
    (a, b), (c, d) = _halves(one), _halves(other)
    return found, ((a * c - found) + a * d + b * c) + b * d


def _halves(one: Any) -> tuple[Any, Any]:
    """Return two numbers of half the digits, which add up to ``one``."""
    wide = _SPLIT * one
    high = wide - (wide - one)
    return high, one - high
