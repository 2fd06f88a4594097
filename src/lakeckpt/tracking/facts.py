"""What does a rank say of its reader state, so that all ranks' can be compared field by field, and a difference named?

`facts_of` gives a short text for each field, that of nested ones by its path: equal states give equal facts, in
whatever order their dicts were filled, and states that differ give some fact that does. Never communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lakeckpt.wire.envelope import dumps

__all__ = ["facts_of"]

_KIND, _VERSION = "value", (1, 0)
_MOST_CHARACTERS = 60
_SHOWN = 25
_FIELDS = "the fields"


def facts_of(state: Mapping[str, object]) -> dict[str, str]:
    """The facts of a plain state, by the path of each field. `UnsupportedValue` names what no checkpoint can hold.

    >>> facts_of({"step": 3, "identity": {"seed": 7}})
    {"'step'": '3', "'identity'/'seed'": '7', 'the fields': "'identity'/'seed', 'step'"}
    """
    dumps(dict(state), kind=_KIND, version=_VERSION)
    leaves = dict(_leaves(state))
    facts = {path: _told(value) for path, value in leaves.items()}
    return {**facts, _FIELDS: _short(", ".join(sorted(leaves)), sorted(leaves))}


def _leaves(state: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in state.items():
        path = f"{above}{name!r}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}/")
        else:
            yield path, value


def _told(value: object) -> str:
    value = _ordered(value)
    return _short(repr(value), value)


def _short(shown: str, value: object) -> str:
    """A text that differs where values do: what is long is named by both its ends and its digest."""
    if len(shown) <= _MOST_CHARACTERS:
        return shown
    digest = dumps(value, kind=_KIND, version=_VERSION)[-16:].hex()
    return f"{shown[:_SHOWN]} … {shown[-_SHOWN:]} (digest {digest})"


def _ordered(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _ordered(value[name]) for name in sorted(value, key=repr)}
    if type(value) in (list, tuple):
        return type(value)(map(_ordered, value))  # type: ignore[call-arg, call-overload]
    return value
