"""This module tracks what each reader of the manager has consumed, from optimizer step to optimizer step.

At each cut, a tracked reader has been consumed up to a receipt: the receipt that the user states, otherwise the last
one that was delivered. `ReaderTrack` keeps this receipt and the record of steps. It returns states and records as of
the cut, even if the reader has delivered more since. `Journal` keeps the records of all readers until a commit has
them.

The training thread makes all calls. The module never communicates with other ranks, and starts no threads.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from lakeckpt.checkpoint.consumed.excluded import Opening
from lakeckpt.checkpoint.consumed.pending import PendingRecord, positions
from lakeckpt.checkpoint.format.manifest import Excluded, ReaderRecord, Stretch
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.read_ahead import Given, ReadAhead
from lakeckpt.core.state import State, depends_on_data
from lakeckpt.core.streams.mixed_batches import AnyReceipt, MixedReceipt
from lakeckpt.errors import ConfigError, StateError
from lakeckpt.tracking.readers import DeliveringReader, TrackedReader, index_of, versions_of
from lakeckpt.tracking.steps import Frontier, StepRecorder, frontier_after

__all__ = ["Journal", "Pending", "ReaderTrack", "by_reader", "cut_all", "skip", "tracks_of"]


Pending = Mapping[str, tuple[PendingRecord, ...]]
"""Reader → its pending records."""


class ReaderTrack:
    """The consumption of one tracked reader since a restore."""

    def __init__(self, name: str, reader: TrackedReader, *, attempt: int = -1, opening: Opening | None = None) -> None:
        self.name = name
        self.reader = reader
        self._attempt = attempt
        self._ahead = ReadAhead()
        self._is_stated = True
        self._run = reader.deliveries.begin_run(name) if isinstance(reader, DeliveringReader) else 0
        reader.mark()  # earlier deliveries are not part of this run's history
        self._last = reader.last_receipt  # the last delivery at the mark: the same object means that none followed
        self._before = reader.last_receipt  # all up to here is recorded, or was delivered before the run began
        self._recorded: Mapping[str, Any] = reader.state_dict()
        self._recorder = StepRecorder()
        self._frontier: Frontier | None = None
        self._at: AnyReceipt | None = None  # the last receipt that was consumed since the mark; None: nothing was
        self._skipped: list[AnyReceipt] = []  # what trains nothing, and no step has consumed yet
        # What was excluded before the first step enters the record of that step: until then the reader is where it was.
        self._opening = opening if opening is not None and opening.excluded else None
        # What trained nothing, and was not handed over.
        self._excluded: list[Excluded] = [] if opening is None else list(opening.excluded)
        self.delivered = 0
        """How many batches (or rows) the reader had delivered at the last step, if it counts them."""
        self.shared, self.is_repeated, self.has_others = 1, False, False
        """As in `ReaderRecord`."""

    def taken(self) -> Given | None:
        """Return the deliveries since the last step; None if the reader does not count them."""
        given = self.reader.deliveries.take() if isinstance(self.reader, DeliveringReader) else None
        self.delivered += 0 if given is None else given.batches
        return given

    def cut(self, step: int, consumed: AnyReceipt | None, *, is_stated: bool, given: Given | None) -> str:
        """Record that optimizer step ``step`` is done, and has used all deliveries up to ``consumed``.

        With ``is_stated``, None means that the user named only other readers, and that this step used nothing more of
        this reader. Without it, None means all deliveries. ``given`` holds the deliveries since the last step; None if
        they give no evidence about the training loop.

        Returns the reason if reading ahead is suspected since this step, else an empty text.
        """
        known, last = self._ahead.reason, self.reader.last_receipt
        at = last if consumed is None or consumed == last else consumed
        if not is_stated or consumed is not None:
            self._is_stated = is_stated or (self._is_stated and at is not None and at == self._at)
            if not self._is_stated and given is not None:
                self._ahead.stepped(given)
            # An epoch that is read again gives receipts that are equal to the receipts of the first time.
            was_before = at is self._before or (at == self._before and last is self._last)
            if at is not None and not was_before:
                self._at, self._frontier = at, frontier_after(at)
        if self._frontier is not None:
            self._recorder.note(step, self._frontier)
            self._exclude_skipped(step, self._frontier)
        return "" if known else self._ahead.reason

    def skip(self, receipt: AnyReceipt) -> None:
        """Note that the loop trains nothing on what ``receipt`` names, which no step has consumed yet."""
        used, last = self._frontier, self.reader.last_receipt
        if used is not None and last is not None and frontier_after(receipt) <= used <= frontier_after(last):
            raise ConfigError(
                f"skip() was given epoch {receipt.epoch}, step {receipt.step} of reader {self.name!r}, which an "
                "earlier step has used: call skip() when the loop takes the batch, before the next step()"
            )
        if receipt not in self._skipped:
            self._skipped.append(receipt)

    def _exclude_skipped(self, step: int, upto: Frontier) -> None:
        """Record what was skipped and lies before ``upto``: it counts as consumed with ``step``."""
        done = [one for one in self._skipped if frontier_after(one) <= upto]
        self._skipped = [one for one in self._skipped if one not in done]
        for one in done:
            sources = one.spans if isinstance(one, MixedReceipt) else (("", one.spans),)
            for source, spans in sources:
                found: dict[int, list[tuple[int, int]]] = {}
                for span in spans:
                    found.setdefault(span.epoch, []).append((span.start, span.stop))
                positions = {epoch: Intervals.of(sorted(each)) for epoch, each in found.items()}
                if positions:
                    excluded = Excluded(
                        rank=one.rank, step=step, reason="trainer", positions=positions, source=source or None
                    )
                    self._excluded.append(excluded)

    def check_owned(self) -> None:
        """Refuse to count for a reader that another manager tracks since."""
        reader = self.reader
        if isinstance(reader, DeliveringReader) and reader.deliveries.run != self._run:
            raise ConfigError(
                f"reader {self.name!r} is also in the state of another CheckpointManager, which was restored later: "
                "each would miss what the other one records. Give each loader to one manager, and make a new manager "
                "only when the earlier one is not used any more"
            )

    def jump(self, step: int) -> None:
        """Record that other processes did the steps up to ``step``, and that the reader has loaded their state."""
        state = State.from_plain(self.reader.state_dict())
        self._frontier = Frontier(state.epoch, state.step)
        self._recorder.jump(step, self._frontier)

    def check(self, receipt: AnyReceipt) -> None:
        """Refuse a receipt that was not delivered, or that lies before the place that an earlier step has used."""
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

    def _state(self) -> Mapping[str, Any]:
        """Return the reader's plain state at the last cut: the same on every rank, or this rank's part."""
        # If all deliveries are consumed, the reader's own state also holds whether the loop has seen the epoch's end.
        # The effects of the script's work at that end (a scheduler's step) are in the saved objects, and the work must
        # not be done again.
        if self._is_all_consumed():
            return self.reader.state_dict()
        return self._recorded if self._at is None else self.reader.state_dict(self._at)

    def _is_all_consumed(self) -> bool:
        """Return whether the last cut has consumed all that was delivered until now."""
        last = self.reader.last_receipt
        return last is self._at if self._at is not None else last is self._last and last == self._before

    def _stretches(self, state: Mapping[str, Any]) -> Sequence[tuple[Any, Any]]:
        """Return what was consumed since the mark up to ``state``, the state at the last cut."""
        if depends_on_data(state) and self._is_all_consumed():
            return self.reader.stretches()  # the end of an epoch shows of some positions that they yield nothing
        return () if self._at is None else self.reader.stretches(self._at)

    def pending(self, first: int, step: int) -> PendingRecord:
        """Return the record from the cut of step ``first`` to the last cut, the cut of ``step``."""
        state, opening = self._state(), self._opening
        found = self._stretches(state)
        if opening is not None:
            state = opening.begin.to_plain() if step == opening.step else state
            found = [] if step == opening.step else [(opening.begin, opening.end), *found]
        record = ReaderRecord(
            state=state,
            stretches=tuple(
                Stretch(
                    begin=begin.to_plain(),
                    end=end.to_plain(),
                    consumed=positions(begin, end),
                    basis="stated" if self._is_stated else "delivered",
                    attempt=self._attempt,
                )
                for begin, end in found
            ),
            steps=self._recorder.record(step),
            index=self._index_of(state),
            excluded=tuple(one for one in self._excluded if first < one.step <= step),
            shared=self.shared,
            is_repeated=self.is_repeated,
            has_others=self.has_others,
        )
        return PendingRecord(first=first, step=step, record=record)

    def _index_of(self, state: Mapping[str, Any]) -> str | None:
        """Return the digest of the index to which ``state`` belongs: the reader may already be at a newer version."""
        index = index_of(self.reader)
        if index is None:
            return None
        try:
            table = State.from_plain(state).orders[0].table
        except StateError:
            return str(index.digest)  # a reader with its own kind of state stays at one version
        return table if table in {one.digest for one, _ in versions_of(self.reader)} else str(index.digest)

    def handed_over(self, step: int, state: Mapping[str, Any]) -> None:
        """Record that the record up to ``state``, at the last cut, the cut of ``step``, was handed over: the next
        begins there."""
        self._recorder.forget(step)
        self._excluded = [one for one in self._excluded if one.step > step]
        self._opening = None if self._opening is None or step > self._opening.step else self._opening
        has_end = depends_on_data(state) and self._is_all_consumed() and state == self.reader.state_dict()
        if has_end or self._at is not None:
            self.reader.mark(None if has_end else self._at)
            self._recorded = state
        if self._at is not None:
            self._last = self.reader.last_receipt
            self._before, self._at = self._at, None


class Journal:
    """The pending records of all tracked readers since the newest commit, from a restore at ``step`` on.

    ``recorded`` is the step of this commit, and ``pending`` are the records of the consumption from there up to
    ``step``. A tracked reader without pending records was added at ``step``, and nothing of it was consumed before.
    """

    def __init__(
        self,
        tracks: Mapping[str, ReaderTrack],
        step: int,
        *,
        pending: Pending | None = None,
        recorded: int | None = None,
    ) -> None:
        self._tracks = tracks
        self._from = step
        self._closed = {name: list((pending or {}).get(name, ())) for name in tracks}
        for name, closed in self._closed.items():
            if recorded is not None and recorded < step and not closed:
                closed.append(tracks[name].pending(recorded, step))

    def pending(self, step: int) -> dict[str, tuple[PendingRecord, ...]]:
        """Return reader → its pending records up to the last cut, the cut of ``step``."""
        return {name: (*self._closed[name], track.pending(self._from, step)) for name, track in self._tracks.items()}

    def handed_over(self, pending: Pending, step: int) -> None:
        """Record that the ``pending`` records of the last cut were handed over: new records begin at ``step``.

        All ranks call it at each save, before anything that may fail on one of them: a commit joins the parts of
        ranks only if they lie between the same steps on all ranks.
        """
        for name, track in self._tracks.items():
            track.handed_over(step, pending[name][-1].record.state)
            self._closed[name] = list(pending[name])
        self._from = step

    def committed(self, step: int) -> None:
        """Drop the records up to ``step``, which a commit has."""
        for name, closed in self._closed.items():
            self._closed[name] = [one for one in closed if one.step > step]


def cut_all(tracks: Mapping[str, ReaderTrack], step: int, stated: Mapping[str, AnyReceipt] | None) -> dict[str, str]:
    """Record for all readers that optimizer step ``step`` is done; ``stated`` is the result of `by_reader`.

    Returns reader → the reason, for readers for which this step raises the suspicion of reading ahead.
    """
    given_to = {name: track.taken() for name, track in tracks.items()}
    delivered = any(given is not None and given.batches for given in given_to.values())
    reasons = {}
    for name, track in tracks.items():
        given = given_to[name]
        counts = given is not None and (given.batches > 0 or not delivered)  # else it was another reader's turn
        consumed = None if stated is None else stated.get(name)
        reasons[name] = track.cut(step, consumed, is_stated=stated is not None, given=given if counts else None)
    return {name: reason for name, reason in reasons.items() if reason}


def by_reader(stated: Any, tracks: Mapping[str, ReaderTrack]) -> Mapping[str, AnyReceipt] | None:
    """Return reader → the receipt that the user stated; None if the user stated nothing.

    ``stated`` is a batch, a receipt, a number, or a mapping of readers' names to these. `ConfigError` if it names no
    place in a reader, a place before the one that an earlier step used, or no reader although there are several.
    `StateUnavailable` if the reader has not delivered it since the last save.
    """
    for track in tracks.values():
        track.check_owned()
    if stated is None:
        return None
    if not tracks:
        raise ConfigError(
            "step() was given a batch, and no tracked reader is in the manager's state: put the LakeLoader into it, "
            'CheckpointManager(…, {"reader": loader, …}). With another loader there, such as torchdata\'s '
            "StatefulDataLoader, call step() without a batch"
        )
    if isinstance(stated, Mapping) and stated and not hasattr(stated, "receipt") and set(stated) <= set(tracks):
        for name, one in stated.items():
            _check_own(name, one, tracks)
        return {name: _receipt(one, tracks[name]) for name, one in stated.items()}
    if len(tracks) > 1:
        raise ConfigError(
            f"there are {len(tracks)} tracked readers ({', '.join(sorted(tracks))}): give step() a mapping of their "
            f"names to batches, got {_shown(stated)}"
        )
    for name in tracks:
        _check_own(name, stated, tracks)
    return {name: _receipt(stated, track) for name, track in tracks.items()}


def _check_own(name: str, stated: Any, tracks: Mapping[str, ReaderTrack]) -> None:
    """Raise `ConfigError` if ``stated``, a batch or a receipt, names another reader than ``name``."""
    receipt = stated if isinstance(stated, AnyReceipt) else getattr(stated, "receipt", None)
    lasts = {one: track.reader.last_receipt for one, track in tracks.items()}
    mine = lasts[name]
    if not isinstance(receipt, AnyReceipt) or mine is None or receipt.reader == mine.reader:
        return
    others = [one for one, last in lasts.items() if last is not None and last.reader == receipt.reader]
    if others or isinstance(receipt, MixedReceipt) or isinstance(mine, MixedReceipt):
        whose = f"reader {others[0]!r}" if others else "a loader that is not in this manager's state"
        raise ConfigError(f"this is a batch of {whose}, and it was given as one of reader {name!r}")


def skip(stated: Mapping[str, AnyReceipt] | None, tracks: Mapping[str, ReaderTrack]) -> None:
    """Note that the loop trains nothing on the batches ``stated`` (`by_reader`)."""
    if stated is None:
        raise ConfigError("skip() takes the batch that is not trained on, as step() does")
    for name, receipt in stated.items():
        tracks[name].skip(receipt)


def _receipt(stated: Any, track: ReaderTrack) -> AnyReceipt:
    """Return the receipt of a batch, a receipt or a number."""
    found = stated if isinstance(stated, AnyReceipt) else getattr(stated, "receipt", None)
    if isinstance(found, AnyReceipt):
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
    """Return an integer, or the largest element of a tensor, an array or a list of integers; None for anything else."""
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


def tracks_of(objects: Mapping[str, Any], attempt: int, openings: Mapping[str, Opening]) -> dict[str, ReaderTrack]:
    """Return name → the track of each reader among ``objects``, for an attempt that begins, and what they exclude."""
    readers = {name: one for name, one in objects.items() if isinstance(one, TrackedReader)}
    return {name: ReaderTrack(name, one, attempt=attempt, opening=openings.get(name)) for name, one in readers.items()}
