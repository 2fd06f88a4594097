"""What is the state of a reader of the whole job?  Where a rank knows a part of it only, the parts of all, joined.

Talks through what it is given, and does nothing else. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakeckpt.checkpoint.agreement import Talk
from lakeckpt.tracking.merge import is_part, merge_states
from lakeckpt.wire.codec import dumps, loads

__all__ = ["joined_state"]


def joined_state(state: Mapping[str, Any], talk: Talk) -> Any:
    """The state of the whole job, from this rank's ``state`` of a reader; collective where that is a part."""
    if not is_part(state):
        return state
    every = talk.combine(
        _packed([dict(state)]), lambda messages: _packed([one for m in messages for one in _unpacked(m)])
    )
    return merge_states(_unpacked(every))


def _packed(states: list[dict[str, Any]]) -> bytes:
    return dumps(states, kind="states", version=(1, 0))


def _unpacked(data: bytes) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = loads(data, kind="states", supported=(1, 0)).value
    return states
