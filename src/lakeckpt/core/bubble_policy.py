"""When may the next slice of a capture move?  Inside an idle window that outlasts it, as far as can be foreseen.

There are two kinds of windows. In a *bubble* the rank waits: for data, for a collective, for a neighbour in the
pipeline. *Free* time is that in which the rank computes, but what copies is idle (on a GPU the forward pass leaves the
link to the host alone). A slice is admitted into a bubble if, by `WindowHistory` and `SliceRate`, it will be over
before the bubble is. What the bubbles ahead of the fence will not hold is carried into free time, and only that; what
is left at the fence is waited for, which is not decided here.

How far is an open bubble trusted? As little as will do: by the lowest of three quantiles of its history (a tenth, the
lower quartile, the median) by which the bubbles ahead hold what is left. Where there is room, slices keep away from
ends that are not sure; where there is none, a slice that outlasts its bubble costs a part of what the same slice costs
at the fence.

How fast are slices copied? What copies as fast as it can takes the memory from ranks that compute: *gently*, it takes
longer and costs them less. So a slice is moved gently as long as the bubbles will hold three times the rest, as fast as
can be: first gently, and fast where bubbles turn out to be short. Where windows are foreseen, on a GPU, nothing is.

Which bubbles are used? The longest: one is left alone while longer ones are yet to come that hold all that is left and
more, at that pace. Each bubble in which slices move has an end that may come late by a part of one, so the fewer the
better. For both, gentleness and leaving alone, only bubbles count that the last two iterations both had.

On a GPU the host does not see the device wait: there the windows of an iteration are foreseen as a whole, each at its
time (`foresee`), and a slice must lie within one.

What is learnt of a bubble in which a slice was moving when it closed, or just before, is only that it lasted until that
slice began: the slice itself may have held the rank up.

So a receive that is posted is not delayed by a slice that was foreseen to end later; one that comes earlier than the
history says finds at most one slice in its way. Pure: the clock is an argument, nothing waits, nothing is locked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

from lakeckpt.core.slice_rate import SliceRate
from lakeckpt.core.window_history import BOLD, CAUTIOUS, USUAL, WindowHistory

__all__ = ["MOST_OF_A_SITE", "BubblePolicy", "IdleWindow", "Kind"]

Kind = Literal["bubble", "free"]

MOST_OF_A_SITE = 256
_ROOM = 1.25
"""Of what is left: what longer bubbles hold where a shorter one is left alone."""
_SPARE = 3.0
"""Of what is left after a slice: what bubbles hold as fast as can be, where that slice moves gently."""
_GENTLE = 2.5
_GENTLE_AT_MOST = 5.0
"""What a gentle slice takes of the time of another: until one was measured, and whatever was measured."""
_FEW = 64
"""Bubbles yet to come: so many are looked through whenever one opens."""
_JUST = 0.25
"""Of a slice's time: a window that closes so soon after a slice was over may have waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleWindow:
    """An idle window [begin_s, end_s) at ``site``."""

    site: str
    kind: Kind
    begin_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not self.begin_s <= self.end_s:
            raise ValueError(f"a window at {self.site!r} from {self.begin_s} to {self.end_s} s")


class BubblePolicy:
    """Admission of slices on one rank. Windows of one kind follow each other; a bubble may lie in free time.

    The n-th window at one site of an iteration is a site of its own, since the first micro-batch's wait is not like the
    last one's; all from the `MOST_OF_A_SITE`-th on are one: an evaluation between two steps may go through any number
    of batches.
    """

    def __init__(self, *, history: WindowHistory | None = None, rate: SliceRate | None = None) -> None:
        self.history = WindowHistory() if history is None else history
        self.rate = SliceRate() if rate is None else rate
        self._gentle_rate: SliceRate | None = None  # of those that were copied gently
        self._open: dict[Kind, tuple[str, float]] = {}
        self._seen: dict[str, int] = {}
        self._passed: dict[str, Kind] = {}  # sites of this iteration, in their order
        self._previous: dict[str, Kind] = {}
        self._before: dict[str, Kind] = {}  # those of the iteration before that
        self._ahead: dict[tuple[float, bool], dict[str, float]] = {}  # the lengths of the bubbles yet to come
        self._foreseen: tuple[IdleWindow, ...] = ()
        self._left_bytes = 0
        self._moving_since_s: float | None = None
        self._last_slice = (-inf, -inf)

    # --- what happens

    def begin_iteration(self) -> None:
        """The cut: an iteration ends here and the next begins. A window that is open stays one of the old iteration."""
        self._before, self._previous, self._passed = self._previous, self._passed, {}
        self._foreseen = ()
        self._ahead.clear()
        self._seen.clear()

    def begin_capture(self, size_bytes: int) -> None:
        """``size_bytes`` are to be moved before the fence."""
        self._left_bytes = size_bytes
        self._moving_since_s = None  # of one that was given up nobody told the end

    def foresee(self, windows: Iterable[IdleWindow]) -> None:
        """All windows of this iteration, at the times at which they will be, of a device that nobody sees wait."""
        self._foreseen = tuple(windows)

    @property
    def foresees(self) -> bool:
        """Whether windows of this iteration were foreseen."""
        return bool(self._foreseen)

    def open(self, site: str, kind: Kind, at_s: float) -> str:
        """A window opens; one of the same kind that is open is over. Returns its site with its number."""
        self.close(kind, at_s)
        number = self._seen[site] = min(self._seen.get(site, -1) + 1, MOST_OF_A_SITE - 1)
        name = f"{site} {number}"
        self._passed[name] = kind
        for lengths in self._ahead.values():
            lengths.pop(name, None)
        self._open[kind] = (name, at_s)
        return name

    def close(self, kind: Kind, at_s: float) -> IdleWindow | None:
        """The window of ``kind`` closes; None where none is open."""
        if kind not in self._open:
            return None
        site, begin_s = self._open.pop(kind)
        window = IdleWindow(site=site, kind=kind, begin_s=begin_s, end_s=max(begin_s, at_s))
        self.history.record(site, self._sure_until_s(window) - begin_s)
        if site not in self._passed:  # it was open across the cut, and is ahead again
            self._ahead.clear()
        return window

    def predict(self, site: str, length_s: float) -> None:
        """How long the window of this name will probably be: "site n" for the n-th of an iteration, from 0."""
        self.history.predict(site, length_s)
        self._ahead.clear()

    def _sure_until_s(self, window: IdleWindow) -> float:
        """Until when the window would have been open if nothing had moved in it.

        Where a slice is under way when it closes, or was over just before, the rank may have come back late because of
        it. A length that was stretched so would let more slices in the next time, which stretch it more.
        """
        begin_s, end_s = self._last_slice
        if self._moving_since_s is not None:
            begin_s = self._moving_since_s
        elif end_s == -inf or window.end_s - end_s > _JUST * (end_s - begin_s):
            return window.end_s
        return min(window.end_s, max(window.begin_s, begin_s))

    def admitted(self, at_s: float) -> None:
        """A slice begins to move because it was admitted; `moved` will tell its end."""
        self._moving_since_s = at_s

    def moved(self, size_bytes: int, begin_s: float, end_s: float, *, gently: bool = False) -> None:
        """A slice was copied, wherever; or what was admitted with it was done, of no bytes."""
        self._moving_since_s = None
        self._last_slice = (begin_s, end_s)
        if size_bytes:
            rate = self.rate
            if gently:
                rate = self._gentle_rate = self._gentle_rate or SliceRate()
            rate.record(size_bytes, end_s - begin_s)
            self._left_bytes = max(0, self._left_bytes - size_bytes)

    def fenced(self, size_bytes: int) -> None:
        """A slice was copied at the fence, by whoever waited there: it says nothing of the rate of copies beside."""
        self._left_bytes = max(0, self._left_bytes - size_bytes)

    # --- what is decided

    def admits_at(self, size_bytes: int, at_s: float, *, gently: bool | None = None) -> float | None:
        """The instant, ``at_s`` or later, from which a slice of ``size_bytes`` may move if no window opens or closes.

        None: not before another window opens. ``gently``: what `has_time` says of it, where it was asked already.
        """
        gently = self.has_time(size_bytes, at_s) if gently is None else gently
        need_s = self._gentle_s(size_bytes) if gently else self.rate.seconds(size_bytes)
        trust = CAUTIOUS if gently else self._trust(size_bytes, at_s)
        found = [
            begin_s
            for window in self._foreseen
            if (begin_s := max(at_s, window.begin_s)) + need_s <= window.end_s
            and (window.kind == "bubble" or trust == BOLD)
        ]
        for kind, (site, begin_s) in self._open.items():
            if kind == "bubble" and self._is_spared(site, size_bytes, at_s - begin_s):
                continue
            if kind == "bubble" or trust == BOLD:
                ready_s = self.history.ready_s(site, max(0.0, at_s - begin_s), need_s, trust)
                found.append(max(at_s, begin_s + ready_s))
        return min(found, default=None)

    def has_time(self, size_bytes: int, at_s: float) -> bool:
        """Whether to move a slice gently: after it, or without the bubble that is open where it does not fit into that,
        the bubbles hold three times the rest, as fast as can be."""
        if "bubble" not in self._open or self._foreseen:
            return False
        gentle_s = self._gentle_s(size_bytes)
        fast_s = max(self.rate.seconds(size_bytes), gentle_s / _GENTLE)  # none may have been measured of late
        now_s = self._remaining_s(at_s, CAUTIOUS)
        fits = now_s >= gentle_s
        holds_bytes = self._ahead_bytes(size_bytes, at_s, CAUTIOUS, fast_s, surely=True)
        holds_bytes += int((now_s - gentle_s) / fast_s) * size_bytes if fits else 0
        rest_bytes = max(self._left_bytes, size_bytes) - (size_bytes if fits else 0)
        return holds_bytes >= _SPARE * rest_bytes

    def _gentle_s(self, size_bytes: int) -> float:
        """What a slice will take that is moved gently."""
        fast_s = self.rate.seconds(size_bytes)
        if self._gentle_rate is None:
            return _GENTLE * fast_s
        return min(max(fast_s, self._gentle_rate.seconds(size_bytes)), _GENTLE_AT_MOST * fast_s)

    def may_hold(self, name: str, size_bytes: int) -> bool:
        """Whether the window that `open` gave this name to may last as long as a slice of ``size_bytes`` takes, by the
        longest that is known of it; yes where nothing is. Whoever would have to be woken need not be, where not."""
        if self.history.longest_s(name) < self.rate.seconds(size_bytes):
            return False
        # Whether it is left alone is asked once more before a slice moves: here only where that costs little.
        return len(self._sites_ahead(CAUTIOUS, surely=True)) > _FEW or not self._is_spared(name, size_bytes, 0.0)

    def _is_spared(self, site: str, slice_bytes: int, elapsed_s: float) -> bool:
        """Whether a bubble that is open for ``elapsed_s`` is left alone: longer ones are yet to come that hold all that
        is left, and more. Not one of which nothing is known, or that outlasts all that is."""
        need_s = self._gentle_s(slice_bytes)
        if need_s <= 0 or not elapsed_s <= self.history.longest_s(site) < inf:
            return False
        length_s = self.history.expected_s(site)
        slices = sum(int(one / need_s) for one in self._lengths_ahead(CAUTIOUS, surely=True) if one > length_s)
        return slices * slice_bytes >= _ROOM * max(self._left_bytes, slice_bytes)

    def capacity_bytes(self, slice_bytes: int, at_s: float, trust: float = USUAL) -> int:
        """What the rest of the bubble that is open and the bubbles yet to come before the next cut will hold, in whole
        slices, if the iteration is like the one before, by the quantile ``trust`` of their histories."""
        need_s = self.rate.seconds(slice_bytes)
        if need_s <= 0:
            return self._left_bytes
        now = int(self._remaining_s(at_s, trust) / need_s) * slice_bytes
        return now + self._ahead_bytes(slice_bytes, at_s, trust, need_s)

    def _ahead_bytes(self, slice_bytes: int, at_s: float, trust: float, need_s: float, *, surely: bool = False) -> int:
        """What the bubbles hold that are not open yet."""
        slices = sum(int(length_s / need_s) for length_s in self._lengths_ahead(trust, surely=surely))
        for one in self._foreseen:
            if one.kind == "bubble" and one.begin_s > at_s:
                slices += int((one.end_s - one.begin_s) / need_s)
        return slices * slice_bytes

    def _remaining_s(self, at_s: float, trust: float) -> float:
        """How much longer the bubble will be that is open; 0 where none is."""
        found = [one.end_s - at_s for one in self._foreseen if one.kind == "bubble" and one.begin_s <= at_s < one.end_s]
        if "bubble" in self._open:
            site, begin_s = self._open["bubble"]
            found.append(self.history.remaining_s(site, max(0.0, at_s - begin_s), trust))
        return max(found, default=0.0)

    def _lengths_ahead(self, trust: float, *, surely: bool = False) -> Iterable[float]:
        return self._sites_ahead(trust, surely=surely).values()

    def _sites_ahead(self, trust: float, *, surely: bool) -> dict[str, float]:
        """The lengths of the bubbles yet to come in this iteration, by the quantile ``trust`` of their histories.

        ``surely``: of those alone that both of the last two iterations had. An iteration may be of another kind than
        the one before: with an evaluation in it, or of two kinds that take turns."""
        lengths = self._ahead.get((trust, surely))
        if lengths is None:
            lengths = self._ahead[trust, surely] = {
                site: self.history.expected_s(site, trust)
                for site, kind in self._previous.items()
                if kind == "bubble" and site not in self._passed and (site in self._before or not surely)
            }
        return lengths

    def _trust(self, slice_bytes: int, at_s: float) -> float:
        """The lowest quantile by which the bubbles hold what is left; `BOLD` where not even the usual one does."""
        if not self._open and not self._foreseen:
            return USUAL
        for trust in (CAUTIOUS, USUAL):
            if self._left_bytes <= self.capacity_bytes(slice_bytes, at_s, trust):
                return trust
        return BOLD
