"""How is a numpy dtype named in bytes, such that reading the name builds nothing else?

A plain dtype is its array-protocol string (``"<f8"``, ``"|b1"``, ``"<M8[ns]"``). A subarray is ``["sub", base,
[dims]]``; a structured one ``["rec", itemsize, aligned, [[name, dtype, offset], ...]]``. What does not come back as
the same dtype (objects, numpy's variable-length strings, dtypes of other packages, titles, metadata) has no name; nor
have long doubles, whose bytes differ between machines.
Names are parsed by a strict pattern, never by handing free text to ``np.dtype``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from lakeckpt.errors import UnsupportedValue, WireDamaged
from lakeckpt.wire.values import MOST_DIMS

__all__ = ["DtypeSpec", "bytes_of", "dtype_from", "spec_of", "values_are_valid"]

DtypeSpec = str | list[Any]

_PLAIN = re.compile(
    r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SUV](0|[1-9][0-9]{0,8})|[mM]8(\[[0-9]{0,9}[A-Za-z]{1,7}\])?)", re.ASCII
)
_MOST_NESTED = 8
_MOST_FIELDS = 4096


def spec_of(dtype: np.dtype[Any]) -> DtypeSpec | None:
    """The name of ``dtype``, or None where it has none."""
    spec = _spec(dtype)
    if spec is None:
        return None
    try:
        same = dtype_from(spec)
    except (UnsupportedValue, WireDamaged):
        return None
    return spec if same == dtype and type(same) is type(dtype) and same.byteorder == dtype.byteorder else None


def _spec(dtype: np.dtype[Any]) -> DtypeSpec | None:
    if dtype.metadata is not None or dtype.hasobject:
        return None
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = _spec(base)
        return None if inner is None else ["sub", inner, list(shape)]
    if dtype.names is None:
        return dtype.str
    if len(dtype.names) > _MOST_FIELDS:
        return None
    assert dtype.fields is not None
    fields: list[Any] = []
    for name in dtype.names:
        inner_dtype, offset, *title = dtype.fields[name]
        inner = _spec(inner_dtype)
        if inner is None or title:
            return None
        fields.append([name, inner, offset])
    return ["rec", dtype.itemsize, dtype.isalignedstruct, fields]


def dtype_from(spec: object, nested: int = _MOST_NESTED) -> np.dtype[Any]:
    """The dtype that ``spec`` names. Raises `WireDamaged` for what is no name, `UnsupportedValue` for one unknown.

    ``nested`` is how many dtypes may still lie inside this one.
    """
    if nested < 0:
        raise WireDamaged("a numpy dtype nested deeper than we write")
    if type(spec) is str and _PLAIN.fullmatch(spec):
        return _plain(spec)
    match spec:
        case ["sub", base, [*dims]] if len(dims) <= MOST_DIMS and all(_is_size(n) for n in dims):
            return _build((dtype_from(base, nested - 1), tuple(dims)))
        case ["rec", int(size_bytes), bool(aligned), [*fields]] if _is_size(size_bytes) and len(fields) <= _MOST_FIELDS:
            return _record(size_bytes, aligned, fields, nested - 1)
    raise WireDamaged(f"not the name of a numpy dtype: {ascii(spec)[:60]}")


def _record(size_bytes: int, aligned: bool, fields: list[Any], nested: int) -> np.dtype[Any]:
    names, formats, offsets = [], [], []
    for field in fields:
        match field:
            case [str(name), inner, int(offset)] if _is_size(offset):
                names.append(name)
                formats.append(dtype_from(inner, nested))
                offsets.append(offset)
            case _:
                raise WireDamaged(f"not a field of a numpy dtype: {ascii(field)[:60]}")
    parts = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size_bytes}
    return _build(parts, align=aligned)


@lru_cache(maxsize=256)
def _plain(name: str) -> np.dtype[Any]:
    """Looked up once: numpy takes longer to know a name than we to read the value that has it."""
    return _build(name)


def _build(what: Any, align: bool = False) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(what, align=align)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise UnsupportedValue(f"this numpy knows no dtype {ascii(what)[:60]}: {error}") from None
    return dtype


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def values_are_valid(array: np.ndarray[Any, Any]) -> bool:
    """Whether the bytes of ``array`` are values of its dtype: bools are 0 or 1, characters are Unicode."""
    dtype = array.dtype
    if dtype.names is not None:
        return all(values_are_valid(array[name]) for name in dtype.names)
    if not array.size or not dtype.itemsize or dtype.kind not in "bU":
        return True
    if dtype.kind == "b":
        return bool(np.ascontiguousarray(array).view(np.uint8).max() <= 1)
    codes = np.frombuffer(
        np.ascontiguousarray(array).tobytes(), dtype=np.dtype(np.uint32).newbyteorder(dtype.byteorder)
    )
    return bool(codes.max() <= 0x10FFFF)


def bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    """The values of ``array`` in C order; the gaps between a record's fields are zero, whatever memory held there."""
    if array.dtype.names is None:
        return array.tobytes(order="C")
    clean = np.zeros(array.shape, array.dtype)
    _copy_fields(clean, array)
    return clean.tobytes(order="C")


def _copy_fields(into: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> None:
    for name in array.dtype.names or ():
        if array.dtype[name].base.names is None:
            into[name] = array[name]
        else:
            _copy_fields(into[name], array[name])
