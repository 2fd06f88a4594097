"""What does a pickle describe?  Its stack machine is followed, and nothing that it names is imported, called or made.

A pickle is a program. `describe` runs it on inert values: a name stays a `Name`, a call a `Call` with its arguments,
what is put into an object stays beside it. What comes out says what unpickling would do, for a reader to recognise the
few things that it knows and refuse the rest (see ``plain``). Neither `pickle` nor any class or function is looked up.

Opcodes and their arguments are read as the standard library's own `pickletools` describes them. No value costs more
than its bytes: sizes are bounded by the pickle's, what is put into one another too deeply is refused as it is put
there, containers and calls that are too many for the bytes of the pickle are refused as they are made, and keys that
were chosen to collide are refused. Imports without torch.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged
from lakeckpt.wire.collector import collector_waits
from lakeckpt.wire.keys import Keys

__all__ = ["DEEPEST", "Call", "Name", "Persistent", "describe"]

DEEPEST = 64
"""How many containers may lie inside one another."""
_DEEPEST_HERE = 4 * DEEPEST
"""The same here, where calls and their arguments count too."""
_MADE = 5_000
_MADE_BYTES = 4
"""So many containers, calls and persistent names a pickle may make, and one more for so many of its bytes. Those of
``torch.save`` and of DCP have 8 to 12 bytes for each."""


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


_KEYS = frozenset({str, int, float, bool, bytes, type(None), Name, Call})


def _key(machine: _Machine, key: object) -> Any:
    """A key whose hash costs nothing: a scalar, a tuple of scalars, or a made thing (whose hash is its identity)."""
    kind = type(key)
    if kind is Call:
        return key
    if kind not in _KEYS and not (isinstance(key, tuple) and all(type(one) in _KEYS for one in key)):
        raise UnsupportedValue(f"this pickle has a {kind.__name__} of containers as a key: it is not read")
    return machine.keys.checked(key)


_Act = Callable[["_Machine", Any], None]


def describe(data: bytes) -> Any:
    """What the pickle in ``data`` would make, of plain values, `Name`, `Call` and `Persistent`.

    Containers may be shared and hold themselves. Raises `WireDamaged` where it is no whole pickle, `UnsupportedValue`
    for opcodes that no state dict needs, `LimitExceeded` where it is too deep, or makes more than its bytes tell of.
    """
    machine, stream = _Machine(len(data)), io.BytesIO(data)
    read = stream.read
    try:
        with collector_waits():
            while code := read(1):
                reader, act = _OPCODES[code]
                act(machine, None if reader is None else reader(stream))
                if code == b".":
                    return machine.top()
    except (WireDamaged, UnsupportedValue, LimitExceeded):
        raise
    # pickletools warns of a text with an escape that is none: nobody pickled that.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError, DeprecationWarning) as error:
        raise WireDamaged(f"this is no whole pickle: {type(error).__name__}: {error!s:.200}") from None
    raise WireDamaged("this pickle is cut short: it has no end")


class _Machine:
    """The stack above the last mark, what lies below each mark, and the memo; beside each value, how deep it is."""

    __slots__ = ("below", "depths", "keys", "left", "memo", "size_bytes", "stack")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.left = _MADE + size_bytes // _MADE_BYTES
        self.stack: list[Any] = []
        self.depths: list[int] = []
        self.below: list[tuple[list[Any], list[int]]] = []
        self.memo: dict[int, tuple[Any, int]] = {}
        self.keys = Keys("this pickle")

    def push(self, value: Any, depth: int = 0) -> None:
        """A value with ``depth`` containers inside one another."""
        if depth > _DEEPEST_HERE:
            raise _too_deep()
        self.stack.append(value)
        self.depths.append(depth)

    def make(self, value: Any, depth: int = 0) -> None:
        """`push` of a container, call or persistent name."""
        self.left -= 1
        if self.left < 0:
            raise LimitExceeded(
                f"this pickle makes more than {_MADE + self.size_bytes // _MADE_BYTES} containers and calls of its "
                f"{self.size_bytes} bytes ({_MADE}, and one for every {_MADE_BYTES} bytes): no state dict does"
            )
        self.push(value, depth)

    def top(self) -> Any:
        return self.stack[-1]

    def deepen(self, depth: int) -> None:
        """What is on top holds a value of ``depth`` from now on."""
        if depth >= self.depths[-1]:
            self.push(self.stack.pop(), max(self.depths.pop(), depth + 1))

    def pop(self) -> tuple[Any, int]:
        return self.stack.pop(), self.depths.pop()

    def pops(self, count: int) -> tuple[list[Any], int]:
        """The last values, and the depth of the deepest."""
        if len(self.stack) < count:
            raise IndexError("it takes from an empty stack")
        found, depth = self.stack[-count:], max(self.depths[-count:])
        del self.stack[-count:], self.depths[-count:]
        return found, depth

    def mark(self) -> None:
        if len(self.below) >= _DEEPEST_HERE:  # whatever is made of what is above them lies inside one another
            raise _too_deep()
        self.below.append((self.stack, self.depths))
        self.stack, self.depths = [], []

    def to_mark(self) -> tuple[list[Any], int]:
        """All above the last mark, and the depth of the deepest."""
        found, depth = self.stack, max(self.depths, default=0)
        self.stack, self.depths = self.below.pop()
        return found, depth


def _too_deep() -> LimitExceeded:
    return LimitExceeded(f"this pickle puts more than {_DEEPEST_HERE} containers into one another")


def _name(machine: _Machine, module: object, name: object) -> None:
    if type(module) is not str or type(name) is not str:
        raise WireDamaged("this pickle names a class by what is no text")
    machine.push(Name(module=module, name=name))


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    _name(machine, module, name)


def _stack_global(machine: _Machine, _: Any) -> None:
    (module, name), _depth = machine.pops(2)
    _name(machine, module, name)


def _call(machine: _Machine, function: object, arguments: object, depth: int) -> None:
    if not isinstance(function, Name) or type(arguments) is not tuple:
        raise UnsupportedValue("this pickle calls what is not a plain name with arguments: it is not read")
    machine.make(Call(function=function, arguments=arguments), depth + 1)


def _reduce(machine: _Machine, _: Any) -> None:
    (function, arguments), depth = machine.pops(2)
    _call(machine, function, arguments, depth)


def _newobj_ex(machine: _Machine, _: Any) -> None:
    (function, arguments, named), depth = machine.pops(3)
    if named:
        raise UnsupportedValue("this pickle calls with named arguments, which no state dict needs: it is not read")
    _call(machine, function, arguments, depth)


def _build(machine: _Machine, _: Any) -> None:
    state, depth = machine.pop()
    made = machine.top()
    if not isinstance(made, Call):
        raise WireDamaged("this pickle gives a state to what has none")
    made.states.append(state)
    machine.deepen(depth)


def _elements(machine: _Machine, elements: list[Any], depth: int) -> None:
    into = machine.top()
    target = into.elements if isinstance(into, Call) else into
    if type(target) is list:
        target.extend(elements)
    elif type(target) is set:
        target.update(map(partial(_key, machine), elements))
    else:
        raise WireDamaged("this pickle appends to what is no list")
    machine.deepen(depth)


def _items(machine: _Machine, flat: list[Any], depth: int) -> None:
    into = machine.top()
    target = into.items if isinstance(into, Call) else into
    if type(target) is not dict or len(flat) % 2:
        raise WireDamaged("this pickle sets items of what is no dict")
    target.update(zip(map(partial(_key, machine), flat[::2]), flat[1::2], strict=True))
    machine.deepen(depth)


def _pop(machine: _Machine, _: Any) -> None:
    if machine.stack:
        machine.pop()
    else:
        machine.to_mark()


def _pop_mark(machine: _Machine, _: Any) -> None:
    machine.to_mark()


def _put(machine: _Machine, argument: int) -> None:
    machine.memo[argument] = machine.stack[-1], machine.depths[-1]


def _refuse(name: str) -> _Act:
    def refuse(machine: _Machine, argument: Any) -> None:
        raise UnsupportedValue(f"this pickle has the opcode {name}, which no state dict needs: it is not read")

    return refuse


def _constant(value: Any) -> _Act:
    return lambda machine, _: machine.push(value)


def _made(make: Callable[[list[Any]], Any]) -> _Act:
    """Of all above the mark."""

    def made(machine: _Machine, _: Any) -> None:
        found, depth = machine.to_mark()
        machine.make(make(found), depth + 1)

    return made


def _tuple(count: int) -> _Act:
    def made(machine: _Machine, _: Any) -> None:
        found, depth = machine.pops(count)
        machine.make(tuple(found), depth + 1)

    return made


def _frozenset(machine: _Machine, _: Any) -> None:
    found, depth = machine.to_mark()
    machine.make(frozenset(map(partial(_key, machine), found)), depth + 1)


def _dict(machine: _Machine, _: Any) -> None:
    flat, depth = machine.to_mark()
    machine.make({})
    _items(machine, flat, depth)


def _persistent(machine: _Machine, _: Any) -> None:
    key, depth = machine.pop()
    machine.make(Persistent(key=key), depth + 1)


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

_ACTS: dict[str, _Act] = {
    **dict.fromkeys(_ARGUMENTS, lambda machine, argument: machine.push(argument)),
    **dict.fromkeys(_GETS, lambda machine, argument: machine.push(*machine.memo[argument])),
    **dict.fromkeys(_PUTS, _put),
    **dict.fromkeys(_NOTHING, lambda machine, argument: None),
    **{name: _constant(value) for name, value in _CONSTANTS.items()},
    **{name: _tuple(count) for name, count in _TUPLES.items()},
    "MARK": lambda machine, _: machine.mark(),
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": lambda machine, _: machine.push(machine.stack[-1], machine.depths[-1]),
    "EMPTY_LIST": lambda machine, _: machine.make([]),
    "EMPTY_DICT": lambda machine, _: machine.make({}),
    "EMPTY_SET": lambda machine, _: machine.make(set()),
    "LIST": _made(list),
    "TUPLE": _made(tuple),
    "FROZENSET": _frozenset,
    "DICT": _dict,
    "APPEND": lambda machine, _: _elements(machine, *machine.pops(1)),
    "APPENDS": lambda machine, _: _elements(machine, *machine.to_mark()),
    "ADDITEMS": lambda machine, _: _elements(machine, *machine.to_mark()),
    "SETITEM": lambda machine, _: _items(machine, *machine.pops(2)),
    "SETITEMS": lambda machine, _: _items(machine, *machine.to_mark()),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _newobj_ex,
    "BUILD": _build,
    "BINPERSID": _persistent,
}

_OPCODES = {
    one.code.encode("latin-1"): (None if one.arg is None else one.arg.reader, _ACTS.get(one.name) or _refuse(one.name))
    for one in pickletools.opcodes
}
