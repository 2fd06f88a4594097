"""This module judges whether something reads ahead between a loader and the training loop that steps.

A bare ``manager.step()`` takes all that the loop was given for consumed. That is wrong behind anything that holds
batches back: a queue, a thread, a framework's wrapper. `ReadAhead` looks at what the loop was given between one step
and the next, and suspects the loop by four rules, each a pure function of these events:

* a batch was given on another thread than the one that steps;
* a batch came from an iterator that had given others before the run was restored;
* the first step had n1 batches, and both next ones, of one iteration, the same n2 < n1 (the first filled something);
* a step had no batch since the one before, and the loader had come to the end of its rows.

It never looks at a clock, at rows or at threads itself. Used on the training thread by
`lakeckpt.checkpoint.consumed.tracks`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Given", "ReadAhead"]

_STEPS = 3
"""After so many steps it is decided whether the first one filled something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The batches that the loop was given from one step to the next."""

    batches: int = 0
    """How many batches (in row-wise use: rows)."""
    elsewhere: bool = False
    """True if one of them was given on another thread than the one that steps."""
    primed: bool = False
    """True if one of them came from an iterator that had given others before the run was restored."""
    recent: int = 0
    """How many of them the iterator gave that gave the last one."""
    fresh: bool = False
    """True if that iterator gave its first batch: the step before was then the last of another iteration, and may have
    had what was left."""
    over: bool = False
    """True if the loop was last given the end of the rows."""


class ReadAhead:
    """Judges one loop by its spans since the run was restored.

    >>> loop = ReadAhead()
    >>> for batches in (3, 1, 1):
    ...     loop.stepped(Given(batches=batches, recent=batches))
    >>> loop.reason
    'the first step was given 3 batches and the next two 1 each'
    """

    __slots__ = ("_counts", "_restarted", "reason")

    def __init__(self) -> None:
        self._counts: list[int] = []
        """The number of batches of each of the first steps. Steps that the end of an iteration cut short do not
        count."""
        self._restarted = False
        """True if an iteration began with the last of them."""
        self.reason = ""
        """Why the loop is suspected; empty: it is not, so far."""

    def stepped(self, given: Given) -> None:
        """Note a step that did not state what it used, and what was given since the step before."""
        if len(self._counts) < _STEPS and not (given.over and given.batches):
            self._counts.append(given.recent)
            self._restarted = given.fresh
        self.reason = self.reason or self._why(given)

    def _why(self, given: Given) -> str:
        if given.elsewhere:
            return "a batch was delivered on another thread than the one that steps"
        if given.primed:
            return "the iterator in use had delivered batches before restore()"
        if not given.batches and given.over:
            return "a step had no new batch, and the loader had come to the end of its rows before"
        if len(self._counts) == _STEPS:
            first, second, third = self._counts
            if second == third < first and not self._restarted:
                return f"the first step was given {first:,} batches and the next two {second:,} each"
        return ""
