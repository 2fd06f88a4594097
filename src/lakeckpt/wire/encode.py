"""How does a tree of values become a msgpack payload?

One walk turns the tree into what msgpack packs natively, wrapping the rest into tagged extensions, and refuses what
is outside the closed list with the path to it. Exact types decide (``type(x) is``), never ``isinstance``: a subclass
carries meaning that would be lost. The one exception is ``OrderedDict``, whose order a dict keeps as well.
Never calls a method of a value that its type could have replaced.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from lakeckpt.errors import LimitExceeded, UnsupportedValue
from lakeckpt.wire.dtypes import DtypeSpec, bytes_of, spec_of
from lakeckpt.wire.keys import Keys
from lakeckpt.wire.values import INT_MAX, INT_MIN, NODE_BYTES, Limits, Tag, TensorRef

__all__ = ["Payload", "encode_payload", "join_payloads"]

_COMPLEX = struct.Struct(">dd")
_EXTENSION_BYTES = 2**32 - 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ADVICE = "turn it into None, bool, int, float, complex, str, bytes, list, tuple, dict, numpy values or tensors"


class Payload(bytes):
    """The msgpack of a value, and what it takes of the limits of the document that holds it."""

    items: int
    nodes: int


def encode_payload(value: object, *, limits: Limits, root: str = "") -> Payload:
    """The msgpack payload of ``value``. Raises `UnsupportedValue` and `LimitExceeded`, naming the path."""
    encoder = _Encoder(limits, root)
    try:
        payload = Payload(encoder.pack(encoder.plain(value, limits.depth)))
    except RecursionError:
        raise LimitExceeded(f"{encoder.where()}: nested too deep for what is left of the stack") from None
    payload.items, payload.nodes = limits.items - encoder.items_left, encoder.nodes
    if payload.nodes > limits.most_nodes(len(payload)):
        encoder.path = encoder.longest_path
        raise _too_many_nodes(encoder.where(), payload.nodes, len(payload), limits)
    return payload


def join_payloads(payloads: Mapping[str, Payload], *, limits: Limits, what: str) -> bytes:
    """The payload of a dict, of which each value is known. `LimitExceeded` where all of them together are too many."""
    packer = msgpack.Packer(use_bin_type=True, strict_types=True)
    parts = [packer.pack_map_header(len(payloads))]
    for key, payload in payloads.items():
        parts += (packer.pack(key), payload)
    joined = b"".join(parts)
    if 2 * len(payloads) + sum(one.items for one in payloads.values()) > limits.items:
        raise _too_many_items(what, limits)
    if (nodes := 1 + sum(one.nodes for one in payloads.values())) > limits.most_nodes(len(joined)):
        raise _too_many_nodes(what, nodes, len(joined), limits)
    return joined


def _too_many_items(where: str, limits: Limits) -> LimitExceeded:
    return LimitExceeded(
        f"{where}: more than {limits.items} items in one document: put long runs of numbers into a numpy array"
    )


def _too_many_nodes(where: str, nodes: int, size_bytes: int, limits: Limits) -> LimitExceeded:
    return LimitExceeded(
        f"{where}: the document that it is in would have {nodes} lists, dicts and extensions in {size_bytes} bytes: "
        f"{limits.nodes} may be, and one more for every {NODE_BYTES} bytes. Put long runs of small ones into a numpy "
        "array"
    )


class _Encoder:
    __slots__ = ("items_left", "keys", "limits", "longest", "longest_path", "nodes", "packer", "path", "root")

    def __init__(self, limits: Limits, root: str) -> None:
        self.limits = limits
        self.items_left = limits.items
        self.nodes = 0
        """How many lists, dicts and extensions there were."""
        self.longest = 0
        self.longest_path: list[object] = []
        """Which of them has the most items."""
        self.packer = msgpack.Packer(use_bin_type=True, strict_types=True)
        self.path: list[object] = []
        self.root = root
        self.keys = Keys(root or "the value")

    def pack(self, plain: object) -> bytes:
        packed = self.packer.pack(plain)
        assert isinstance(packed, bytes)
        return packed

    def where(self) -> str:
        parts = [self.root]
        for step in self.path:
            is_name = type(step) is str and _NAME.fullmatch(step)
            parts.append(f".{step}" if is_name else f"[{_short(step)}]")
        return "".join(parts).lstrip(".") or "the value"

    def plain(self, value: Any, depth: int) -> object:
        """``value`` as msgpack packs it. ``depth`` is how many more containers may open."""
        kind = type(value)
        if kind is str:
            return self._text(value)
        if value is None or kind is bool or kind is float or kind is bytes:
            return value
        if kind is int:
            return value if INT_MIN <= value <= INT_MAX else self._big_int(value)
        if kind is dict or kind is OrderedDict:
            return self._dict(value, depth - 1)
        if kind is list:
            return self._elements(value, depth - 1)
        if kind is tuple:
            return self._extension(Tag.TUPLE, *self._elements(value, depth - 1))
        return self._other(value, kind)

    def _other(self, value: Any, kind: type) -> object:
        self.nodes += 1
        if kind is TensorRef and value.dim_order is not None:
            return self._extension(Tag.TENSOR_DIM_ORDER, self._text(value.key), bytes(value.dim_order))
        if kind is TensorRef:
            return self._extension(Tag.TENSOR_REF, self._text(value.key))
        if kind is np.ndarray:
            return self._array(value)
        if kind is complex:
            return msgpack.ExtType(Tag.COMPLEX, _COMPLEX.pack(value.real, value.imag))
        if issubclass(kind, np.generic):
            return self._scalar(value)
        if isinstance(value, np.dtype):
            return self._extension(Tag.NUMPY_DTYPE, self._spec(value))
        raise UnsupportedValue(f"{self.where()}: {kind!r} cannot be written: {_ADVICE}")

    def _dict(self, value: dict[Any, Any], depth: int) -> object:
        self._open(2 * len(value), depth)
        if all(type(key) is str for key in value):
            return {self._key(key, depth): self._at(key, item, depth) for key, item in value.items()}
        flat: list[object] = []
        for key, item in value.items():
            flat += (self._key(self.keys.checked(key), depth), self._at(key, item, depth))
        return self._extension(Tag.PAIRS, *flat)

    def _key(self, key: object, depth: int) -> object:
        try:
            return self.plain(key, depth)
        except UnsupportedValue as error:
            raise UnsupportedValue(f"a key of the dict at {self.where()}: {error}") from None

    def _elements(self, values: list[Any] | tuple[Any, ...], depth: int) -> list[object]:
        self._open(len(values), depth)
        return [self._at(i, value, depth) for i, value in enumerate(values)]

    def _at(self, step: object, value: object, depth: int) -> object:
        self.path.append(step)
        plain = self.plain(value, depth)
        self.path.pop()
        return plain

    def _open(self, items: int, depth: int) -> None:
        if depth < 0:
            raise LimitExceeded(
                f"{self.where()}: more than {self.limits.depth} containers lie inside one another: "
                "flatten the value, or see whether it holds itself"
            )
        self.nodes += 1
        self.items_left -= items
        if self.items_left < 0:
            raise _too_many_items(self.where(), self.limits)
        if items > self.longest:
            self.longest, self.longest_path = items, [*self.path]

    def _extension(self, tag: Tag, *parts: object) -> object:
        data = b"".join([self.pack(part) for part in parts])
        if len(data) > _EXTENSION_BYTES:
            raise LimitExceeded(f"{self.where()}: {len(data)} bytes are more than msgpack can tag")
        return msgpack.ExtType(tag, data)

    def _text(self, value: str) -> str:
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise UnsupportedValue(
                    f"{self.where()}: {_short(value)} holds lone surrogates, which UTF-8 cannot carry"
                ) from None
        return value

    def _big_int(self, value: int) -> object:
        self.nodes += 1
        size_bytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
        return msgpack.ExtType(Tag.BIG_INT, value.to_bytes(size_bytes, "big", signed=True))

    def _scalar(self, value: np.generic) -> object:
        if type(value) is np.str_:
            return self._extension(Tag.NUMPY_SCALAR, "U", self._text(str(value)))
        if type(value) is np.bytes_:
            return self._extension(Tag.NUMPY_SCALAR, "S", bytes(value))
        spec = self._spec(value.dtype)
        if type(spec) is not str or np.dtype(spec).type is not type(value) or value.dtype.kind == "V":
            raise UnsupportedValue(
                f"{self.where()}: {type(value)!r} cannot be written: put it into an array, or {_ADVICE}"
            )
        return self._extension(Tag.NUMPY_SCALAR, spec, value.tobytes())

    def _array(self, value: np.ndarray[Any, Any]) -> object:
        spec = self._spec(value.dtype)
        if not value.dtype.itemsize:
            raise UnsupportedValue(f"{self.where()}: an array of {value.dtype!r}, whose items have no bytes")
        if value.nbytes > self.limits.total_bytes:
            raise LimitExceeded(
                f"{self.where()}: an array of {value.nbytes} bytes, more than the {self.limits.total_bytes} "
                "that a document may have: make it a tensor"
            )
        return self._extension(Tag.NUMPY_ARRAY, spec, list(value.shape), bytes_of(value))

    def _spec(self, dtype: np.dtype[Any]) -> DtypeSpec:
        spec = spec_of(dtype)
        if spec is None:
            raise UnsupportedValue(f"{self.where()}: the numpy dtype {dtype!r} cannot be written: {_ADVICE}")
        return spec


def _short(step: object) -> str:
    if isinstance(step, int | float | str | bytes | tuple):
        shown = ascii(step) if not isinstance(step, int) or INT_MIN <= step <= INT_MAX else "<big int>"
        return shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"<{type(step).__name__}>"
