"""This module turns dataclasses into the plain values of a document and back, by the types of their fields.

`to_plain` gives what `lakeckpt.wire.envelope.dumps` packs: a dataclass is a dict of its fields, or a list of them if
it is marked by `as_row`. `from_plain` checks every type exactly and calls ``__post_init__``, where a class states what
must hold between its fields. A field that is missing takes its default, if it has one; a field that the class does
not have is refused. All errors name the document and the path to the field. The module imports the standard library
only, so that `lakeckpt.core` may use it.

Fields are None, bool, int, float, str, bytes, ``Literal``, ``X | None``, tuples, mappings, dataclasses, classes with
``to_plain`` and ``from_plain`` of their own, and ``Any``, which passes as it is. ``Annotated[X, check]`` calls
``check`` with the value that was read; it returns the value, or raises ``ValueError``. `Count` and `Positive` are such
types.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from lakeckpt.errors import LakeckptError, NewerFormat, UnsupportedValue, WireDamaged

__all__ = ["Count", "Positive", "as_row", "from_plain", "from_plain_of", "to_plain"]

_T = TypeVar("_T")
_SCALARS = (bool, int, float, str, bytes, dict, list)
_ROW = "__is_row_of_a_document__"


def _at_least(least: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if not least <= value < 2**63:
            raise ValueError(f"it must be at least {least} and fit 63 bits, got {value}")
        return value

    return check


Count = Annotated[int, _at_least(0)]
"""An integer from 0 on, below 2^63."""
Positive = Annotated[int, _at_least(1)]
"""An integer from 1 on, below 2^63."""


def as_row(kind: type[_T]) -> type[_T]:
    """Mark a dataclass: its document is the list of its fields, without their names. Last fields that are None by
    default are missing if they are None."""
    setattr(kind, _ROW, True)
    return kind


def to_plain(value: Any, kind: Any = None) -> Any:
    """Return the plain values of ``value``; ``kind`` is its type, if that is not its class (``tuple[Leg, ...]``)."""
    return _outer_form(type(value) if kind is None else kind).write(value)


def from_plain(kind: Any, plain: object, what: str, *, error: type[LakeckptError] = WireDamaged) -> Any:
    """Return the value of type ``kind`` that `to_plain` made into ``plain``. ``what`` names the document in errors.

    Raises ``error`` naming the field.
    """
    try:
        return _outer_form(kind).read(plain)
    except _Wrong as wrong:
        path = "".join(reversed(wrong.steps))
        raise error(f"{what}{f', field {path.lstrip(chr(46))!r}' if path else ''}: {wrong.reason}") from None


def from_plain_of(kinds: Mapping[str, type[_T]], tag: str, plain: object, what: str) -> _T:
    """Return the value of that one of ``kinds`` which the field ``tag`` names. Raises as `from_plain` does."""
    name = plain.get(tag) if type(plain) is dict else None
    if type(name) is not str or name not in kinds:
        raise WireDamaged(f"{what}: field {tag!r} must be one of {', '.join(kinds)}, got {name!r:.80}")
    assert type(plain) is dict
    found: _T = from_plain(kinds[name], {key: one for key, one in plain.items() if key != tag}, what)
    return found


class _Wrong(Exception):
    """A value that does not fit its type: why, and the steps that lead to it, the innermost first."""

    def __init__(self, reason: str, *steps: str) -> None:
        super().__init__(reason)
        self.reason, self.steps = reason, list(steps)


class _Form(NamedTuple):
    """How values of one type are written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _as_is(value: Any) -> Any:
    return value


def _outer_form(kind: Any) -> _Form:
    """Return the form of a whole document: a dataclass goes by its fields, so that its own methods may call us."""
    return _dataclass(kind) if hasattr(kind, "__dataclass_fields__") else _form(kind)


@cache
def _form(kind: Any) -> _Form:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _Form(_as_is, _as_is)
    if origin is Annotated:
        inner = _form(args[0])
        return _Form(inner.write, lambda plain: _guarded(args[1], inner.read(plain)))
    if origin is Literal:
        return _Form(_as_is, lambda plain: _one_of(args, plain))
    if origin in (Union, types.UnionType):
        return _optional(kind, args)
    if origin is tuple:
        return _tuple(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*map(_form, args))
    if hasattr(kind, "from_plain"):
        return _Form(lambda value: value.to_plain(), lambda plain: _guarded(kind.from_plain, plain))
    if hasattr(kind, "__dataclass_fields__"):
        return _dataclass(kind)
    assert kind in _SCALARS, f"documents have no fields of type {kind!r}"
    return _Form(_as_is, lambda plain: _exactly(kind, plain))


def _guarded(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except (NewerFormat, UnsupportedValue):
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise _Wrong(str(error)) from None


def _exactly(kind: type, plain: object) -> Any:
    if type(plain) is not kind:
        raise _Wrong(f"it must be of type {kind.__name__}, got {plain!r:.80}")
    return plain


def _one_of(values: tuple[object, ...], plain: object) -> Any:
    if plain not in values or type(plain) is not type(values[values.index(plain)]):
        raise _Wrong(f"it must be one of {', '.join(map(repr, values))}, got {plain!r:.80}")
    return plain


def _optional(kind: Any, args: tuple[Any, ...]) -> _Form:
    some = [one for one in args if one is not types.NoneType]
    assert len(some) == 1 and len(args) == 2, f"documents have no unions but with None: {kind!r}"
    inner = _form(some[0])
    return _Form(
        lambda value: None if value is None else inner.write(value),
        lambda plain: None if plain is None else inner.read(plain),
    )


def _tuple(args: tuple[Any, ...]) -> _Form:
    if args[-1] is Ellipsis:
        inner = _form(args[0])
        return _Form(
            lambda value: [inner.write(one) for one in value],
            lambda plain: tuple(_entry(inner, at, one) for at, one in enumerate(_exactly(list, plain))),
        )
    forms = [_form(one) for one in args]

    def read(plain: object) -> tuple[Any, ...]:
        if len(_exactly(list, plain)) != len(forms):
            raise _Wrong(f"it must have {len(forms)} entries, got {plain!r:.80}")
        return tuple(_entry(form, at, one) for at, (form, one) in enumerate(zip(forms, plain, strict=True)))  # type: ignore[call-overload]

    return _Form(lambda value: [form.write(one) for form, one in zip(forms, value, strict=True)], read)


def _entry(form: _Form, at: object, plain: object) -> Any:
    try:
        return form.read(plain)
    except _Wrong as wrong:
        wrong.steps.append(f"[{at!r}]")
        raise


def _mapping(keys: _Form, values: _Form) -> _Form:
    return _Form(
        lambda value: {keys.write(key): values.write(one) for key, one in value.items()},
        lambda plain: {_entry(keys, key, key): _entry(values, key, one) for key, one in _exactly(dict, plain).items()},
    )


@cache
def _dataclass(kind: Any) -> _Form:
    hints = get_type_hints(kind, include_extras=True)
    known = [one for one in fields(kind) if one.init]
    forms = {one.name: _form(hints[one.name]) for one in known}
    needed = [one.name for one in known if one.default is MISSING and one.default_factory is MISSING]
    is_row = _ROW in vars(kind)
    ending = list(takewhile(lambda one: one.default is None, reversed(known)))
    shortest = len(known) - len(ending)

    def read(plain: object) -> Any:
        if is_row:
            if not shortest <= len(_exactly(list, plain)) <= len(forms):
                raise _Wrong(f"it must be [{', '.join(forms)}], got {plain!r:.80}")
            plain = dict(zip(forms, plain, strict=False))  # type: ignore[call-overload]
        _check_names(forms, needed, plain)
        values = {}
        for name, one in plain.items():  # type: ignore[attr-defined]
            try:
                values[name] = forms[name].read(one)
            except _Wrong as wrong:
                wrong.steps.append(f".{name}")
                raise
        return _guarded(lambda given: kind(**given), values)

    def write(value: Any) -> Any:
        found = {name: form.write(getattr(value, name)) for name, form in forms.items()}
        if not is_row:
            return found
        row = list(found.values())
        while len(row) > shortest and row[-1] is None:
            row.pop()
        return row

    return _Form(write, read)


def _check_names(forms: Mapping[str, _Form], needed: list[str], plain: object) -> None:
    if type(plain) is not dict:
        raise _Wrong(f"it must be a dict with the fields {', '.join(forms)}, got {plain!r:.80}")
    for name in plain:
        if name not in forms:
            raise _Wrong("this lakeckpt knows no such field", f".{name}")
    for name in needed:
        if name not in plain:
            raise _Wrong("it is missing", f".{name}")
