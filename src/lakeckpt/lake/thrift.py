"""What does a structure of Parquet's metadata say?  A reader of thrift's compact protocol, for looking before decoding.

pyarrow tells neither what the headers of pages say nor whether a column is encrypted (it ends the process where one
is), so both are read here. Structures come as dicts of field number to value; nothing is interpreted. What is cut,
nested too deeply or of no known type raises ``ValueError``; nothing is allocated beyond the bytes given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["read_struct"]

_DEPTH = 16
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_SKIPPED_QUICKLY = (*_INTEGERS, _BINARY, _STRUCT)
_NOTHING: Mapping[int, Any] = {}


def read_struct(
    data: memoryview, at: int, depth: int = 0, wanted: Mapping[int, Any] | None = None
) -> tuple[dict[int, Any], int]:
    """Return the structure that begins at ``at``, and where it ends. Binaries are bytes, lists and sets lists.

    ``wanted`` names the fields to keep (None: all), each with what is wanted of the structures in it; others are
    skipped, which is faster.

    >>> read_struct(memoryview(bytes([0x15, 0x06, 0x11, 0x00])), 0)
    ({1: 3, 2: True}, 4)
    """
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    found: dict[int, Any] = {}
    number = 0
    try:
        while True:
            header = data[at]
            at += 1
            if header == 0:
                return found, at
            kind = header & 0x0F
            if header >> 4:
                number += header >> 4
            else:
                number, at = _zigzag(data, at)
            if wanted is not None and number not in wanted:
                at = _skipped(data, at, kind, depth)
            elif kind in (_TRUE, _FALSE):
                found[number] = kind == _TRUE
            else:
                found[number], at = _value(data, at, kind, depth, None if wanted is None else wanted[number])
    except IndexError:
        raise ValueError("it is cut off") from None


def _skipped(data: memoryview, at: int, kind: int, depth: int) -> int:
    """Where the value of a field ends."""
    if kind in (_TRUE, _FALSE):
        return at
    if kind in _INTEGERS:
        while data[at] >= 0x80:
            at += 1
        return at + 1
    if kind == _STRUCT:
        return _skipped_struct(data, at, depth + 1)
    if kind == _BINARY:
        return _skipped_binary(data, at)
    if kind in (_LIST, _SET) and data[at] & 0x0F in _SKIPPED_QUICKLY:
        return _skipped_list(data, at, depth)
    return _value(data, at, kind, depth, _NOTHING)[1]


def _skipped_struct(data: memoryview, at: int, depth: int) -> int:
    """As `read_struct`, where nothing is wanted: most of a footer is skipped, so this is most of the time it takes."""
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    while True:
        header = data[at]
        at += 1
        if not header:
            return at
        if header < 0x10:
            _, at = _varint(data, at)
        kind = header & 0x0F
        if kind in _INTEGERS:
            while data[at] >= 0x80:
                at += 1
            at += 1
        elif kind == _BINARY:
            at = _skipped_binary(data, at)
        elif kind > _FALSE or not kind:
            at = _skipped(data, at, kind, depth)


def _skipped_list(data: memoryview, at: int, depth: int) -> int:
    header = data[at]
    size, at = (header >> 4, at + 1) if header >> 4 < 15 else _varint(data, at + 1)
    if depth >= _DEPTH or size > len(data) - at:
        raise ValueError(f"a list of {size} at depth {depth}, where {len(data) - at} bytes are left")
    kind = header & 0x0F
    for _ in range(size):
        at = _skipped(data, at, kind, depth + 1)
    return at


def _skipped_binary(data: memoryview, at: int) -> int:
    size, at = _varint(data, at)
    if size > len(data) - at:
        raise ValueError(f"a text of {size} bytes where {len(data) - at} are left")
    return at + size


def _value(
    data: memoryview, at: int, kind: int, depth: int, wanted: Mapping[int, Any] | None = None
) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return _zigzag(data, at)
    if kind == _STRUCT:
        return read_struct(data, at, depth + 1, wanted)
    if kind == _BINARY:
        size, at = _varint(data, at)
        if size > len(data) - at:
            raise ValueError(f"a text of {size} bytes where {len(data) - at} are left")
        return bytes(data[at : at + size]), at + size
    if kind in (_LIST, _SET):
        return _list(data, at, depth, wanted)
    if kind == _MAP:
        return _map(data, at, depth)
    if kind in (_TRUE, _FALSE, _BYTE):
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    raise ValueError(f"there is no type {kind}")


def _list(data: memoryview, at: int, depth: int, wanted: Mapping[int, Any] | None) -> tuple[list[Any], int]:
    header = data[at]
    size, at = (header >> 4, at + 1) if header >> 4 < 15 else _varint(data, at + 1)
    if depth >= _DEPTH or size > len(data) - at:
        raise ValueError(f"a list of {size} at depth {depth}, where {len(data) - at} bytes are left")
    found = []
    for _ in range(size):
        value, at = _value(data, at, header & 0x0F, depth + 1, wanted)
        found.append(value)
    return found, at


def _map(data: memoryview, at: int, depth: int) -> tuple[None, int]:
    size, at = _varint(data, at)
    if depth >= _DEPTH or size > len(data) - at:
        raise ValueError(f"a map of {size} at depth {depth}, where {len(data) - at} bytes are left")
    if size:
        kinds, at = data[at], at + 1
        for _ in range(size):
            for kind in (kinds >> 4, kinds & 0x0F):
                _, at = _value(data, at, kind, depth + 1)
    return None, at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while shift < 70:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise ValueError("a number of more than 64 bits")


def _zigzag(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
