"""This module chooses the offsets of an epoch at which a job is restored, and checks arguments that count something.

The caller says how many offsets; else the environment variable that the pytest plugin sets; else a dozen, the first and
the last among them. Integers of numpy are as good as Python's; a bool is none. It costs a test suite no import.
"""

from __future__ import annotations

import operator
import os
from typing import Any, Literal

from lakeckpt.errors import ConfigError

__all__ = ["DEFAULT_OFFSETS", "VARIABLE", "Offsets", "chosen", "count", "told", "wanted"]

Offsets = int | Literal["all"]

VARIABLE = "LAKECKPT_TEST_OFFSETS"
DEFAULT_OFFSETS = 12


def wanted(offsets: Offsets | None) -> Offsets:
    """Return ``offsets``, or what this run wants where it is None; ConfigError where that is no number of offsets."""
    if offsets is None:
        return told(os.environ.get(VARIABLE, str(DEFAULT_OFFSETS)), f"{VARIABLE} (the marker's, or the option's)")
    return "all" if offsets == "all" else count("offsets", offsets, least=1, otherwise=" or 'all'")


def told(text: str, by: str) -> Offsets:
    """Return what ``text`` says, which came ``by`` a variable or an option."""
    if text == "all":
        return "all"
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{by} must be an integer of at least 1 or 'all', got {text!r}")
    return int(text)


def chosen(offsets: Offsets, existing: int) -> list[int]:
    """Return which of the offsets 0 … ``existing`` - 1 to restore at: evenly spread, the first and the last among them.

    >>> chosen(3, 11), chosen("all", 3), chosen(1, 9)
    ([0, 5, 10], [0, 1, 2], [4])
    """
    if offsets == "all" or existing <= offsets:
        return list(range(existing))
    if offsets == 1:
        return [existing // 2]
    return sorted({round(i * (existing - 1) / (offsets - 1)) for i in range(offsets)})


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
