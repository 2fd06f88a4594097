"""How much of the texts of a page is repeated from the texts before them?  Told without making any of the texts.

In Parquet's DELTA_BYTE_ARRAY a value begins as the one before it does, for as many bytes as a list of numbers at the
start of the page's values says (DELTA_BINARY_PACKED, of 32 bits). `repeated_bytes` adds those up. What it cannot read
raises ``ValueError``; it takes some 100 bytes of memory for each value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["repeated_bytes"]

_MOST_BITS = 32
_LONGEST_PART = 8192
"""So many numbers of one width are unpacked at a time; writers have 32 or 64 of them."""


def repeated_bytes(values: memoryview, most: int) -> int:
    """The sum of the lengths of the prefixes of a page, whose ``values`` are at most ``most`` texts.

    Three texts that share 0, 4 and 6 bytes with the one before, as steps of 2 + 2 and 2 + 0 bytes in 3 bits each:

    >>> repeated_bytes(memoryview(bytes([128, 1, 4, 3, 0, 4, 3, 0, 0, 0, 0b010, *bytes(11)])), 3)
    10
    """
    per_block, at = _varint(values, 0)
    parts, at = _varint(values, at)
    count, at = _varint(values, at)
    first, at = _zigzag(values, at)
    if not count:
        return 0
    if count > most or not 0 < parts <= per_block or per_block % parts or per_block // parts % 8:
        raise ValueError(f"{count} of {most} lengths of prefixes, in blocks of {per_block} in {parts} parts")
    length = per_block // parts
    if length > _LONGEST_PART:  # all numbers of a part take memory, however few of them there are
        raise ValueError(f"lengths of prefixes in parts of {length}")
    needed = -(-(count - 1) // length)
    if needed > most:
        raise ValueError(f"{count} lengths of prefixes take {needed} parts")
    bits, places, least = (np.zeros(needed, np.int64) for _ in range(3))
    done = 0
    while done < needed:
        smallest, at = _zigzag(values, at)
        widths = values[at : at + parts]
        at += parts
        for width in widths[: needed - done]:
            bits[done], places[done], least[done] = width, at, smallest
            at += length * width // 8
            done += 1
        if at > len(values) or len(widths) < parts:
            raise ValueError("the lengths of its prefixes are cut off")
    steps = _unpacked(values, bits, places, length)
    steps += least[:, None]
    lengths = np.concatenate([np.array([first]), steps.reshape(-1)[: count - 1]]).cumsum().astype(np.int32)
    if lengths.min() < 0:
        raise ValueError("a prefix has less than no bytes")
    return int(lengths.sum(dtype=np.int64))


def _unpacked(
    values: memoryview, bits: npt.NDArray[np.int64], places: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.int64]:
    """The numbers of each part, int64 [parts, length]: part i lies at ``places[i]``, in ``bits[i]`` bits a number."""
    content = np.frombuffer(values, np.uint8)
    found = np.zeros((len(bits), length), np.int64)
    for width in np.unique(bits[bits > 0]).tolist():
        if width > _MOST_BITS:
            raise ValueError(f"numbers of {width} bits, as lengths")
        mine = np.flatnonzero(bits == width)
        stored = content[places[mine, None] + np.arange(length * width // 8)]
        single = np.zeros((len(mine) * length, _MOST_BITS), np.uint8)
        single[:, :width] = np.unpackbits(stored, axis=1, bitorder="little").reshape(-1, width)
        found[mine] = np.packbits(single, axis=1, bitorder="little").view("<u4").reshape(len(mine), length)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("the lengths of its prefixes are cut off")
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return number, at
    raise ValueError("a number of more than 64 bits")


def _zigzag(data: memoryview, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    number = (number >> 1) ^ -(number & 1)
    if not -(2**62) < number < 2**62:
        raise ValueError(f"{number} as the length of a prefix")
    return number, at
