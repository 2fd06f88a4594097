"""Which part of a state does ``model.layers.0`` name?  The one whose names, joined with dots, are that.

Names may have dots themselves, or be numbers, or places in a list, so that there can be several ways to one text. Where
more than one leads to something, none is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lakeckpt.errors import ConfigError

__all__ = ["part_of"]


def part_of(state: Mapping[Any, Any], item: str) -> dict[Any, Any]:
    """The part that ``item`` names: `ConfigError` where there is none, or several, or it is no state of its own."""
    reached = list(_reached(state, item))
    found = [one for rest, one in reached if rest is None]
    if not found:
        _, nearest = min(((rest, one) for rest, one in reached if rest is not None), key=lambda one: len(one[0]))
        names = ", ".join(str(name) for name, _ in _names_in(nearest))
        raise ConfigError(f"there is no {item!r} in this checkpoint: it holds {names[:400] or 'no names'}")
    if len(found) > 1:
        raise ConfigError(f"{item!r} names {len(found)} parts of this checkpoint: choose one around them")
    if not isinstance(found[0], Mapping):
        raise ConfigError(f"{item!r} of this checkpoint is a {type(found[0]).__name__}, not a state of several names")
    return dict(found[0])


def _reached(value: Any, item: str) -> Iterator[tuple[str | None, Any]]:
    """Each value on a way to ``item``, with what is left of that; None for one that it names whole."""
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
