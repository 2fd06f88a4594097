"""What are the numbers of a column chunk in a footer, and where do they end?  Told by regular expressions, fast as C.

A wide table's footers are megabytes, and a walk over them in Python takes longer than decoding. Most of what writers
write of a column chunk is regular: fields in ascending order, short texts, short lists. `SKIPPED` matches exactly such
structures, `TAKEN` those whose numbers also stand in the usual order, and tells them. Whatever they do not match (long
texts, fields out of order, types that are not there) is left to ``thrift``, which reads anything; where they match,
both agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["NOT_SAID", "numbers_of", "skipped", "taken"]

NOT_SAID = b"\x01"
"""-1, as thrift writes it."""
_BOOLEANS, _INTEGERS, _BINARY, _LIST, _STRUCT = (1, 2), (4, 5, 6), (8,), (9,), (12,)
_MOST_TEXT, _MOST_TEXTS, _MOST_ITEMS = 63, 4, 8
_VARINT = rb"[\x80-\xff]{0,9}+[\x00-\x7f]"
_TOLD = rb"([\x80-\xff]{0,7}+[\x00-\x7f])"


def _header(kinds: Iterable[int], deltas: Iterable[int] = range(1, 16)) -> bytes:
    """The header of a field of one of ``kinds``, so much beyond the number of the field before it."""
    return b"[%s]" % b"".join(re.escape(bytes([delta << 4 | kind])) for delta in deltas for kind in kinds)


def _any_of(*patterns: bytes) -> bytes:
    return b"(?:%s)" % b"|".join(patterns)


def _items(kinds: Iterable[int], item: bytes, most: int) -> list[bytes]:
    """Lists of up to ``most`` items, from their own header on."""
    headers = [b"[%s]" % b"".join(re.escape(bytes([size << 4 | kind])) for kind in kinds) for size in range(most + 1)]
    return [b"%s(?:%s){%d}" % (header, item, size) for size, header in enumerate(headers)]


_TEXT = _any_of(*(re.escape(bytes([size])) + b".{%d}" % size for size in range(_MOST_TEXT + 1)))
_NUMBER = _header(_INTEGERS) + _VARINT
_PLAIN = (_NUMBER, _header(_BOOLEANS), _header(_BINARY) + _TEXT)
_NUMBERS = _any_of(*_items(_INTEGERS, _VARINT, _MOST_ITEMS))
_TEXTS = _any_of(*_items(_BINARY, _TEXT, _MOST_TEXTS))
_STRUCTS = _any_of(*_items(_STRUCT, b"(?:%s)*+\x00" % _NUMBER, _MOST_ITEMS))
_STATISTICS = _any_of(*_PLAIN, _header(_LIST) + _NUMBERS) + rb"*+\x00"
_METADATA = (*_PLAIN, _header(_LIST) + _any_of(_NUMBERS, _STRUCTS), _header(_STRUCT) + _STATISTICS)


@cache
def _skipping() -> re.Pattern[bytes]:
    metadata = _any_of(*_METADATA, _header(_LIST) + _TEXTS) + rb"*+\x00"
    return re.compile(_any_of(*_PLAIN, _header(_STRUCT) + metadata) + rb"*+\x00", re.DOTALL)


@cache
def _taking() -> re.Pattern[bytes]:
    """ColumnChunk: an offset, the metadata. ColumnMetaData: fields 1 to 7 and 9; 10 and 11, or none of the two."""
    next_, second, list_ = _header(_INTEGERS, [1]), _header(_INTEGERS, [2]), _header(_LIST, [1])
    before = second + _VARINT + _header(_STRUCT, [1])
    numbers = next_ + _TOLD + list_ + _NUMBERS + list_ + _TEXTS + (next_ + _TOLD) * 4 + second + _TOLD
    dictionary = b"(?:%s|%s(?:%s)?+)?+" % (second + _TOLD, next_ + _VARINT, next_ + _TOLD)
    after = _any_of(*_METADATA) + rb"*+\x00" + _any_of(*_PLAIN) + rb"*+\x00"
    return re.compile(before + numbers + dictionary + after, re.DOTALL)


def skipped(data: memoryview, at: int) -> int | None:
    """Where the column chunk that begins at ``at`` ends; None where it is not regular."""
    found = _skipping().match(data, at)
    return None if found is None else found.end()


def taken(data: memoryview, at: int) -> tuple[bytes, int] | None:
    """Seven numbers of the column chunk that begins at ``at``, for `numbers_of`, and where it ends; None as `skipped`.

    Type, codec, values, uncompressed and compressed bytes, data page, dictionary page: fields 1, 4 to 7, 9 and 11 of
    its metadata.
    """
    found = _taking().match(data, at)
    if found is None:
        return None
    *numbers, dictionary, other = found.groups(b"")
    return b"".join(numbers) + (dictionary or other or NOT_SAID), found.end()


def numbers_of(told: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """The numbers in joined bytes, each of at most eight: int64, shape (numbers,).

    >>> numbers_of([bytes([0x04, 0xD8, 0x04]), NOT_SAID]).tolist()
    [2, 300, -1]
    """
    raw = np.frombuffer(b"".join(told), np.uint8)
    ends = np.flatnonzero(raw < 0x80) + 1
    if not len(ends):
        return np.zeros(0, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    shifts = 7 * (np.arange(len(raw)) - np.repeat(starts, ends - starts))
    words = np.add.reduceat((raw & 0x7F).astype(np.int64) << shifts, starts)
    return (words >> 1) ^ -(words & 1)
