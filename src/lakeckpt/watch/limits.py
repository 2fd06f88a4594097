"""This module learns from a job itself how long its ranks may stand still before somebody looks.

The limit of a phase is the largest of 3 s, three times the median of the last 63 steps, and one and a half times the
longest gap between two beats that the job had in this phase; at most 10 min. Before eight steps it is 60 s, and nothing
is acted on. A gap is longer than the job's habits allow before a look is taken, and far longer before anything is done:
`StallLimits.act_after_s`.

A job writes its gaps into its run, so that the next attempt knows them. The module is pure, and starts no threads.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["ACT_S", "FEW_STEPS", "Habits", "StallLimits"]

ACT_S = 300.0
"""So long ranks may stand still, without doing anything, if nobody says otherwise."""
FEW_STEPS = 8
"""Before so many steps nothing is known of a job."""
_LEAST_S, _MOST_S, _FIRST_S = 3.0, 600.0, 60.0
_STEPS, _TIMES, _LONGEST = 63, 3.0, 1.5
_KIND, _VERSION = "habits", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What an attempt knows of its job: phase → its longest gap, in seconds, and the length of a step."""

    longest_s: Mapping[str, float]
    step_s: float = 0.0

    def to_bytes(self) -> bytes:
        """Return the document."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> Habits:
        """Return what is in a document of `to_bytes`. Raises `WireError`."""
        found: Habits = from_plain(cls, loads(data, kind=_KIND, supported=_VERSION), "the habits of a job")
        return found


class StallLimits:
    """The limits of a job. ``habits``: those of its last attempt. ``act_s``: ranks that do nothing are not ended
    before so many seconds."""

    def __init__(self, habits: Habits | None = None, *, act_s: float = ACT_S) -> None:
        self._act_s = act_s
        self._longest = dict(habits.longest_s) if habits else {}
        self._known_s = habits.step_s if habits else 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._count = 0

    def stepped(self, lengths_s: Iterable[float]) -> None:
        """Steps of these lengths were finished."""
        for one in lengths_s:
            self._steps.append(one)
            self._count += 1

    def gap(self, phase: str, length_s: float) -> None:
        """A gap between two beats in ``phase`` has ended: it was none of a hang."""
        if length_s > self._longest.get(phase, 0.0):
            self._longest[phase] = length_s

    @property
    def is_new(self) -> bool:
        """True while too little is known to act."""
        return self._count < FEW_STEPS

    @property
    def step_s(self) -> float:
        """The median of the last steps."""
        return statistics.median(self._steps) if self._steps else self._known_s

    @property
    def habits(self) -> Habits:
        """What the next attempt is to know."""
        return Habits(longest_s=dict(self._longest), step_s=self.step_s)

    def look_after_s(self, phase: str) -> float:
        """Return for how long all ranks may stand still before somebody looks, the slowest of them in ``phase``."""
        if self.is_new and not self._known_s:
            return max(_FIRST_S, _LONGEST * self._longest.get(phase, 0.0))
        learnt = max(_LEAST_S, _TIMES * self.step_s, _LONGEST * self._longest.get(phase, 0.0))
        return min(_MOST_S, learnt)

    def act_after_s(self, phase: str) -> float:
        """Return for how long ranks may stand still, without doing anything, before the job is started again."""
        return max(self._act_s, 2 * self._longest.get(phase, 0.0))
