"""This module lets a restore learn from the faults before it, and notes the faults of the attempt that begins.

One `Aftermath` serves one rank for one attempt:

1. `learn`: each node states the notes of deaths that it knows, and rank 0 judges them with the faults in the log
   (`lakeckpt.recovery.progress`): which level holds for this attempt.
2. `refuse`: if no restart helps, all ranks raise `CrashLoop`; the rows of the micro-batch are named by readers that
   have loaded the state of the cut.
3. `begin`, `joined`: the page of the rank begins with the attempt, and the entry of the log names the faults.
4. `trains`, `stepped`, `failed`, `close`: the training thread keeps the page up to date, and notes its own end.

Pages are kept if a launcher restarts the job, or if cuts are captured: else nobody reads them. A daemon thread of rank
0 puts the time of the first step into the run after a fault; `close` waits for it a moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.agent.generations import digest_of_run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.markers import began_s, launchers
from lakeckpt.checkpoint.consumed.exclusions import crashed, withdrawn
from lakeckpt.checkpoint.consumed.tracks import ReaderTrack
from lakeckpt.checkpoint.faults.batch_rows import positions_at, rows_of, say_rows
from lakeckpt.checkpoint.faults.causes import cause_of_error
from lakeckpt.checkpoint.faults.marks import Marks, serve_recorder
from lakeckpt.checkpoint.faults.notes import (
    begin_page,
    leave_note,
    note_of,
    notes_in,
    page_path,
    remove_notes,
    remove_old_notes,
)
from lakeckpt.checkpoint.faults.records import FirstStep, put_first_step, put_note
from lakeckpt.checkpoint.format.manifest import Exclusion
from lakeckpt.checkpoint.persist.history import exclusions_in
from lakeckpt.checkpoint.persist.log import LogView
from lakeckpt.checkpoint.ranks import LAUNCH, MIN_NODES, note_page
from lakeckpt.core.state import State
from lakeckpt.errors import CrashLoop, NodeLeaves, StateError, StorageError, TrackingError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.recovery.faults import (
    Fault,
    FaultNote,
    Tier,
    explained,
    first_cause,
    notes_from_text,
    notes_to_text,
)
from lakeckpt.recovery.progress import Level, level_of
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.tally import Tally
from lakeckpt.tracking.votes import Together
from lakeckpt.watch.beat import Beat, Phase, read_page
from lakeckpt.watch.recorder import socket_path
from lakeckpt.watch.stacks import stacks_path, write_on_signal
from lakeckpt.watch.system.explicit import fault_table

__all__ = ["Aftermath"]

_LOG = logging.getLogger("lakeckpt")
_IMPORTED_S = time.time()
_NOTES, _RESTARTS, _NODE, _LEVEL, _REACHED = "notes of deaths", "restarts", "node with ranks", "level", "reached"
_MOST_SAID = 6
_JOIN_S = 2.0
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


class Aftermath:
    """What a rank learns from faults, and notes of them. ``captures``: cuts are captured. One thread calls all methods,
    but those of the page. ``max_excluded``: so many micro-batches of the run may be excluded; 0: none. ``faults``: a
    file of rows, which explain faults before the table does. ``watch``: agents watch the ranks, by stacks, too."""

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        arenas: str | os.PathLike[str] | None,
        captures: bool,
        max_excluded: int = 0,
        faults: str | os.PathLike[str] | None = None,
        watch: str | None = None,
    ) -> None:
        self._storage, self._exchange = storage, exchange
        self._folder = ArenaFolder(arenas)
        self._max_excluded, self._rows = max_excluded, fault_table(os.fspath(faults or ""))
        self._is_used = bool(getattr(storage, "name", "")) and (captures or bool(launchers()))
        self._shows_stacks = bool(watch) and captures and exchange.world_size > 1
        self._digest = b""
        self._firsts: list[FaultNote] = []
        """The first causes of the attempts that died since the newest entry of a restore; on rank 0."""
        self._deaths: list[FaultNote] = []
        """The first causes in this life of the launcher; on rank 0."""
        self._beat: Beat | None = None
        self._marks: Marks | None = None
        self._attempt = 0
        self._begun_s = time.time()
        self._decided_s = self._restored_s = 0.0
        self._thread: threading.Thread | None = None
        self._awaits_step = False
        self.level = Level()
        """What is to be done otherwise than before."""
        self.causes: Mapping[str, int] = {}
        """Cause → how many faults the entry of this attempt names; on rank 0."""
        self.restarts = 0
        """How often the launcher has started the job again."""
        self.reached = 0
        """The optimizer step at which the newest attempt died, at least 1; 0: no death is known since it restored."""

    # --- before the attempt begins

    def learn(self, run: str, view: Callable[[], LogView]) -> None:
        """Learn what the faults of earlier attempts of the ``run`` ask for. Collective. ``view``: the log, as rank 0
        has read it."""
        self._begun_s = time.time()
        self._digest = digest_of_run(run, self._storage)
        facts: dict[str, str] = {_RESTARTS: os.environ.get(_RESTART_COUNT, "0") or "0"}
        if self._exchange.rank == self._exchange.neighbours[0]:
            found = notes_in(self._folder.path, self._digest) if self._is_used else []
            facts[_NODE] = socket.gethostname()
            if found:
                facts[_NOTES] = notes_to_text(explained(one, self._rows) for one in found)
        answer = self._exchange.answered(facts, lambda tally: self._judge(tally, view()))
        self.restarts, self.reached = int(answer.value(_RESTARTS)), int(answer.value(_REACHED))
        self.level = Level.from_text(answer.value(_LEVEL))
        is_said = self.level.stops or self.level.excludes  # by `refuse`, with the rows
        if self._exchange.rank == 0 and not is_said and (said := self.level.said):
            _LOG.warning("%s: %s. The deaths:%s", describe(self._storage), said, self._table())

    def _judge(self, tally: Tally, view: LogView) -> Tally:
        """Decide on rank 0, from the notes of all nodes and the log."""
        restarts = max(int(one) for one in tally.facts[_RESTARTS])
        notes = [one for text in tally.facts.get(_NOTES, ()) for one in notes_from_text(text)]
        self._firsts = _first_causes(notes, since=max((one.attempt or 0 for one in view.restores), default=0))
        life = _life(view) if restarts else set[int]()
        recorded = [fault.first for entry in view.restores for fault in entry.faults]
        least = os.environ.get(MIN_NODES)
        exclusions = exclusions_in(view)
        self._deaths = [one for one in (*recorded, *self._firsts) if one.attempt in life]
        level = level_of(
            self._deaths,
            nodes=len(tally.facts[_NODE]),
            least_nodes=int(least) if least else None,
            may_exclude=crashed(exclusions) < self._max_excluded,
        )
        if level.poison is not None and _is_carried_out(exclusions, self._deaths[-1]):
            level = Level()  # an attempt without these rows has begun, and no death came after it
        reached = max(1, self._firsts[-1].step) if self._firsts else 0
        return Tally.of([{_RESTARTS: str(restarts), _LEVEL: level.to_text(), _REACHED: str(reached)}])

    def kept(self, exclusions: tuple[Exclusion, ...]) -> tuple[Exclusion, ...]:
        """Return the ``exclusions`` of the log, on rank 0, with those withdrawn after which the job died of its own
        before it had finished the step: their rows were not the cause."""
        own = [one for one in self._firsts if one.is_own]
        if not own:
            return exclusions
        last = own[-1]
        why = f"attempt {last.attempt} died without these rows in the same step, by {last.name}: it was not they"

        def is_wrong(one: Exclusion) -> bool:
            return one.attempt < last.attempt and last.step + 1 == one.steps[0]

        return tuple(withdrawn([one], why)[0] if is_wrong(one) else one for one in exclusions)

    def refuse(self, objects: Mapping[str, Any]) -> tuple[Exclusion, ...]:
        """Raise `CrashLoop` on all ranks if no restart helps. Collective; the readers among ``objects`` have loaded the
        state that would be restored. Raise `NodeLeaves` if this node leaves the job.

        Returns on rank 0 what leaves the deal, if the level says so."""
        if self.level.leaves:
            if self.level.leaves == socket.gethostname():
                raise NodeLeaves(f"this node, {self.level.leaves}, leaves the job: {self.level.said}")
            raise TrackingError(f"the node {self.level.leaves} leaves the job: {self.level.said}. The others go on")
        if not (self.level.stops or self.level.excludes):
            return ()
        found: list[Exclusion] = []

        def stop() -> dict[str, str]:
            poison, why = self.level.poison, ""
            if poison is not None:
                last = self._deaths[-1]
                every, why = positions_at(objects, poison, attempt=last.attempt, step=last.step + 1)
                found.extend(every)
            rows = say_rows(rows_of(objects, found))
            if self.level.excludes and found:
                _LOG.warning("%s: its rows are%s\nThe deaths:%s", self.level.said, rows, self._table())
                return {}
            text = self._stopped(rows, f"It cannot be excluded: {why}. " if self.level.excludes else "")
            _LOG.error("%s", text)
            for note in self._firsts:
                with contextlib.suppress(StorageError):
                    put_note(self._storage, note)
            raise CrashLoop(text)

        Together(self._exchange).ask_rank_0(stop)
        return tuple(found)

    def _stopped(self, rows: str, why: str) -> str:
        table = f"The deaths:{self._table()}\nAll faults of the run: lakeckpt faults {describe(self._storage)}"
        poison = self.level.poison
        if poison is None:
            return f"{self.level.said}. {table}"
        if self.level.was_wrong:
            return (
                f"{poison} was excluded, and the next death came in the same step without its rows: the verdict is "
                f"withdrawn, and the code is the cause. {table}"
            )
        return (
            f"{poison} has ended the job {self.level.deaths} times in a row by {self._deaths[-1].name}"
            f"{': its rows are' + rows if rows else ''}\n{table}\n{why}Mend or exclude these rows "
            "(open_table(..., exclude=...)), or the code that fails on them, then start the job again"
        )

    def _table(self) -> str:
        return "".join(f"\n  {_said(one)}" for one in self._deaths[-_MOST_SAID:])

    # --- the attempt begins

    def begin(self, run: str, attempt: int) -> None:
        """An attempt of the ``run`` begins: what this rank does is on its page from now on."""
        self._decided_s, self._attempt = time.time(), attempt
        self._digest = digest_of_run(run, self._storage)
        if self._is_used:
            rank, world = self._exchange.rank, self._exchange.world_size
            note_page(page_path(self._folder.path, self._digest, attempt, rank))  # first: it may be killed here
            self._beat = begin_page(self._folder, self._digest, attempt, rank, world)
            if self._beat is not None and self._shows_stacks:
                self._beat.writes_stacks(write_on_signal(stacks_path(self._beat.path)))
                serve_recorder(socket_path(self._beat.path))
            self.phase("restore")

    @property
    def page(self) -> str:
        """The path of this rank's page; empty if there is none."""
        return "" if self._beat is None else self._beat.path

    def joined(self, step: int, tier: Tier, size_bytes: int) -> tuple[Fault, ...]:
        """Return the faults since the newest restore, for the log, on rank 0: this attempt goes on after ``step``."""
        self._restored_s = time.time()
        found = [Fault(first=one, step=one.step) for one in self._firsts]
        if found:
            last = found[-1].first
            again = max(0, last.step - step)
            done = last.step - last.begun
            found[-1] = replace(
                found[-1],
                phases=self._phases(last),
                step=step,
                steps_again=again,
                rows_again=round(last.rows * last.world * again / done) if done else 0,
                tier=tier,
                bytes=size_bytes,
                deaths=self.level.deaths if last.is_own else 0,
            )
        self._awaits_step = bool(found)
        self.causes = Counter(one.first.cause for one in found)
        return tuple(found)

    def _phases(self, last: FaultNote) -> dict[str, float]:
        """Return what is known of the phases since the ``last`` fault, in seconds."""
        started_s = began_s(os.getpid()) or self._begun_s
        ends = {"processes": started_s, "imports": max(started_s, _IMPORTED_S), "group": self._begun_s}
        if (perceived_s := _perceived_s()) is not None:
            ends = {"perceived": perceived_s, **ends}
        ends |= {"decided": self._decided_s, "restored": self._restored_s}
        found, at_s = {}, last.at_s
        for name, end_s in ends.items():
            found[name] = max(0.0, end_s - at_s)
            at_s = max(at_s, end_s)
        return found

    def forget(self) -> None:
        """The log names all faults before this attempt: remove the notes of this node. One rank of each node does."""
        if self._is_used and self._exchange.rank == self._exchange.neighbours[0]:
            remove_notes(self._folder.path, self._digest, before=self._attempt)
            remove_old_notes(self._folder.path)

    # --- while the attempt runs

    def trains(self, step: int, tracks: Mapping[str, ReaderTrack], objects: Collection[Any] = ()) -> None:
        """The loop goes on after ``step``. Readers note on the page what they deliver, and models and optimizers among
        ``objects`` where they are."""
        if self._beat is None:
            return
        self._beat.begins(step, {name: _place_of(track.reader) for name, track in tracks.items()})
        for number, track in enumerate(tracks.values()):
            if (deliveries := getattr(track.reader, "deliveries", None)) is not None:
                deliveries.beat = self._beat.of_reader(number)
        self._marks = Marks(self._beat, objects)

    def stepped(self, step: int, stalled_s: float) -> None:
        """An optimizer step is finished."""
        if self._beat is not None:
            self._beat.stepped(step, stalled_s)
        if self._awaits_step:
            self._awaits_step = False
            first = FirstStep(attempt=self._attempt, seconds=time.time() - self._restored_s)
            self._thread = threading.Thread(
                target=_put, args=(self._storage, first), name="lakeckpt-fault", daemon=True
            )
            self._thread.start()

    def phase(self, phase: Phase) -> None:
        """The training thread does something else now."""
        if self._beat is not None:
            self._beat.phase(phase)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """The training thread saves, or waits for saves, in this ``with``."""
        return contextlib.nullcontext() if self._beat is None else self._beat.saving()

    def spent(self) -> Mapping[str, float]:
        """Return phase → seconds of the training thread in this attempt; empty without a page. Any thread may call."""
        page = None if self._beat is None else read_page(self._beat.path, histories=True)
        return {} if page is None else {name: seconds for name, seconds in page.spent_s.items() if seconds}

    def own_phase(self, name: str) -> None:
        """The training thread begins a phase that the script calls ``name``."""
        if self._beat is not None:
            self._beat.own_phase(name)

    def failed(self, error: BaseException) -> None:
        """Note that an exception ends the loop of this rank."""
        if self._beat is not None and (page := read_page(self._beat.path)) is not None:
            cause, what = cause_of_error(error)
            note = note_of(page, self._attempt, cause=cause, what=what, text=error)
            leave_note(self._beat.path, explained(note, self._rows))

    def close(self, *, well: bool) -> None:
        """The rank ends, ``well`` or by a fault. May be called again."""
        if self._marks is not None:
            self._marks.remove()
        if self._beat is not None:
            self._beat.close(well=well)
            self._beat = None if well else self._beat
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None


def _life(view: LogView) -> set[int]:
    """Return the attempts of this life of the launcher, as far as the log was read."""
    found: set[int] = set()
    for begin in reversed(view.begins):
        found.add(begin.attempt)
        if not begin.restarts:
            break
    return found


def _is_carried_out(exclusions: Collection[Exclusion], last: FaultNote) -> bool:
    """Return whether the verdict on the ``last`` death is on record: its rows have left the deal."""
    return any(one.reason == "crash" and not one.withdrawn and one.attempt == last.attempt for one in exclusions)


def _first_causes(notes: Collection[FaultNote], *, since: int) -> list[FaultNote]:
    """Return the first cause of each attempt from ``since`` on that died, in their order."""
    found = []
    for attempt in sorted({one.attempt for one in notes if one.attempt >= since}):
        its = [one for one in notes if one.attempt == attempt]
        seen = {one.rank for one in its}
        found.append(first_cause(its, missing=[one for one in range(its[0].world) if one not in seen]))
    return found


def _said(note: FaultNote) -> str:
    where = f" on {note.node}" if note.node else ""
    text = f": {note.text}" if note.text else ""
    because = "" if note.explicit is None else f" ({note.because})"
    return f"rank {note.rank}{where} after step {note.step}, {note.name}{because}{text}"


def _place_of(reader: Any) -> tuple[int, int]:
    """Return the epoch of a reader, and the step in it that comes next."""
    try:
        state = State.from_plain(reader.state_dict())
    except StateError:
        return 0, 0  # a reader with its own kind of state
    return state.epoch, state.step


def _perceived_s() -> float | None:
    """Return when the launcher, if it is `lakeckpt run`, noticed the fault before this start."""
    folder, restarts = os.environ.get(LAUNCH), int(os.environ.get(_RESTART_COUNT, 0) or 0)
    with contextlib.suppress(OSError, ValueError):
        return float(Path(folder, f"{restarts - 1}.perceived").read_text()) if folder else None
    return None


def _put(storage: Storage, first: FirstStep) -> None:
    with contextlib.suppress(StorageError):
        put_first_step(storage, first)
