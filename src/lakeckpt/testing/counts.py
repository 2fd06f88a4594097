"""Is this a number of things?  A check for arguments of the kit, which costs a test suite no import.

Integers of numpy are as good as Python's; a bool is none.
"""

from __future__ import annotations

import operator
from typing import Any

from lakeckpt.errors import ConfigError

__all__ = ["count"]


def count(name: str, value: Any, *, least: int, otherwise: str = "") -> int:
    """Return ``value`` as an integer; ConfigError where it is none, or below ``least``.

    ``otherwise`` says, for people, what it may be instead.

    >>> count("chains", 3, least=0)
    3
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name} must be an integer of at least {least}{otherwise}, got {value!r}")
    return number
