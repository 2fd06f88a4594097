"""This module checks the types and sizes of values that are read from outside, and says what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakeckpt.errors import StateInvalid

__all__ = ["integer", "integers", "listing", "mapping", "text"]

_LARGEST = 2**63 - 1


def integer(plain: Mapping[str, object], name: str, *, least: int = 0, most: int = _LARGEST) -> int:
    """Return the integer ``plain[name]``; StateInvalid where it is missing, none, or outside [least, most]."""
    value = plain.get(name)
    if type(value) is not int or not least <= value <= most:
        raise StateInvalid(f"{name!r} must be an integer of at least {least}, got {value!r}")
    return value


def integers(value: object, name: str, *, count: int, least: int = 0) -> tuple[int, ...]:
    """Return ``value`` as a tuple of ``count`` integers of at least ``least``."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) != count
        or not all(type(item) is int and least <= item <= _LARGEST for item in value)
    ):
        raise StateInvalid(f"{name!r} must be {count} integers of at least {least}, got {value!r}")
    return tuple(value)


def listing(plain: Mapping[str, object], name: str) -> Sequence[object]:
    """Return the list ``plain[name]``."""
    value = plain.get(name)
    if not isinstance(value, (list, tuple)):
        raise StateInvalid(f"{name!r} must be a list, got {value!r}")
    return value


def mapping(plain: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return the mapping ``plain[name]``."""
    value = plain.get(name)
    if not isinstance(value, Mapping):
        raise StateInvalid(f"{name!r} must be a mapping, got {value!r}")
    return value


def text(plain: Mapping[str, object], name: str) -> str:
    """Return the string ``plain[name]``."""
    value = plain.get(name)
    if not isinstance(value, str):
        raise StateInvalid(f"{name!r} must be a string, got {value!r}")
    return value
