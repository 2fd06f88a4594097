"""This module describes the state of a reader in short texts, so that ranks can compare it field by field.

Equal states give equal facts, in whatever order their dicts were filled. States that differ give some fact that
differs, and the fact names the field. The module never communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lakeckpt.wire.envelope import dumps

__all__ = ["facts_of"]

_KIND, _VERSION = "value", (1, 0)
_MOST_CHARACTERS = 60
_SHOWN = 25


def facts_of(state: Mapping[str, object]) -> dict[str, str]:
    """Return the facts of a plain state, by the path of each field. `UnsupportedValue` names a value that no checkpoint
    can hold.

    >>> facts_of({"step": 3, "identity": {"seed": 7}})
    {"'step'": '3', "'identity'/'seed'": '7', 'the fields': "'identity'/'seed', 'step'"}
    """
    dumps(dict(state), kind=_KIND, version=_VERSION)
    facts = {path: _shown(repr(value), value) for path, value in _leaves(state)}
    return {**facts, "the fields": _shown(", ".join(sorted(facts)), sorted(facts))}


def _leaves(state: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in state.items():
        path = f"{above}{name!r}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}/")
        else:
            yield path, _ordered(value)


def _shown(text: str, value: object) -> str:
    """Return a text that differs if values differ: a long one is named by both its ends and its digest."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    digest = dumps(value, kind=_KIND, version=_VERSION)[-16:].hex()
    return f"{text[:_SHOWN]} … {text[-_SHOWN:]} (digest {digest})"


def _ordered(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _ordered(value[name]) for name in sorted(value, key=repr)}
    if type(value) in (list, tuple):
        return type(value)(map(_ordered, value))  # type: ignore[call-arg, call-overload]
    return value
