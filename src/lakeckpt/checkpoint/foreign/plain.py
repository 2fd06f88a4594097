"""Which values does the description of a pickle stand for?  Plain ones, tensors, arrays; the rest is refused by name.

`plain` turns what `lakeckpt.checkpoint.foreign.pickles.describe` found into the values that a state dict may hold. Each
call in it is recognised by its name and carried out by code of ours: an ``OrderedDict``, a ``torch.Size``, a tensor, a
numpy array, … A name that is not in the table is told, never looked up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lakeckpt.checkpoint.foreign.pickles import DEEPEST, Call, Name, Persistent
from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged
from lakeckpt.wire.keys import Keys

__all__ = ["Tensors", "plain"]

_VALUES_PER_BYTE = 4
_VALUES_AT_LEAST = 1000
_SCALARS = (str, int, float, bool, bytes, bytearray, type(None))
_SEQUENCES = (list, tuple, set, frozenset)
_DTYPE_KINDS = "biufcSU"

Tensors = Callable[[str, Any, str | None, int, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""(what messages call it, what `Persistent` holds, dtype if it is not the storage's, first element, shape, strides) →
the tensor."""


def plain(described: Any, *, size_bytes: int, tensors: Tensors | None = None, what: str = "this value") -> Any:
    """The value. ``size_bytes`` is the pickle's, which bounds how many values may come of it: shared ones are made anew
    wherever they stand. ``tensors`` makes tensors of storages that are kept beside the pickle.

    Raises `UnsupportedValue` naming what only running the pickle could make, `WireDamaged` where something known is
    called with what it does not take, `LimitExceeded` where it is too deep or too large.
    """
    try:
        return _Plain(tensors, what, _VALUES_AT_LEAST + _VALUES_PER_BYTE * size_bytes).value(described, DEEPEST)
    except TypeError as error:
        raise WireDamaged(f"{what}: a key is no key: {error}") from None


class _Plain:
    __slots__ = ("keys", "left", "path", "tensors", "whole")

    def __init__(self, tensors: Tensors | None, what: str, most: int) -> None:
        self.tensors, self.whole, self.left = tensors, what, most
        self.keys = Keys(what)
        self.path: list[Any] = []  # of the value at hand; after an error, of the one that it is about

    @property
    def what(self) -> str:
        """What messages call the value at hand."""
        steps = (step if type(step) in (str, int) else type(step).__name__ for step in self.path)
        path = ".".join(f"{step!s:.80}" for step in steps)
        return f"{self.whole}: {path:.400}" if path else self.whole

    def value(self, one: Any, depth: int) -> Any:
        self.left -= 1
        if not depth or self.left < 0:
            raise LimitExceeded(f"{self.what}: more values or more containers inside one another than we read")
        kind = type(one)
        if kind in _SCALARS:
            return one
        if kind is dict:
            return {self.value(key, depth - 1): self.inside(key, found, depth - 1) for key, found in one.items()}
        if kind in _SEQUENCES:
            return kind([self.inside(at, each, depth - 1) for at, each in enumerate(one)])
        if kind is Name:
            return self.named(one)
        if kind is Call:
            return self.made(one, depth - 1)
        raise UnsupportedValue(f"{self.what}: a {kind.__name__} where a value was expected")

    def inside(self, step: Any, one: Any, depth: int) -> Any:
        """The value at ``step`` of the one at hand."""
        self.path.append(step)
        found = self.value(one, depth)
        self.path.pop()
        return found

    def named(self, name: Name) -> Any:
        """A constant: dtypes and layouts of torch."""
        if name.module == "torch":
            found = getattr(torch, name.name, None)
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
        raise self.refused(name)

    def refused(self, name: object) -> UnsupportedValue:
        return UnsupportedValue(
            f"{self.what}: only running its pickle could make a {name}, and pickles are never run: save it as plain "
            "values or tensors, or leave it out"
        )

    def made(self, call: Call, depth: int) -> Any:
        make = _KNOWN.get(str(call.function))
        if make is None:
            raise self.refused(call.function)
        try:
            return make(self, call, depth)
        except (UnsupportedValue, WireDamaged, LimitExceeded):
            raise
        except (TypeError, ValueError, IndexError, OverflowError, RuntimeError, MemoryError) as error:
            raise WireDamaged(f"{self.what}: {call.function} is called with what it does not take: {error}") from None


def _mapping(make: Callable[[dict[Any, Any]], Any]) -> Callable[[_Plain, Call, int], Any]:
    def made(to: _Plain, call: Call, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for one in (*call.arguments[-1:], call.items):
            if isinstance(one, dict):
                found |= to.value(one, depth)
            elif isinstance(one, list):
                found |= {to.keys.checked(key): value for key, value in to.value(one, depth)}
        return make(found)

    return made


def _sequence(make: Callable[[Any], Any]) -> Callable[[_Plain, Call, int], Any]:
    return lambda to, call, depth: make(to.value(call.arguments[0], depth) if call.arguments else ())


def _set(make: Callable[[Any], Any]) -> Callable[[_Plain, Call, int], Any]:
    return lambda to, call, depth: make(map(to.keys.checked, _sequence(list)(to, call, depth)))


def _encoded(to: _Plain, call: Call, depth: int) -> bytes:
    """Bytes, as pickles of protocol 2 write them."""
    text, coding = call.arguments if len(call.arguments) == 2 else (*call.arguments, "latin1")
    if type(text) is not str or coding not in ("latin1", "latin-1"):
        raise WireDamaged(f"{to.what}: bytes are written as no latin-1")
    return text.encode("latin-1")


def _bytes(to: _Plain, call: Call, depth: int) -> bytes | bytearray:
    found = _buffer(to, call.arguments[0], depth) if call.arguments else b""
    return bytearray(found) if str(call.function).endswith("bytearray") else bytes(found)


def _complex(to: _Plain, call: Call, depth: int) -> complex:
    real, imaginary = call.arguments
    return complex(float(real), float(imaginary))


def _device(to: _Plain, call: Call, depth: int) -> str:
    return ":".join(str(part) for part in to.value(call.arguments, depth))


def _dtype(to: _Plain, call: Any) -> np.dtype[Any]:
    if not isinstance(call, Call) or str(call.function) != "numpy.dtype" or type(call.arguments[0]) is not str:
        raise to.refused("numpy dtype")
    state = call.states[-1] if call.states else ()
    order = state[1] if type(state) is tuple and len(state) > 1 and state[1] in ("<", ">") else ""
    found = np.dtype(order + call.arguments[0].lstrip("<>|="))
    if found.kind not in _DTYPE_KINDS or found.itemsize > 2**20:
        raise to.refused(f"numpy array of {found}")
    return found


def _array(to: _Plain, call: Call, depth: int) -> Any:
    """``numpy._core.multiarray._reconstruct``, and its state: version, shape, dtype, order, bytes."""
    _, shape, dtype, fortran, data = call.states[-1]
    found = np.frombuffer(_buffer(to, data, depth), dtype=_dtype(to, dtype))
    sizes = tuple(int(size) for size in shape)
    return found.reshape(sizes, order="F" if fortran else "C").copy()


def _scalar(to: _Plain, call: Call, depth: int) -> Any:
    dtype, data = call.arguments
    return np.frombuffer(_buffer(to, data, depth), dtype=_dtype(to, dtype))[0]


def _buffer(to: _Plain, described: Any, depth: int) -> bytes | bytearray:
    found = to.value(described, depth)
    if not isinstance(found, (bytes, bytearray)):  # of an int, bytes() would make so many zeros
        raise WireDamaged(f"{to.what}: bytes are made of a {type(found).__name__}")
    return found


def _tensor(to: _Plain, call: Call, depth: int) -> torch.Tensor:
    """``torch._utils._rebuild_tensor_v2(storage, first, shape, strides, gradient, hooks, metadata)``; version 3 has the
    dtype before the metadata."""
    storage, first, shape, strides = call.arguments[:4]
    is_v3 = str(call.function).endswith("_v3")
    dtype = to.value(call.arguments[6], depth) if is_v3 else None
    metadata = to.value(call.arguments[6 + is_v3], depth) if len(call.arguments) > 6 + is_v3 else None
    if to.tensors is None or not isinstance(storage, Persistent):
        raise to.refused("tensor without a storage")
    sizes, steps = (tuple(to.value(one, depth)) for one in (shape, strides))
    if not all(type(one) is int and 0 <= one < 2**62 for one in (first, *sizes, *steps)) or len(sizes) != len(steps):
        raise WireDamaged(f"{to.what}: a tensor of shape {sizes!r:.80} and strides {steps!r:.80}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise WireDamaged(f"{to.what}: a tensor of what is no dtype")
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    found = to.tensors(to.what, storage.key, name, first, sizes, steps)
    if metadata is None:
        return found
    if not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}:
        raise to.refused(f"tensor with the metadata {metadata!r:.80}")
    found = found.conj().resolve_conj() if metadata.get("conj") else found
    return found.neg() if metadata.get("neg") else found


def _parameter(to: _Plain, call: Call, depth: int) -> torch.Tensor:
    found = to.value(call.arguments[0], depth)
    if not isinstance(found, torch.Tensor):
        raise WireDamaged(f"{to.what}: a parameter of what is no tensor")
    return found


_KNOWN: dict[str, Callable[[_Plain, Call, int], Any]] = {
    "collections.OrderedDict": _mapping(OrderedDict),
    "collections.defaultdict": _mapping(dict),
    "collections.Counter": _mapping(Counter),
    "torch.Size": _sequence(torch.Size),
    "torch.device": _device,
    "_codecs.encode": _encoded,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    **{f"{module}.multiarray._reconstruct": _array for module in ("numpy.core", "numpy._core")},
    **{f"{module}.multiarray.scalar": _scalar for module in ("numpy.core", "numpy._core")},
    **{
        f"{module}.{name}": make
        for module in ("builtins", "__builtin__")
        for name, make in {
            "set": _set(set),
            "frozenset": _set(frozenset),
            "list": _sequence(list),
            "tuple": _sequence(tuple),
            "bytes": _bytes,
            "bytearray": _bytes,
            "complex": _complex,
        }.items()
    },
}
