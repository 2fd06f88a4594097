"""This module finds the parts of a state by names with dots, such as ``model.layers.0``.

Names may have dots themselves, or be numbers, or be places in a list, so one text can name several parts. Such a text
is refused. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lakeckpt.errors import ConfigError

__all__ = ["named_leaves", "part_of"]


def part_of(state: Mapping[Any, Any], item: str) -> dict[Any, Any]:
    """Return the part that ``item`` names: a state of several names.

    Raises `ConfigError` if there is no such part, or several, or if it is a single value.
    """
    reached = list(_reached(state, item))
    found = [one for rest, one in reached if rest is None]
    if not found:
        _, nearest = min(((rest, one) for rest, one in reached if rest is not None), key=lambda one: len(one[0]))
        names = ", ".join(str(name) for name, _ in _names_in(nearest))
        raise ConfigError(f"there is no {item!r} in this checkpoint: it holds {names[:400] or 'no names'}")
    if len(found) > 1:
        raise ConfigError(f"{item!r} names {len(found)} parts of this checkpoint: choose a part that contains them")
    if not isinstance(found[0], Mapping):
        raise ConfigError(f"{item!r} of this checkpoint is a {type(found[0]).__name__}, not a state of several names")
    return dict(found[0])


def named_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the values in a nested state, each with its name: the names on the way to it, joined with dots."""
    if isinstance(value, (Mapping, list, tuple)):
        for name, one in _names_in(value):
            yield from named_leaves(one, (*path, str(name)))
    else:
        yield ".".join(path), value


def _reached(value: Any, item: str) -> Iterator[tuple[str | None, Any]]:
    """Yield each value on a way to ``item``, with the rest of the name; None if the name ends there."""
    yield item, value
    for name, one in _names_in(value):
        if str(name) == item:
            yield None, one
        elif item.startswith(f"{name}."):
            yield from _reached(one, item[len(str(name)) + 1 :])


def _names_in(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()
