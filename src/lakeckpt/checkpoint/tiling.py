"""Do these parts make up the whole?  Every element of a shape in one of them, none in two. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

__all__ = ["Box", "untiled"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part, of as many dimensions as the whole."""


def untiled(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """What is wrong with the parts of a whole of ``shape``; None where they tile it.

    >>> untiled((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
    >>> untiled((4, 2), [((0, 0), (3, 2)), ((2, 0), (1, 2))])
    'parts at (0, 0) and (2, 0) overlap'
    >>> untiled((4, 2), [((0, 0), (3, 2))])
    'its parts have 6 of 8 elements'
    """
    every = list(boxes)
    for offsets, sizes in every:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a part at {offsets} of {sizes} has other dimensions than {shape}"
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a part at {offsets} of {sizes} is not inside of {shape}"
    ordered = sorted((offsets, sizes) for offsets, sizes in every if prod(sizes))
    for number, (offsets, sizes) in enumerate(ordered):
        # Sorted by offsets, only those that begin before this one ends along the first dimension can overlap it.
        for others, extents in ordered[number + 1 :]:
            if offsets and others[0] >= offsets[0] + sizes[0]:
                break
            if all(a < b + y and b < a + x for a, x, b, y in zip(offsets, sizes, others, extents, strict=True)):
                return f"parts at {offsets} and {others} overlap"
    held = sum(prod(sizes) for _, sizes in every)
    return None if held == prod(shape) else f"its parts have {held} of {prod(shape)} elements"
