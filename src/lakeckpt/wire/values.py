"""This module packs trees of values into msgpack and unpacks them again, with every type exactly as it was.

msgpack itself has None, bool, int, float, str, bytes, list and dict (with any keys). The closed list of other types
goes into msgpack extensions (`Tag`): tuples, integers beyond 64 bits, complex numbers, numpy scalars, arrays and
dtypes, and `TensorRef`. An ``OrderedDict`` comes back as a dict. Any other type is refused with the path to it. Exact
types decide, because a subclass carries meaning that would be lost. Nothing is ever pickled, and no byte that is read
can name code.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from lakeckpt.errors import UnsupportedValue, WireDamaged

__all__ = ["Payload", "Tag", "TensorRef", "join_payloads", "pack", "unpack"]

_COMPLEX = struct.Struct(">dd")
_AS_IS = (type(None), bool, float, bytes)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ADVICE = "turn it into None, bool, int, float, complex, str, bytes, list, tuple, dict, numpy values or tensors"


class Tag(IntEnum):
    """The msgpack extension codes. Contents are described in ``docs/reference/formats.md``."""

    TUPLE = 1
    BIG_INT = 2
    COMPLEX = 3
    NUMPY_SCALAR = 4
    NUMPY_ARRAY = 5
    NUMPY_DTYPE = 6
    TENSOR_REF = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A leaf that stands for a tensor stored elsewhere under ``key``.

    ``dim_order`` is the order of its dimensions in memory, from the outermost to the innermost, if that is not their
    own order (channels last: 0, 2, 3, 1). A fused optimizer steps through the memory of a parameter and its moments
    side by side, and needs both in one order.
    """

    key: str
    dim_order: tuple[int, ...] | None = None


class Payload(bytes):
    """The msgpack of one value."""


class _Refused(Exception):
    """A value that cannot be packed: why, and the steps that lead to it, the innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[object] = []


def pack(value: object, *, root: str = "") -> Payload:
    """Return the msgpack of ``value``. Equal values, with dicts in equal order, give equal bytes.

    ``root`` is what the paths in messages begin with. Raises `UnsupportedValue` naming the path of a value outside the
    closed list of types, or of containers that lie too deep or are too large for msgpack.
    """
    try:
        return Payload(_packed(_plain(value)))
    except _Refused as refused:
        raise UnsupportedValue(f"{_path(root, refused.steps)}: {refused.reason}") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise UnsupportedValue(
            f"{root or 'the value'} is nested too deep, or holds a value too large, for a document: {error}. See if it "
            "holds itself, and put long runs of numbers into tensors"
        ) from None


def join_payloads(payloads: Mapping[str, Payload]) -> Payload:
    """Return the msgpack of a dict whose values are packed already."""
    parts = [msgpack.Packer().pack_map_header(len(payloads))]
    for key, payload in payloads.items():
        parts += (_packed(key), payload)
    return Payload(b"".join(parts))


def unpack(payload: bytes | memoryview, *, what: str) -> Any:
    """Return the value that `pack` packed into ``payload``. Arrays are writable and share nothing with it.

    Raises `WireDamaged` if ``payload`` is no msgpack of ours, and `UnsupportedValue` for an extension that this
    version does not know; ``what`` names the document in both.
    """
    try:
        return _unpacked(payload)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{what}: {error}") from None
    except (ValueError, TypeError, struct.error, msgpack.UnpackException, RecursionError) as error:
        raise WireDamaged(f"{what}: its payload cannot be read: {error!r:.200}") from error


def _packed(plain: object) -> bytes:
    packed: bytes = msgpack.packb(plain, use_bin_type=True, strict_types=True)
    return packed


def _unpacked(data: bytes | memoryview) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=_from_extension)


def _path(root: str, steps: list[object]) -> str:
    named = (f".{step}" if type(step) is str and _NAME.fullmatch(step) else f"[{step!a:.60}]" for step in steps)
    return (root + "".join(reversed(list(named)))).lstrip(".") or "the value"


def _plain(value: Any) -> object:
    """Return ``value`` as msgpack packs it."""
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is str:
        return _text(value)
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _big_int(value)
    if kind is dict or kind is OrderedDict:
        return {_key(key): _inside(key, item) for key, item in value.items()}
    if kind is list:
        return [_inside(at, item) for at, item in enumerate(value)]
    return _extension(value, kind)


def _inside(step: object, item: Any) -> object:
    try:
        return _plain(item)
    except _Refused as refused:
        refused.steps.append(step)
        raise


def _key(key: Any) -> object:
    try:
        return _plain(key)
    except _Refused as refused:
        raise _Refused(f"the key {key!a:.60}: {refused.reason}") from None


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused(f"{value!a:.60} is not valid Unicode (it holds a lone surrogate)") from None
    return value


def _extension(value: Any, kind: type[Any]) -> object:
    if kind is tuple:
        return _tagged(Tag.TUPLE, [_inside(at, item) for at, item in enumerate(value)])
    if kind is TensorRef:
        return _tagged(Tag.TENSOR_REF, [_text(value.key), *(value.dim_order or ())])
    if kind is np.ndarray and value.itemsize:
        return _tagged(Tag.NUMPY_ARRAY, [_description(value.dtype), list(value.shape), value.tobytes()])
    if kind is complex:
        return msgpack.ExtType(Tag.COMPLEX, _COMPLEX.pack(value.real, value.imag))
    if issubclass(kind, np.generic):
        return _scalar(value)
    if isinstance(value, np.dtype):
        return _tagged(Tag.NUMPY_DTYPE, _description(value))
    raise _Refused(f"{kind!r} cannot be written: {_ADVICE}")


def _tagged(tag: Tag, plain: object) -> object:
    return msgpack.ExtType(tag, _packed(plain))


def _big_int(value: int) -> object:
    size_bytes = value.bit_length() // 8 + 1
    return msgpack.ExtType(Tag.BIG_INT, value.to_bytes(size_bytes, "big", signed=True))


def _scalar(value: np.generic) -> object:
    array = np.asarray(value)
    back: Any = array[()]
    if type(back) is not type(value) or value.dtype.kind == "V" or (value.dtype.kind in "SU" and back != value):
        raise _Refused(f"{type(value)!r} cannot be written: put it into an array, or {_ADVICE}")
    return _tagged(Tag.NUMPY_SCALAR, [_description(value.dtype), [], array.tobytes()])


def _description(dtype: np.dtype[Any]) -> object:
    """Return numpy's own description of ``dtype``; refuse a dtype that does not come back from it as it was."""
    try:
        if not dtype.hasobject and dtype.metadata is None:
            described = dtype_to_descr(dtype)
            if descr_to_dtype(described) == dtype:
                return _plain(described)
    except (ValueError, TypeError):
        pass
    raise _Refused(f"the numpy dtype {dtype!r} cannot be written: {_ADVICE}")


def _array(described: Any, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    dtype = descr_to_dtype(described)
    if dtype.hasobject:
        raise ValueError(f"an array of Python objects ({dtype})")
    return np.ndarray(shape, dtype, buffer=bytearray(data))


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


_READERS: dict[int, Callable[[bytes], Any]] = {
    Tag.TUPLE: lambda data: tuple(_unpacked(data)),
    Tag.BIG_INT: _number,
    Tag.COMPLEX: lambda data: complex(*_COMPLEX.unpack(data)),
    Tag.NUMPY_SCALAR: lambda data: _array(*_unpacked(data))[()],
    Tag.NUMPY_ARRAY: lambda data: _array(*_unpacked(data)),
    Tag.NUMPY_DTYPE: lambda data: descr_to_dtype(_unpacked(data)),
    Tag.TENSOR_REF: lambda data: _tensor_ref(*_unpacked(data)),
}


def _tensor_ref(key: str, *dim_order: int) -> TensorRef:
    return TensorRef(key=key, dim_order=dim_order or None)


def _from_extension(code: int, data: bytes) -> Any:
    read = _READERS.get(code)
    if read is None:
        raise UnsupportedValue(
            f"the extension type {code} is unknown: another program, or a newer lakeckpt, wrote this document"
        )
    return read(data)
