"""This module has `functools.cached_property` without the lock that it holds in Python 3.11 while a value is computed.

The lock is one for all objects of a class. A process that was forked while a thread of its parent computed a value
would find the lock taken, and wait forever. Without it, two threads that ask at once both compute the value, as from
Python 3.12 on: so a value must be a pure function of its object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

__all__ = ["cached_property"]

_T = TypeVar("_T")


class cached_property(functools.cached_property[_T]):  # noqa: TID251
    """`functools.cached_property`, which takes no lock in any Python."""

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        super().__init__(compute)
        self.lock = nullcontext()
