"""Is this argument one that can be?  Small checks with messages that name the argument and what was got.

Integers of numpy and of torch are as good as Python's; a bool is never an integer, nor the other way round.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from typing import Any

import pyarrow as pa

from lakeckpt.core.state import MAX_EPOCHS_AT_ONCE, MAX_LANES, Identity
from lakeckpt.errors import ConfigError, SchemaError

__all__ = ["accepted_changes", "check_lanes", "chosen_columns", "flag", "one_of", "optional", "positive", "whole"]

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


def optional(name: str, value: object) -> int | None:
    """As `positive`, or None."""
    return None if value is None else positive(name, value)


def flag(name: str, value: Any) -> bool:
    """Return ``value``, which is True or False."""
    if value is not True and value is not False:
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse ``value`` where it is none of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def accepted_changes(changes: Any, overridable: Set[str]) -> frozenset[str]:
    """Return the names of ``changes``, each of which is ``overridable``."""
    if isinstance(changes, (str, bytes)) or not isinstance(changes, Iterable):
        raise ConfigError(f"accept_changes is a list of names, got {changes!r}: write [{changes!r}]")
    names = list(changes)
    others = [name for name in names if not isinstance(name, str) or name not in overridable]
    if others:
        raise ConfigError(
            f"accept_changes may name {', '.join(sorted(overridable))}, got {others}: any other change gives positions "
            "another meaning, and the rest of the epoch could not be read exactly"
        )
    return frozenset(names)


def check_lanes(identity: Identity, num_lanes: int, batch_size: int) -> None:
    """Refuse so many lanes, or micro-batches of an endless stream that reach over too many epochs."""
    if num_lanes > MAX_LANES:
        raise ConfigError(f"an epoch has at most {MAX_LANES} lanes, got {num_lanes}: give a smaller num_lanes=")
    epochs = identity.epochs_at_once(num_lanes, batch_size)
    if epochs > MAX_EPOCHS_AT_ONCE:
        raise ConfigError(
            f"an endless stream of {identity.rows} rows an epoch, in {num_lanes} lanes: a micro-batch of {batch_size} "
            f"rows reaches over {epochs} epochs, and at most {MAX_EPOCHS_AT_ONCE} can be: give a smaller batch_size= "
            "or num_lanes="
        )


def chosen_columns(schema: pa.Schema, columns: Sequence[str] | None) -> list[str] | None:
    """Columns by name, each once, of ``schema``; None: all. `ConfigError`, `SchemaError`."""
    if columns is None:
        return None
    named = isinstance(columns, Iterable) and not isinstance(columns, (str, bytes, Set))  # a set has no order
    if not named or not all(isinstance(name, str) for name in columns):
        raise ConfigError(f"columns must be a list of names, got {columns!r}")
    names = list(columns)
    if not names:
        raise ConfigError("columns must name at least one column, got none")
    if len(set(names)) != len(names):
        raise ConfigError(f"columns are named twice: {sorted({name for name in names if names.count(name) > 1})}")
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise SchemaError(f"the table has no column {', '.join(map(repr, missing))}; it has {schema.names}")
    return names
