"""Is this argument one that can be?  Small checks with messages that name the argument and what was got.

Integers of numpy and of torch are as good as Python's; a bool is never an integer, nor the other way round.
"""

from __future__ import annotations

import operator
from typing import Any

from lakeckpt.errors import ConfigError

__all__ = ["flag", "one_of", "positive", "whole"]

MOST = 1 << 31


def whole(name: str, value: Any) -> int:
    """Return ``value`` as an integer."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ConfigError(f"{name} must be an integer, got {value!r}")


def positive(name: str, value: Any) -> int:
    """Return ``value`` as an integer from 1 to 2**31."""
    try:
        number = whole(name, value)
    except ConfigError:
        number = 0
    if not 1 <= number <= MOST:
        raise ConfigError(f"{name} must be a positive integer up to {MOST}, got {value!r}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return ``value``, which is True or False."""
    if value is not True and value is not False:
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse ``value`` where it is none of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
