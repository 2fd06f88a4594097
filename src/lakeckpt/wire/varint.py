"""How are intervals of positions, and other small numbers, written in few bytes?

Intervals are half-open, sorted and disjoint. Each is written as two unsigned LEB128 numbers: the gap since the stop of
the one before (the first: since 0), and the length. There is no count: the list ends with the bytes. Positions are
below 2**56, hence no number takes more than 8 bytes and no interval more than 16; usually it is four to eight.
The bytes of a list are unique: a longer spelling of a number is refused on reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged

__all__ = ["NUMBER_LIMIT", "POSITION_LIMIT", "pack_intervals", "pack_numbers", "unpack_intervals", "unpack_numbers"]

POSITION_LIMIT = 2**56
NUMBER_LIMIT = 2**63
_MOST_INTERVALS = 8_000_000


def pack_intervals(pairs: Iterable[tuple[int, int]]) -> bytes:
    """The bytes of sorted, disjoint, non-empty half-open intervals (they may touch): at most 16 bytes per interval.

    >>> pack_intervals([(0, 5), (7, 1000)]).hex(" ")
    '00 05 02 e1 07'

    Raises `UnsupportedValue` where they are not that, or reach beyond position 2**56.
    """
    out = bytearray()
    last = 0
    for start, stop in pairs:
        if not last <= start < stop <= POSITION_LIMIT:
            raise UnsupportedValue(
                f"[{start}, {stop}) after position {last}: intervals are sorted, disjoint, not empty, "
                f"and between 0 and {POSITION_LIMIT}"
            )
        _put(out, start - last)
        _put(out, stop - start)
        last = stop
    return bytes(out)


def unpack_intervals(data: bytes, *, most: int = _MOST_INTERVALS) -> list[tuple[int, int]]:
    """The intervals of ``data``, as they were packed.

    Raises `WireDamaged` for bytes that `pack_intervals` never writes, `LimitExceeded` for more than ``most`` intervals.
    """
    if len(data) > 16 * most:
        raise LimitExceeded(f"{len(data)} bytes of intervals are more than {most} intervals take")
    found: list[tuple[int, int]] = []
    at = last = 0
    while at < len(data):
        gap, at = _get(data, at)
        length, at = _get(data, at)
        start = last + gap
        last = start + length
        if not length or last > POSITION_LIMIT:
            raise WireDamaged(f"byte {at} of an interval list: [{start}, {last}) is empty or out of range")
        if len(found) == most:
            raise LimitExceeded(f"more than {most} intervals in one list")
        found.append((start, last))
    return found


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """The bytes of numbers from 0 to 2**63 - 1: one byte for each seven bits of each number.

    Raises `UnsupportedValue` for any other number.
    """
    out = bytearray()
    for number in numbers:
        if not 0 <= number < NUMBER_LIMIT:
            raise UnsupportedValue(f"{number} is not a number from 0 to {NUMBER_LIMIT - 1}")
        _put(out, number)
    return bytes(out)


def unpack_numbers(data: bytes) -> Iterator[int]:
    """The numbers of ``data``, one by one, as they were packed; `WireDamaged` where `pack_numbers` wrote none such."""
    at = 0
    while at < len(data):
        number, at = _get(data, at)
        yield number


def _put(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _get(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    for byte in data[at : at + 9]:
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if not byte and shift:
                raise WireDamaged(f"byte {at} of a list of numbers: a number is longer than it needs to be")
            return number, at
        shift += 7
    raise WireDamaged(f"byte {at} of a list of numbers: a number does not end")
