"""How do the bytes of row groups get here before they are decoded?  What is announced is fetched ahead, within bounds.

`RowGroupFetcher.announce` names row groups in the order in which they will be wanted. Of those in a store, footers are
read and then column chunks asked for, many at a time (`lakeckpt.lake.ranges`), as long as what was asked for and not
yet fetched by anybody stays within ``ahead_bytes``. `fetch` waits for the bytes of one row group, announced or not:
what is wanted now never waits for what may be wanted later to be used. Local files are opened and read by who fetches.

Threads may share a fetcher. It decodes nothing and starts no threads; in a forked process it begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from lakeckpt.lake.deferring import Deferring
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.ranges import Arriving, in_background
from lakeckpt.reading.open_files import Lease, OpenedFile, OpenFiles
from lakeckpt.reading.row_groups import HeldRowGroup, RowGroupPlan

__all__ = ["RowGroupFetcher"]

OPENED_AHEAD = 16
"""Footers that are on their way at once."""
MOST_AHEAD = 64
"""Row groups that are held ahead: what a file takes beside its bytes is bounded by it."""
OVERTAKEN = 64
"""An announced row group is forgotten when so many announced after it were fetched."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wanted:
    """A row group that was announced."""

    group: int
    lease: Lease | None = None
    """The use of its file, once that was asked for."""
    plan: RowGroupPlan | None = None
    arriving: Arriving | None = None
    """Its bytes, once they were set out for."""
    not_ahead: bool = False
    """It is too large to be held ahead, or cannot be read: whoever fetches it sees to it."""
    overtaken: int = 0


class RowGroupFetcher:
    """Fetches row groups of the table of ``index`` from ``files``; ``ahead``: whether what is announced comes ahead."""

    def __init__(self, index: TableIndex, files: OpenFiles, *, ahead: bool, ahead_bytes: int) -> None:
        self._index, self._files = index, files
        self._ahead, self._ahead_bytes = ahead, ahead_bytes
        self._renew()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._state = Deferring()
        self._wanted: list[_Wanted] = []
        self._held = 0

    def announce(self, groups: Iterable[int]) -> None:
        """Say that ``groups`` (ordinals in the table) will be fetched, in this order, after those announced before."""
        if self._ahead:
            self._check_process()
            with self._state.lock:
                self._state.catch_up()
                self._wanted += [_Wanted(group=group) for group in groups]
            self._advance()

    @property
    def has_room(self) -> bool:
        """Whether more that is announced would be set out for now."""
        return self._ahead and len(self._wanted) < MOST_AHEAD and self._held < self._ahead_bytes

    def fetch(self, group: int) -> tuple[OpenedFile, HeldRowGroup]:
        """The bytes of a row group, and what decodes them. Raises what opening and reading raise."""
        self._check_process()
        ordinal, inside = self._index.group(group)
        wanted = self._take(group)
        lease, must_open = (wanted.lease, False) if wanted.lease is not None else self._files.lease(ordinal)
        try:
            if must_open:
                self._files.open(lease)
            file = lease.file.result()
            plan = wanted.plan or file.reader.plan(inside)
            arriving = wanted.arriving or file.reader.begin(plan)
            self._advance()  # behind what is wanted now
            return file, file.reader.arrived(plan, arriving)
        finally:
            self._files.release(lease)

    def forget(self) -> None:
        """Let go of all that was announced and not fetched."""
        self._check_process()
        self._state.when_free(self._forget)

    def _forget(self) -> None:
        gone, self._wanted, self._held = self._wanted, [], 0
        for wanted in gone:
            self._let_go(wanted)

    def _take(self, group: int) -> _Wanted:
        """What was announced of ``group`` first, which is off the list then; a new one where nothing was."""
        with self._state.lock:
            self._state.catch_up()
            place = next((i for i, one in enumerate(self._wanted) if one.group == group), None)
            if place is None:
                return _Wanted(group=group)
            taken = self._wanted.pop(place)
            for one in self._wanted[:place]:
                one.overtaken += 1
            late = [one for one in self._wanted[:place] if one.overtaken > OVERTAKEN]
            self._wanted = [one for one in self._wanted if one not in late]
            self._held -= sum(one.plan.size_bytes for one in (taken, *late) if one.plan and one.arriving)
        for one in late:
            self._let_go(one)
        return taken

    def _let_go(self, wanted: _Wanted) -> None:
        if wanted.arriving is not None:
            wanted.arriving.abandon()
        if wanted.lease is not None:
            self._files.release(wanted.lease)

    def _advance(self) -> None:
        """Set out for what may be held of what was announced, in its order."""
        with self._state.lock:
            self._state.catch_up()
            opening = 0
            for wanted in self._wanted[:MOST_AHEAD]:
                if wanted.arriving is not None or wanted.not_ahead:
                    continue
                if wanted.lease is None:
                    wanted.lease, must_open = self._files.lease(self._index.group(wanted.group)[0])
                    if must_open:
                        self._open_ahead(wanted.lease)
                if not wanted.lease.file.done():
                    opening += 1
                    if opening == OPENED_AHEAD:
                        return
                elif not self._begin(wanted, wanted.lease):
                    return

    def _begin(self, wanted: _Wanted, lease: Lease) -> bool:
        """Set out for a row group whose file is open; False where it has to wait until others were fetched."""
        try:
            reader = lease.file.result().reader
            plan = wanted.plan = wanted.plan or reader.plan(self._index.group(wanted.group)[1])
            if plan.size_bytes > self._ahead_bytes:
                wanted.not_ahead = True
            elif self._held + plan.size_bytes > self._ahead_bytes:
                return False
            else:
                wanted.arriving = reader.begin(plan)
                self._held += plan.size_bytes
        except Exception:  # it is raised again when the row group is fetched
            wanted.not_ahead = True
        return True

    def _open_ahead(self, lease: Lease) -> None:
        """Let a thread open the file. As the interpreter ends, no thread does: then whoever waits for it is told."""
        try:
            opening = in_background(self._open, lease)
        except RuntimeError as error:
            self._files.fail(lease, error)
        else:
            opening.add_done_callback(partial(self._opened, lease))

    def _open(self, lease: Lease) -> None:
        self._files.open(lease)
        self._advance()

    def _opened(self, lease: Lease, opening: Future[None]) -> None:
        error = opening.exception()
        if error is not None and not lease.file.done():
            self._files.fail(lease, error)

    def _check_process(self) -> None:
        if self._process != os.getpid():  # threads that were to fetch are not here, and a lock may be held for ever
            self._files.renew()
            self._renew()
