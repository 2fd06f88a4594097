"""This module says, in one line each, what a restart has otherwise than the attempt before it.

An attempt records in its begin what its script gave to each reader. The next attempt compares: a line of the logger
"lakeckpt", at INFO, for what the run goes on with, and a `RestartWarning` for weights of a mixture that are ignored.
Rank 0 alone calls it. The module reads nothing, and starts no threads.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from lakeckpt.checkpoint.format.manifest import Begin, Facts
from lakeckpt.errors import RestartWarning

__all__ = ["facts_of", "recorded", "say_changes"]

_LOG = logging.getLogger("lakeckpt")
_IGNORED = (
    "{!r}: the weights of the mixture in this script, {}, are ignored: the run began with {}, and goes on with {}. To "
    "change them, call loader.set_weights(…) after restore(), on every rank; else give mix() the weights that it had"
)


def facts_of(objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return name of a reader → what its script gave → a text."""
    found: dict[str, dict[str, str]] = {}
    for name, one in objects.items():
        if facts := getattr(one, "facts", None):
            found[name] = dict(facts)
    return found


def say_changes(begin: Begin, before: Begin | None, objects: Mapping[str, Any]) -> None:
    """Log what ``begin``, which was put, has otherwise than ``before``, the attempt before it; None: it is the first.
    Warn of weights that are ignored."""
    if before is None:
        return
    if begin.world_size != before.world_size:
        _LOG.info("this attempt has %d ranks, and the attempt before it had %d", begin.world_size, before.world_size)
    for name, facts in facts_of(objects).items():
        known = before.facts.get(name, {})
        ignored = _is_ignored(name, facts, before.facts, objects)
        for what in sorted(facts.keys() & known.keys()):
            if facts[what] != known[what] and not (ignored and what == "weights"):
                _LOG.info("%r: %s is %s, and was %s in the attempt before", name, what, facts[what], known[what])
        if ignored:
            text = _IGNORED.format(name, facts["weights"], known["weights"], _weights_in_force(name, objects))
            warnings.warn(text, RestartWarning, stacklevel=6)


def recorded(facts: Facts, before: Begin | None, objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return ``facts`` as an attempt records them: of weights that are ignored, those that the run began with, so that
    each restart warns until somebody acts."""
    found = {name: dict(of_reader) for name, of_reader in facts.items()}
    for name, of_reader in found.items():
        if before is not None and _is_ignored(name, of_reader, before.facts, objects):
            of_reader["weights"] = before.facts[name]["weights"]
    return found


def _is_ignored(name: str, facts: Mapping[str, str], before: Facts, objects: Mapping[str, Any]) -> bool:
    """Return whether the weights that the script gives reader ``name`` neither are those that it gave before, nor those
    with which the run goes on."""
    was = before.get(name, {}).get("weights")
    return was is not None and facts.get("weights") not in (None, was, _weights_in_force(name, objects))


def _weights_in_force(name: str, objects: Mapping[str, Any]) -> str:
    """Return the weights with which the mixture that reader ``name`` reads goes on."""
    return str(getattr(objects.get(name), "weights", ""))
