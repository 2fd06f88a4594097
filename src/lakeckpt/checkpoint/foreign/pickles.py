"""What does a pickle describe?  Its stack machine is followed, and nothing that it names is imported, called or made.

A pickle is a program. `describe` runs it on inert values: a name stays a `Name`, a call a `Call` with its arguments,
what is put into an object stays beside it. What comes out says what unpickling would do, for a reader to recognise the
few things that it knows and refuse the rest (see ``plain``). Neither `pickle` nor any class or function is looked up.

Opcodes and their arguments are read as the standard library's own `pickletools` describes them. Sizes are bounded by
the pickle's, keys of dicts are scalars or made things (whose hash is their identity), so that no value costs more than
its bytes. Imports without torch.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.errors import UnsupportedValue, WireDamaged

__all__ = ["Call", "Name", "Persistent", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:120]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """What would be made by calling ``function`` with ``arguments``, and what would be put into it then."""

    function: object
    arguments: tuple[Any, ...]
    states: list[Any] = field(default_factory=list)
    """What would be given to its ``__setstate__``, in order."""
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Persistent:
    """What the writer of the pickle keeps elsewhere under ``key``."""

    key: object


class _Mark:
    """A mark on the stack."""


_Act = Callable[["_Machine", Any], None]


def describe(data: bytes) -> Any:
    """What the pickle in ``data`` would make, of plain values, `Name`, `Call` and `Persistent`.

    Containers may be shared and hold themselves. Raises `WireDamaged` where it is no whole pickle, `UnsupportedValue`
    for opcodes that no state dict needs.
    """
    machine, stream = _Machine(), io.BytesIO(data)
    read = stream.read
    try:
        while code := read(1):
            reader, act = _OPCODES[code]
            act(machine, None if reader is None else reader(stream))
            if code == b".":
                return machine.pop()
    except (WireDamaged, UnsupportedValue):
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise WireDamaged(f"this is no whole pickle: {type(error).__name__}: {error!s:.200}") from None
    raise WireDamaged("this pickle is cut short: it has no end")


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_ARGUMENTS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = ("PROTO", "FRAME", "STOP")


class _Machine:
    """The stack and the memo."""

    __slots__ = ("memo", "stack")

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _Mark:
            raise WireDamaged("this pickle takes from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        found = self.top()
        self.stack.pop()
        return found

    def pops(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        if len(found) < count or any(one is _Mark for one in found):
            raise WireDamaged("this pickle takes from an empty stack")
        del self.stack[-count:]
        return found

    def to_mark(self) -> list[Any]:
        found = []
        while self.stack and self.stack[-1] is not _Mark:
            found.append(self.stack.pop())
        if not self.stack:
            raise WireDamaged("this pickle takes up to a mark that is not there")
        self.stack.pop()
        return found[::-1]


def _name(machine: _Machine, module: object, name: object) -> None:
    if type(module) is not str or type(name) is not str:
        raise WireDamaged("this pickle names a class by what is no text")
    machine.stack.append(Name(module=module, name=name))


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    _name(machine, module, name)


def _stack_global(machine: _Machine, _: Any) -> None:
    module, name = machine.pops(2)
    _name(machine, module, name)


def _call(machine: _Machine, function: object, arguments: object) -> None:
    if not isinstance(function, Name) or type(arguments) is not tuple:
        raise UnsupportedValue("this pickle calls what is not a plain name with arguments: it is not read")
    machine.stack.append(Call(function=function, arguments=arguments))


def _reduce(machine: _Machine, _: Any) -> None:
    _call(machine, *machine.pops(2))


def _newobj_ex(machine: _Machine, _: Any) -> None:
    function, arguments, named = machine.pops(3)
    if named:
        raise UnsupportedValue("this pickle calls with named arguments, which no state dict needs: it is not read")
    _call(machine, function, arguments)


def _build(machine: _Machine, _: Any) -> None:
    state, made = machine.pop(), machine.top()
    if not isinstance(made, Call):
        raise WireDamaged("this pickle gives a state to what has none")
    made.states.append(state)


def _elements(machine: _Machine, elements: list[Any]) -> None:
    into = machine.top()
    target = into.elements if isinstance(into, Call) else into
    if type(target) not in (list, set):
        raise WireDamaged("this pickle appends to what is no list")
    if type(target) is set:
        target.update(_key(one) for one in elements)
    else:
        target.extend(elements)


def _items(machine: _Machine, flat: list[Any]) -> None:
    into = machine.top()
    target = into.items if isinstance(into, Call) else into
    if type(target) is not dict or len(flat) % 2:
        raise WireDamaged("this pickle sets items of what is no dict")
    target.update((_key(key), value) for key, value in zip(flat[::2], flat[1::2], strict=True))


def _key(key: object) -> Any:
    """A key whose hash costs nothing: a scalar, a tuple of scalars, or a made thing."""
    flat = key if type(key) is tuple else (key,)
    if not all(type(one) in (str, int, float, bool, bytes, type(None), Name, Call) for one in flat):
        raise UnsupportedValue(f"this pickle has a {type(key).__name__} of containers as a key: it is not read")
    return key


def _pop(machine: _Machine, _: Any) -> None:
    machine.stack.pop()


def _pop_mark(machine: _Machine, _: Any) -> None:
    machine.to_mark()


def _put(machine: _Machine, argument: int) -> None:
    machine.memo[argument] = machine.top()


def _refuse(name: str) -> _Act:
    def refuse(machine: _Machine, argument: Any) -> None:
        raise UnsupportedValue(f"this pickle has the opcode {name}, which no state dict needs: it is not read")

    return refuse


def _constant(value: Any) -> _Act:
    return lambda machine, _: machine.stack.append(value)


def _tuple(count: int) -> _Act:
    return lambda machine, _: machine.stack.append(tuple(machine.pops(count)))


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.top()


def _dict(machine: _Machine, _: Any) -> None:
    flat = machine.to_mark()
    machine.stack.append({})
    _items(machine, flat)


_ACTS: dict[str, _Act] = {
    **dict.fromkeys(_ARGUMENTS, lambda machine, argument: machine.stack.append(argument)),
    **dict.fromkeys(_GETS, lambda machine, argument: machine.stack.append(machine.memo[argument])),
    **dict.fromkeys(_PUTS, _put),
    **dict.fromkeys(_NOTHING, lambda machine, argument: None),
    **{name: _constant(value) for name, value in _CONSTANTS.items()},
    **{name: _tuple(count) for name, count in _TUPLES.items()},
    "MARK": lambda machine, _: machine.stack.append(_Mark),
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": lambda machine, _: machine.stack.append(machine.top()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.stack.append(set()),
    "LIST": lambda machine, _: machine.stack.append(machine.to_mark()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.to_mark())),
    "FROZENSET": lambda machine, _: machine.stack.append(frozenset(map(_key, machine.to_mark()))),
    "DICT": _dict,
    "APPEND": lambda machine, _: _elements(machine, [machine.pop()]),
    "APPENDS": lambda machine, _: _elements(machine, machine.to_mark()),
    "ADDITEMS": lambda machine, _: _elements(machine, machine.to_mark()),
    "SETITEM": lambda machine, _: _items(machine, machine.pops(2)),
    "SETITEMS": lambda machine, _: _items(machine, machine.to_mark()),
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _newobj_ex,
    "BUILD": _build,
    "BINPERSID": lambda machine, _: machine.stack.append(Persistent(key=machine.pop())),
}

_OPCODES = {
    one.code.encode("latin-1"): (None if one.arg is None else one.arg.reader, _ACTS.get(one.name) or _refuse(one.name))
    for one in pickletools.opcodes
}
