"""What does a structure of Parquet's metadata say?  A reader of thrift's compact protocol, for looking before decoding.

pyarrow tells neither what the headers of pages say nor whether a column is encrypted (it ends the process where one
is), so both are read here. Structures come as dicts of field number to value; nothing is interpreted. What is cut,
nested too deeply or of no known type raises ``ValueError``; nothing is allocated beyond the bytes given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["LIST", "SET", "STRUCT", "Wanted", "list_header", "read_struct", "read_value", "skip_value"]

_DEPTH = 16
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, LIST, SET, _MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_SKIPPED_QUICKLY = (*_INTEGERS, _BINARY, STRUCT)
_NOTHING: Mapping[int, Any] = {}
Wanted = Mapping[int, Any] | Callable[[memoryview, int, int, int], tuple[Any, int]] | None


def read_struct(
    data: memoryview, at: int, depth: int = 0, wanted: Mapping[int, Any] | None = None
) -> tuple[dict[int, Any], int]:
    """Return the structure that begins at ``at``, and where it ends. Binaries are bytes, lists and sets lists.

    ``wanted`` names the fields to keep (None: all), each with what is wanted of the structures in it, or with what
    reads it: called with the bytes, where its value begins, its type and its depth, it returns the value and where that
    ends. Others are skipped, which is faster.

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
                at = skip_value(data, at, kind, depth)
            elif kind in (_TRUE, _FALSE):
                found[number] = kind == _TRUE
            else:
                found[number], at = read_value(data, at, kind, depth, None if wanted is None else wanted[number])
    except IndexError:
        raise ValueError("it is cut off") from None


def skip_value(data: memoryview, at: int, kind: int, depth: int) -> int:
    """Where the value of a field ends."""
    if kind in (_TRUE, _FALSE):
        return at
    if kind in _INTEGERS:
        while data[at] >= 0x80:
            at += 1
        return at + 1
    if kind == STRUCT:
        return _skipped_struct(data, at, depth + 1)
    if kind == _BINARY:
        return _skipped_binary(data, at)
    if kind in (LIST, SET) and data[at] & 0x0F in _SKIPPED_QUICKLY:
        return _skipped_list(data, at, depth)
    return read_value(data, at, kind, depth, _NOTHING)[1]


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
            at = skip_value(data, at, kind, depth)


def _skipped_list(data: memoryview, at: int, depth: int) -> int:
    size, kind, at = list_header(data, at, depth)
    for _ in range(size):
        at = skip_value(data, at, kind, depth + 1)
    return at


def _skipped_binary(data: memoryview, at: int) -> int:
    size, at = _varint(data, at)
    if size > len(data) - at:
        raise ValueError(f"a text of {size} bytes where {len(data) - at} are left")
    return at + size


def read_value(data: memoryview, at: int, kind: int, depth: int, wanted: Wanted = None) -> tuple[Any, int]:
    """The value of the type ``kind`` that begins at ``at``, and where it ends; ``wanted`` as for `read_struct`."""
    if callable(wanted):
        return wanted(data, at, kind, depth)
    if kind in _INTEGERS:
        return _zigzag(data, at)
    if kind == STRUCT:
        return read_struct(data, at, depth + 1, wanted)
    if kind == _BINARY:
        size, at = _varint(data, at)
        if size > len(data) - at:
            raise ValueError(f"a text of {size} bytes where {len(data) - at} are left")
        return bytes(data[at : at + size]), at + size
    if kind in (LIST, SET):
        return _list(data, at, depth, wanted)
    if kind == _MAP:
        return _map(data, at, depth)
    if kind in (_TRUE, _FALSE, _BYTE):
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    raise ValueError(f"there is no type {kind}")


def list_header(data: memoryview, at: int, depth: int) -> tuple[int, int, int]:
    """How many items the list or set that begins at ``at`` has, of which type, and where the first begins."""
    header = data[at]
    size, at = (header >> 4, at + 1) if header >> 4 < 15 else _varint(data, at + 1)
    if depth >= _DEPTH or size > len(data) - at:
        raise ValueError(f"a list of {size} at depth {depth}, where {len(data) - at} bytes are left")
    return size, header & 0x0F, at


def _list(data: memoryview, at: int, depth: int, wanted: Mapping[int, Any] | None) -> tuple[list[Any], int]:
    size, kind, at = list_header(data, at, depth)
    found = []
    for _ in range(size):
        value, at = read_value(data, at, kind, depth + 1, wanted)
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
                _, at = read_value(data, at, kind, depth + 1)
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
