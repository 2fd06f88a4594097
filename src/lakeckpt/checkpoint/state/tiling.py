"""This module checks that the parts of a tensor tile it: every element is in one of them, none in two.

It sweeps over the parts along the dimension in which they begin at most places, so that only parts that are open at
once are compared: for parts by rows, by columns or in a grid, few. Imports without torch.
"""

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
    overlap = _overlap([one for one in every if prod(one[1])])
    if overlap is not None:
        return overlap
    held = sum(prod(sizes) for _, sizes in every)
    return None if held == prod(shape) else f"its parts have {held} of {prod(shape)} elements"


def _overlap(boxes: list[Box]) -> str | None:
    dims = range(len(boxes[0][0])) if boxes else range(0)
    along = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}), default=None)
    if along is None:  # of numbers without dimensions there is one place
        return "parts at () and () overlap" if len(boxes) > 1 else None
    still_open: list[Box] = []
    for offsets, sizes in sorted(boxes, key=lambda box: (box[0][along], box)):
        still_open = [(at, size) for at, size in still_open if at[along] + size[along] > offsets[along]]
        for others, extents in still_open:
            if all(a < b + y and b < a + x for a, x, b, y in zip(offsets, sizes, others, extents, strict=True)):
                return f"parts at {others} and {offsets} overlap"
        still_open.append((offsets, sizes))
    return None
