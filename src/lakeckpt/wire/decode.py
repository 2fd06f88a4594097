"""How does a msgpack payload become values again, when its bytes may have been crafted?

A decoder of our own reads the subset of msgpack that we write. It never trusts a declared length: a string, an array
of n items or an extension is refused before anything is made where the bytes left cannot hold it, so memory stays in
proportion to the document. Items, depth, and the lists, dicts and extensions, each of which takes longer than its bytes
show, are counted as they open; keys that were made to collide are refused. An extension is read in place, inside its
own bounds. Never builds anything but the closed list of types; never asks numpy to parse free text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged
from lakeckpt.wire.collector import collector_waits
from lakeckpt.wire.dtypes import dtype_from, values_are_valid
from lakeckpt.wire.keys import Keys
from lakeckpt.wire.values import INT_MAX, INT_MIN, MOST_DIMS, NODE_BYTES, Limits, Tag, TensorRef, is_dim_order

__all__ = ["decode_payload"]

_COMPLEX = struct.Struct(">dd")
_FLOAT = struct.Struct(">d")
_UINTS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_INTS = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BINS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_DESCRIPTION_DEPTH = 20
_DESCRIPTION_ITEMS = 32_768


def decode_payload(payload: memoryview, *, what: str, limits: Limits) -> Any:
    """The value of ``payload``, all of it. Raises `WireDamaged`, `UnsupportedValue` and `LimitExceeded`."""
    decoder = _Decoder(payload, what, limits)
    try:
        with collector_waits():
            value = decoder.value(limits.depth)
    except RecursionError:
        raise LimitExceeded(f"{what}: nested too deep for what is left of the stack") from None
    if decoder.at != len(payload):
        decoder.damaged(f"{len(payload) - decoder.at} bytes follow its value")
    return value


class _Decoder:
    __slots__ = ("at", "data", "end", "items_left", "keys", "limits", "nodes_left", "what")

    def __init__(self, data: memoryview, what: str, limits: Limits) -> None:
        self.data = data
        self.at = 0
        self.end = len(data)
        self.items_left = limits.items
        self.nodes_left = limits.most_nodes(len(data))
        self.limits = limits
        self.what = what
        self.keys = Keys(what)

    def damaged(self, found: str) -> NoReturn:
        raise WireDamaged(f"{self.what}, byte {self.at} of the payload: {found}")

    def value(self, depth: int) -> Any:
        """The next value. ``depth`` is how many more containers may open."""
        if self.at >= self.end:
            self.damaged("a value is missing")
        code = self.data[self.at]
        self.at += 1
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90:
            return self._map(code & 0x0F, depth - 1)
        if code < 0xA0:
            return self._array(code & 0x0F, depth - 1)
        if code < 0xC0:
            return self._text(code & 0x1F)
        return self._long(code, depth)

    def _long(self, code: int, depth: int) -> Any:
        if code in _TEXTS:
            return self._text(self._uint(_TEXTS[code]))
        if code in _UINTS:
            return self._uint(_UINTS[code])
        if code == 0xCB:
            return _FLOAT.unpack(self._take(8))[0]
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _INTS:
            return int.from_bytes(self._take(_INTS[code]), "big", signed=True)
        if code in _BINS:
            return bytes(self._take(self._uint(_BINS[code])))
        if code in _ARRAYS:
            return self._array(self._uint(_ARRAYS[code]), depth - 1)
        if code in _MAPS:
            return self._map(self._uint(_MAPS[code]), depth - 1)
        if code in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[code], depth - 1)
        if code in _EXTENSIONS:
            return self._extension(self._uint(_EXTENSIONS[code]), depth - 1)
        self.at -= 1
        self.damaged(f"the code 0x{code:02x}, which we never write")

    def _take(self, size_bytes: int) -> memoryview:
        stop = self.at + size_bytes
        if stop > self.end:
            self.damaged(f"{size_bytes} bytes are declared where {self.end - self.at} are left")
        taken = self.data[self.at : stop]
        self.at = stop
        return taken

    def _uint(self, size_bytes: int) -> int:
        return int.from_bytes(self._take(size_bytes), "big")

    def _text(self, size_bytes: int) -> str:
        try:
            return str(self._take(size_bytes), "utf-8")
        except UnicodeDecodeError:
            self.damaged("a string that is not UTF-8")

    def _open(self, items: int, depth: int) -> None:
        """A list or dict begins, of which so many items are known to come."""
        self.nodes_left -= 1
        if self.nodes_left < 0:
            self._too_many_nodes()
        if items > self.end - self.at:
            self.damaged(f"{items} items are declared where {self.end - self.at} bytes are left")
        self._inside(depth)
        self._more(items)

    def _inside(self, depth: int) -> None:
        if depth < 0:
            raise LimitExceeded(
                f"{self.what}, byte {self.at} of the payload: more than {self.limits.depth} containers "
                "inside one another: this is not a document that lakeckpt wrote"
            )

    def _more(self, items: int) -> None:
        self.items_left -= items
        if self.items_left < 0:
            raise LimitExceeded(f"{self.what}: more than {self.limits.items} items in one document")

    def _too_many_nodes(self) -> NoReturn:
        raise LimitExceeded(
            f"{self.what}, byte {self.at} of the payload: more than {self.limits.most_nodes(len(self.data))} lists, "
            f"dicts and extensions in {len(self.data)} bytes ({self.limits.nodes}, and one for every {NODE_BYTES} "
            "bytes): this is not a document that lakeckpt wrote"
        )

    def _array(self, count: int, depth: int) -> list[Any]:
        self._open(count, depth)
        if not count:
            return []
        read = self.value
        return [read(depth) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        self._open(2 * count, depth)
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth)
            if type(key) is not str:
                self.damaged(f"a key of type {type(key).__name__} in a map of strings")
            if key in found:
                self.damaged(f"the key {ascii(key)[:60]} twice in one map")
            found[key] = self.value(depth)
        return found

    def _extension(self, size_bytes: int, depth: int) -> Any:
        code = int.from_bytes(self._take(1), "big", signed=True)
        read = _READERS.get(code)
        if read is None:
            raise UnsupportedValue(
                f"{self.what}, byte {self.at} of the payload: the extension type {code}, which this lakeckpt does "
                "not know: the document is not ours, or was written by a newer lakeckpt"
            )
        if size_bytes > self.end - self.at:
            self.damaged(f"{size_bytes} bytes are declared where {self.end - self.at} are left")
        self.nodes_left -= 1
        if self.nodes_left < 0:
            self._too_many_nodes()
        outer, self.end = self.end, self.at + size_bytes
        value = read(self, depth)
        if self.at != self.end:
            self.damaged(f"{self.end - self.at} bytes follow the value of a {Tag(code).name} extension")
        self.end = outer
        return value

    def _rest(self) -> memoryview:
        return self._take(self.end - self.at)

    def tuple_(self, depth: int) -> tuple[Any, ...]:
        self._inside(depth)
        found: list[Any] = []
        while self.at < self.end:
            self._more(1)
            found.append(self.value(depth))
        return tuple(found)

    def pairs(self, depth: int) -> dict[Any, Any]:
        self._inside(depth)
        found: dict[Any, Any] = {}
        while self.at < self.end:
            self._more(2)
            key = self.value(depth)
            try:
                twice = self.keys.checked(key) in found
            except TypeError:
                self.damaged(f"a {type(key).__name__} as the key of a dict")
            if twice:
                self.damaged(f"the key {ascii(key)[:60]} twice in one dict")
            found[key] = self.value(depth)
        return found

    def big_int(self, depth: int) -> int:
        data = self._rest()
        value = int.from_bytes(data, "big", signed=True)
        if INT_MIN <= value <= INT_MAX or len(data) != (value if value >= 0 else ~value).bit_length() // 8 + 1:
            self.damaged("an integer longer than it needs to be")
        return value

    def complex_(self, depth: int) -> complex:
        if self.end - self.at != _COMPLEX.size:
            self.damaged(f"a complex number of {self.end - self.at} bytes")
        return complex(*_COMPLEX.unpack(self._rest()))

    def tensor_ref(self, depth: int) -> TensorRef:
        key = self._apart()
        if type(key) is not str:
            self.damaged(f"a tensor named by a {type(key).__name__}")
        return TensorRef(key=key)

    def tensor_dim_order(self, depth: int) -> TensorRef:
        reference, order = self.tensor_ref(depth), self._apart()
        if type(order) is not bytes or not is_dim_order(order):
            self.damaged("a tensor whose dim_order is none")
        return TensorRef(key=reference.key, dim_order=tuple(order))

    def _apart(self) -> Any:
        """The next value, of numpy's own description: counted by itself, as writing does not count it either."""
        items_left, self.items_left = self.items_left, _DESCRIPTION_ITEMS
        nodes_left, self.nodes_left = self.nodes_left, _DESCRIPTION_ITEMS
        value = self.value(_DESCRIPTION_DEPTH)
        self.items_left, self.nodes_left = items_left, nodes_left
        return value

    def dtype(self, depth: int) -> np.dtype[Any]:
        try:
            return dtype_from(self._apart())
        except (WireDamaged, UnsupportedValue) as error:
            raise type(error)(f"{self.what}, byte {self.at} of the payload: {error}") from None

    def scalar(self, depth: int) -> np.generic:
        start = self.at
        name = self._apart()
        if name == "U" or name == "S":
            value = self.value(0)
            if type(value) is not (str if name == "U" else bytes):
                self.damaged(f"a numpy scalar of kind {name} made of a {type(value).__name__}")
            return np.str_(value) if name == "U" else np.bytes_(value)
        self.at = start
        found = self._filled(self.dtype(depth), ())[()]
        if not isinstance(found, np.generic) or found.dtype.kind in "SUV":
            self.damaged("a numpy scalar of a type that has none")
        return found

    def array(self, depth: int) -> np.ndarray[Any, Any]:
        dtype = self.dtype(depth)
        shape = self._apart()
        if type(shape) is not list or len(shape) > MOST_DIMS:
            self.damaged("an array without a shape")
        for size in shape:
            if type(size) is not int or not 0 <= size < 2**63:
                self.damaged("an array whose shape is not made of sizes")
        return self._filled(dtype, tuple(shape))

    def _filled(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The array whose bytes come next, checked against its dtype and shape before anything is made."""
        raw = self.value(0)
        count = 1
        for size in shape:
            count *= size
        if type(raw) is not bytes or not dtype.itemsize or len(raw) != count * dtype.itemsize:
            self.damaged("an array whose bytes do not fit its dtype and shape")
        try:
            array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=bytearray(raw))
        except (TypeError, ValueError) as error:
            self.damaged(f"an array that numpy refuses: {error}")
        if not values_are_valid(array):
            self.damaged(f"an array whose bytes are not values of {ascii(dtype)[:60]}")
        return array


_READERS: dict[int, Callable[[_Decoder, int], Any]] = {
    Tag.TUPLE: _Decoder.tuple_,
    Tag.BIG_INT: _Decoder.big_int,
    Tag.COMPLEX: _Decoder.complex_,
    Tag.NUMPY_SCALAR: _Decoder.scalar,
    Tag.NUMPY_ARRAY: _Decoder.array,
    Tag.NUMPY_DTYPE: _Decoder.dtype,
    Tag.PAIRS: _Decoder.pairs,
    Tag.TENSOR_REF: _Decoder.tensor_ref,
    Tag.TENSOR_DIM_ORDER: _Decoder.tensor_dim_order,
}
