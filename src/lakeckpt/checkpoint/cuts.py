"""Where are the readers at this cut?  The bookkeeping of receipts between optimizer steps, one line of work per step.

At each cut every tracked reader has been consumed up to a receipt: the one that the user names, else the last that was
delivered. `ReaderTrack` remembers it, notes the frontier for the record of steps, and gives states and records of what
was consumed as of the cut, whatever has been delivered since. `Journal` keeps the records of all readers until a commit
has them. It never communicates.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.checkpoint.journal import Leg
from lakeckpt.checkpoint.manifest import ReaderRecord, Stretch
from lakeckpt.core.plan import consumption
from lakeckpt.core.read_ahead import Basis, ReadAhead, Span
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.skips import SkipList
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import ConfigError, StateInvalid
from lakeckpt.tracking.readers import DeliveringReader, SkippingReader, TrackedReader, index_of, versions_of
from lakeckpt.tracking.steps import Frontier, StepRecorder, frontier_after

__all__ = ["Journal", "Place", "ReaderTrack", "by_reader", "cut_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a reader is at a cut."""

    receipt: Receipt | None
    """Up to where it has been consumed; None: nothing since the last commit, or since the state was loaded."""
    state: Mapping[str, Any]
    """Its plain state (where consumption depends on the data: this rank's part)."""
    skips: SkipList = field(default_factory=SkipList)
    """What this rank had to skip: of the epochs that are not over, and since the last commit."""


class ReaderTrack:
    """One tracked reader, from a restore on."""

    __slots__ = (
        "_ahead",
        "_at",
        "_attempt",
        "_basis",
        "_before",
        "_frontier",
        "_last",
        "_recorded",
        "_recorded_skips",
        "_recorder",
        "delivered",
        "name",
        "reader",
    )

    def __init__(self, name: str, reader: TrackedReader, *, attempt: int = -1) -> None:
        self.name = name
        self.reader = reader
        self._attempt = attempt
        self._ahead = ReadAhead()
        self._basis: Basis = "stated"
        if isinstance(reader, DeliveringReader):
            reader.deliveries.begin_run(name)
        reader.mark()  # what was delivered before is not of this run's history
        self._last = reader.last_receipt  # that was delivered then: where it is still the last one, nothing was since
        self._before = reader.last_receipt  # up to here it is recorded, or was delivered before the run began
        self._recorded: Mapping[str, Any] = reader.state_dict()
        self._recorded_skips = self._skipped(None)
        self._recorder = StepRecorder()
        self._frontier: Frontier | None = None
        self._at: Receipt | None = None  # consumed since then
        self.delivered = 0
        """How many batches (or rows) it has delivered up to the last step, as far as it counts them."""

    def taken(self) -> Span | None:
        """What was delivered since the last step; None where the reader does not count it."""
        span = self.reader.deliveries.take() if isinstance(self.reader, DeliveringReader) else None
        self.delivered += 0 if span is None else span.batches
        return span

    def cut(self, step: int, consumed: Receipt | None, *, is_stated: bool, span: Span | None) -> str:
        """Note that optimizer step ``step`` is done, with all up to ``consumed``: the user stated it; or stated that of
        other readers alone (None): then nothing more of this one; or stated nothing (None): then all that was
        delivered. ``span`` is what was delivered since the last step, where it tells of the loop.

        Returns why that is suspected, where it is since this step; else an empty text.
        """
        known, last = self._ahead.reason, self.reader.last_receipt
        at = last if consumed is None or consumed == last else consumed
        if not is_stated or consumed is not None:
            self._basis = self._basis_of(at, is_stated=is_stated, span=span)
            # An epoch that is read once more gives receipts that are equal to those of the time before.
            was_before = at is self._before or (at == self._before and last is self._last)
            if at is not None and not was_before:
                self._at, self._frontier = at, frontier_after(at)
        if self._frontier is not None:
            self._recorder.note(step, self._frontier)
        return "" if known else self._ahead.reason

    def _basis_of(self, at: Receipt | None, *, is_stated: bool, span: Span | None) -> Basis:
        """How it is known that all up to ``at`` is consumed."""
        if is_stated or (self._basis == "stated" and at is not None and at == self._at):
            return "stated"
        if not isinstance(self.reader, DeliveringReader):
            return "inferred"
        if span is not None:
            self._ahead.stepped(span)
        return self._ahead.basis

    def check(self, receipt: Receipt) -> None:
        """Refuse a receipt that a step cannot state: of what was not delivered, or of before what a step has used."""
        last = self.reader.last_receipt
        if receipt == last:
            return
        self.reader.state_dict(receipt)
        used, after = self._frontier, frontier_after(receipt)
        if used is not None and last is not None and after < used <= frontier_after(last):
            raise ConfigError(
                f"step() was given epoch {receipt.epoch}, step {receipt.step} of reader {self.name!r}, and an earlier "
                f"step has used up to epoch {used.epoch}, step {used.step - 1}: give it the last batch that this step "
                "used, of this reader"
            )

    def place(self) -> Place:
        """The place at the last cut."""
        # Where all that was delivered is consumed, the reader also says whether the loop has seen the epoch's end: what
        # a script does there (a scheduler's step, say) is in the objects then, and must not be done again.
        last = self.reader.last_receipt
        if self._at is None:
            is_all = last is self._last and last == self._before
            state = self.reader.state_dict() if is_all else self._recorded
            return Place(receipt=None, state=state, skips=self._recorded_skips)
        state = self.reader.state_dict(None if last is self._at else self._at)
        return Place(receipt=self._at, state=state, skips=self._skipped(self._at))

    def _skipped(self, at: Receipt | None) -> SkipList:
        return self.reader.skipped(at) if isinstance(self.reader, SkippingReader) else SkipList()

    def leg(self, first: int, step: int) -> Leg:
        """From the cut of step ``first``, which was handed over, to the last cut, that of ``step``; it stays open."""
        place = self.place()
        found = () if place.receipt is None else self.reader.stretches(place.receipt)
        stretches = [(begin.to_plain(), end.to_plain(), consumption(begin, end)) for begin, end in found]
        if self._basis == "suspected" and not stretches:
            stretches = [(dict(place.state), dict(place.state), {})]  # nothing was consumed, and the ledger must say it
        record = ReaderRecord(
            state=place.state,
            stretches=tuple(
                Stretch(
                    begin=begin,
                    end=end,
                    consumed=consumed,
                    basis=self._basis,
                    reason=self._ahead.reason if self._basis == "suspected" else "",
                    attempt=self._attempt,
                )
                for begin, end, consumed in stretches
            ),
            steps=self._recorder.record(step),
            index=self._index_of(place.state),
            skips=place.skips,
        )
        return Leg(first=first, step=step, record=record)

    def _index_of(self, state: Mapping[str, Any]) -> str | None:
        """The digest of the index that ``state`` is of: a reader may be at a newer version than a receipt."""
        index = index_of(self.reader)
        if index is None:
            return None
        try:
            table = ReaderState.from_plain(state).identity.table
        except StateInvalid:
            return str(index.digest)  # a rank's part of a state: such readers stay at one version
        return table if table in {one.digest for one, _ in versions_of(self.reader)} else str(index.digest)

    def handed_over(self, step: int) -> None:
        """The leg to the last cut, that of ``step``, was handed over: the next one begins there."""
        place = self.place()
        self._recorder.forget(step)
        if place.receipt is None:
            return
        self.reader.mark(place.receipt)
        self._last = self.reader.last_receipt
        self._before, self._recorded = place.receipt, place.state
        self._recorded_skips = place.skips
        if self._at == place.receipt:
            self._at = None


class Journal:
    """The legs of all tracked readers since the newest commit, from a restore at ``step`` on.

    ``recorded`` is the step of that commit, and ``legs`` say what was consumed since, up to ``step``. A reader without
    any joined at ``step``: nothing of it was consumed before.
    """

    __slots__ = ("_closed", "_from", "_tracks")

    def __init__(
        self,
        tracks: Mapping[str, ReaderTrack],
        step: int,
        *,
        legs: Mapping[str, tuple[Leg, ...]] | None = None,
        recorded: int | None = None,
    ) -> None:
        self._tracks = tracks
        self._from = step
        self._closed = {name: list((legs or {}).get(name, ())) for name in tracks}
        for name, closed in self._closed.items():
            if recorded is not None and recorded < step and not closed:
                closed.append(tracks[name].leg(recorded, step))

    def legs(self, step: int) -> dict[str, tuple[Leg, ...]]:
        """reader → its legs up to the last cut, that of ``step``."""
        return {name: (*self._closed[name], track.leg(self._from, step)) for name, track in self._tracks.items()}

    def handed_over(self, legs: Mapping[str, tuple[Leg, ...]], step: int) -> None:
        """``legs``, of the last cut, were handed over: new ones begin at ``step``."""
        for name, track in self._tracks.items():
            track.handed_over(step)
            self._closed[name] = list(legs[name])
        self._from = step

    def committed(self, step: int) -> None:
        """A commit has recorded all up to ``step``."""
        for name, legs in self._closed.items():
            self._closed[name] = [leg for leg in legs if leg.step > step]


def cut_all(tracks: Mapping[str, ReaderTrack], step: int, stated: Mapping[str, Receipt] | None) -> dict[str, str]:
    """Note for all readers that optimizer step ``step`` is done; ``stated`` as `by_reader` gives it.

    Returns reader → why something seems to read ahead of it, for those of which this step shows it.
    """
    spans = {name: track.taken() for name, track in tracks.items()}
    delivered = any(span is not None and span.batches for span in spans.values())
    reasons = {}
    for name, track in tracks.items():
        span = spans[name]
        tells = span is not None and (span.batches > 0 or not delivered)  # else another reader had its turn
        consumed = None if stated is None else stated.get(name)
        reasons[name] = track.cut(step, consumed, is_stated=stated is not None, span=span if tells else None)
    return {name: reason for name, reason in reasons.items() if reason}


def by_reader(stated: Any, tracks: Mapping[str, ReaderTrack]) -> Mapping[str, Receipt] | None:
    """reader → the receipt that the user named for it, by a batch, a receipt, a number, or a mapping of names to these.
    None where nothing was stated.

    `ConfigError` where that names no place in a reader, a place before what was used, or not which reader it is of;
    `StateUnavailable` where the reader has not delivered it since the last save.
    """
    if stated is None:
        return None
    if not tracks:
        raise ConfigError(
            "step() was given a batch, and no tracked reader is in the manager's state: put the LakeLoader into it, "
            'CheckpointManager(…, {"reader": loader, …}). With another loader there, such as torchdata\'s '
            "StatefulDataLoader, call step() without a batch"
        )
    if isinstance(stated, Mapping) and stated and not hasattr(stated, "receipt") and set(stated) <= set(tracks):
        return {name: _receipt(one, tracks[name]) for name, one in stated.items()}
    if len(tracks) > 1:
        raise ConfigError(
            f"there are {len(tracks)} tracked readers ({', '.join(sorted(tracks))}): give step() a mapping of their "
            f"names to batches, got {_shown(stated)}"
        )
    name, track = next(iter(tracks.items()))
    return {name: _receipt(stated, track)}


def _receipt(stated: Any, track: ReaderTrack) -> Receipt:
    """The receipt that a batch, a receipt or a number stands for."""
    found = stated if isinstance(stated, Receipt) else getattr(stated, "receipt", None)
    if isinstance(found, Receipt):
        track.check(found)
        return found
    reader = track.reader
    column = getattr(reader, "receipt_column", None)
    if isinstance(stated, Mapping) and column in stated:
        stated = stated[column]
    number = _number(stated)
    if number is None or column is None:
        raise ConfigError(
            "step() takes the last batch that the step used; or its receipt (batch.receipt, or loader.last_receipt "
            "when the batch came), or the number that LakeLoader(receipt_column=…) put into it; got "
            f"{_shown(stated)} for reader {track.name!r}, whose receipt_column is {column!r}"
        )
    assert isinstance(reader, DeliveringReader)
    found = reader.receipt_of(number)
    track.check(found)
    return found


def _number(stated: Any) -> int | None:
    """An integer, or the largest element of a tensor, an array or a list of them."""
    if hasattr(stated, "max") and hasattr(stated, "dtype"):
        stated = stated.max() if stated.shape else stated
    elif isinstance(stated, (list, tuple)) and stated and all(type(one) is int for one in stated):
        stated = max(stated)
    try:
        return None if isinstance(stated, bool) else operator.index(stated)
    except TypeError:
        return None


def _shown(stated: Any) -> str:
    if isinstance(stated, Mapping):
        return f"a {type(stated).__name__} with {sorted(map(str, stated))[:8]}"
    return f"{stated!r:.60}"
