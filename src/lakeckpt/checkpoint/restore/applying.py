"""This module compares candidates with the live objects of all ranks, and applies them: in steps, with a vote on each.

::

    compare   read     names, shapes and dtypes must fit: nothing is changed yet
              pin      readers go to the versions of their tables
              readers  load their states
    apply     small    objects whose state can be taken back
              large    modules and optimizers, in place: they cannot be taken back

Each rank does a step, and all ranks vote on it. If a rank finds damage, `Unusable` is raised on all of them, and what
can be taken back is as it was: the caller tries another candidate. Any other error of one rank is raised on all. A
restore and `lakeckpt.load` use one `Applying`, over any source of tensors. The module starts no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.consumed.reports import of_all_ranks, reports_of
from lakeckpt.checkpoint.format.manifest import Exclusion, ReaderRecord
from lakeckpt.checkpoint.persist.indexes import documents_of, filtered, offer, save
from lakeckpt.checkpoint.restore.compare import Candidate, compare
from lakeckpt.checkpoint.restore.load_into import is_large, load_in_place, load_small
from lakeckpt.checkpoint.restore.table_versions import fit_readers, go_to, opened_versions, pins_as_on, records_at
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.notes import error_to_text
from lakeckpt.tracking.readers import selection_of
from lakeckpt.tracking.tally import Tally
from lakeckpt.tracking.votes import Together, texts, verdict

__all__ = ["Applying", "Unusable"]

_SKIPPED = "rest of the epoch skipped by "
_PLACES = "places of reader "
_UNCHECKED = "a rank's memory has no checksums"


class Unusable(Exception):
    """A rank found damage in the candidate, or a cut in memory that does not fit: another candidate may do."""

    def __init__(self, tally: Tally) -> None:
        self.damaged = texts(tally, "damaged")
        self.unfit = texts(tally, "unfit")
        super().__init__("; ".join(self.damaged + self.unfit))


class Applying:
    """Applies candidates to ``objects`` (tracked readers included), on one rank. All ranks call the same methods in the
    same order.

    Objects named in ``allow_missing`` keep the state that they have, if a candidate does not hold them. ``advice`` and
    ``mixed`` end the errors for objects that do not fit, and for those that hold a mixture of states.
    """

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        objects: Mapping[str, Any],
        *,
        allow_missing: Collection[str] = (),
        advice: str,
        mixed: str,
    ) -> None:
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._allow_missing = allow_missing
        self._advice, self._mixed = advice, mixed
        self._undo: list[Callable[[], None]] = []
        self.all = Together(exchange)
        self.is_mixed = False
        """True if modules and optimizers may hold parts of two states."""

    # --- the steps

    def compare(
        self, read: Callable[[], Candidate], exclusions: tuple[Exclusion, ...] = (), *, of_memory: bool = False
    ) -> Candidate:
        """Return the candidate that ``read`` returns on every rank: it fits the objects, and its readers are loaded,
        without what ``exclusions`` take out of the deal.

        What a rank raises on a cut ``of_memory`` is never more than a reason to take another candidate."""
        found: list[Candidate] = []

        def compared() -> dict[str, str]:
            found.append(self._compared(read(), exclusions))
            return _facts_of(found[0])

        tally = self._vote(compared, of_memory=of_memory)
        chosen = _agreed(found[0], tally, self._exchange.world_size)
        self.all.do(lambda: self._pin(chosen.pins.indexes))
        # Readers that skip the rest of an epoch, or go on elsewhere, are at what each rank has opened by itself.
        self.same_versions()
        self.settle_selections(keep=False)
        self._vote(lambda: self._load_readers(chosen), chosen)
        return chosen

    def apply(self, chosen: Candidate) -> None:
        """Load all other states of a candidate that was compared."""
        held = chosen.held(self._objects, self._allow_missing)
        others = {name: one for name, one in held.items() if name not in chosen.readers}

        def small() -> None:
            chosen.loaded.check()
            self._undo.append(load_small(others, chosen.loaded, {}))

        def large() -> None:
            self.is_mixed = any(map(is_large, held.values()))
            load_in_place(held, chosen.loaded)

        self._vote(small, chosen)
        self._vote(large, chosen)
        self.is_mixed = False

    def _compared(self, candidate: Candidate, exclusions: tuple[Exclusion, ...]) -> Candidate:
        fitting = compare(candidate.held(self._objects, self._allow_missing), candidate, advice=self._advice)
        look = self._exchange.rank == 0
        return replace(
            fitting, pins=fit_readers(self._storage, self._objects, candidate.readers, exclusions, look=look)
        )

    def _pin(self, indexes: Mapping[str, Any]) -> None:
        self._undo.append(go_to(self._objects, indexes))

    def _load_readers(self, chosen: Candidate) -> None:
        records = records_at(self._objects, chosen.readers, chosen.pins)
        readers = {name: self._objects[name] for name in records}
        self._undo.append(load_small(readers, chosen.loaded, records))

    def _vote(
        self, work: Callable[[], dict[str, str] | None], chosen: Candidate | None = None, *, of_memory: bool = False
    ) -> Tally:
        """Do ``work`` on every rank, and return all that it returned. ``work`` never communicates."""
        failure: Exception | None = None
        try:
            votes = work() or {}
        except Exception as error:
            failure, votes = error, {verdict(error, of_memory=of_memory): error_to_text(error)}
        what = "" if chosen is None else f"other ranks could not apply {chosen.name}: "
        tally = self.all.settle(votes, failure, what)
        if {"damaged", "unfit"}.isdisjoint(tally.facts):
            return tally
        self.go_back()
        raise Unusable(tally)

    # --- tables

    def same_versions(self) -> None:
        """Let all ranks read the versions of their tables that rank 0 has opened, where no state names a version."""
        opened: dict[str, str] = {}

        def say() -> dict[str, str]:
            opened.update(opened_versions(self._objects))
            return {f"version of {name!r}": text for name, text in opened.items()}

        tally = self.all.do(say)
        if any(len(texts) > 1 for texts in tally.facts.values()):
            first = self.all.ask_rank_0(partial(self._put_indexes, opened))
            self.all.do(lambda: self._pin(pins_as_on(self._storage, first, self._objects)))

    def _put_indexes(self, opened: dict[str, str]) -> dict[str, str]:
        for reader in self._objects.values():
            for path, document in documents_of(reader).items():
                self._storage.put(path, [document.dumps()])
        return opened

    def settle_selections(self, *, keep: bool) -> None:
        """Take what the filters of readers select from the run, or count it; to ``keep`` it, rank 0 saves it."""
        if readers := filtered(self._objects.values()):
            self.all.do(lambda: self._settle(readers, keep=keep and self._exchange.rank == 0))

    def _settle(self, readers: list[Any], *, keep: bool) -> None:
        for reader in readers:
            offer(self._storage, reader)
            selection_of(reader)
            if keep:
                save(self._storage, reader)

    # --- going back

    def done(self) -> None:
        """Keep what was loaded."""
        self._undo.clear()

    def go_back(self) -> None:
        """Let readers, small objects and the versions of tables be as they were before."""
        while self._undo:
            self._undo.pop()()

    @contextlib.contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Go back if the block raises; the error says where objects hold a mixture."""
        try:
            yield
        except BaseException as error:
            self.go_back()
            if self.is_mixed:
                error.add_note(self._mixed)
            raise


def _facts_of(candidate: Candidate) -> dict[str, str]:
    """Return what a rank tells the others of a candidate that fits it."""
    facts = {f"{_SKIPPED}{name}": reason for name, reason in candidate.pins.skipped.items()}
    if not candidate.is_checked:
        facts[_UNCHECKED] = "yes"
    if candidate.captured is not None:
        facts |= {f"{_PLACES}{name}": report.hex() for name, report in reports_of(_at_the_cut(candidate)).items()}
    return facts


def _agreed(own: Candidate, tally: Tally, world_size: int) -> Candidate:
    """Return the candidate with what all ranks told of it: what is skipped, and states of the whole job. In memory,
    each rank has its own part of a flow (`lakeckpt.checkpoint.consumed.reports`)."""
    skipped: dict[str, str] = {}
    every: list[dict[str, bytes]] = [{} for _ in range(world_size)]
    for fact, values in tally.facts.items():
        if fact.startswith(_SKIPPED):
            skipped[fact.removeprefix(_SKIPPED)] = next(iter(values))
        for report, ranks in values.items() if fact.startswith(_PLACES) else ():
            for rank in (rank for start, stop in ranks for rank in range(start, stop)):
                every[rank][fact.removeprefix(_PLACES)] = bytes.fromhex(report)
    readers: Mapping[str, ReaderRecord] = own.readers
    if own.captured is not None:
        readers = {name: of_all_ranks(name, one, every)[0].record for name, one in _at_the_cut(own).items()}
    pins = replace(
        own.pins,
        indexes={name: index for name, index in own.pins.indexes.items() if name not in skipped},
        states={name: state for name, state in own.pins.states.items() if name not in skipped},
        changes={name: every for name, every in own.pins.changes.items() if name not in skipped},
        exclusions=tuple(one for one in own.pins.exclusions if one.reader not in skipped),
        skipped=skipped,
    )
    return replace(own, readers=readers, pins=pins, is_checked=_UNCHECKED not in tally.facts)


def _at_the_cut(candidate: Candidate) -> dict[str, tuple[PendingRecord]]:
    """Return the record of each reader at the cut, as a pending record without consumption."""
    return {
        name: (PendingRecord(first=candidate.step, step=candidate.step, record=replace(one, stretches=())),)
        for name, one in candidate.readers.items()
    }
