"""This module opens the files of a table, and fetches the bytes of row groups before they are decoded.

`Prefetcher.expect` takes the row groups that will be decoded next, in their order. If the row groups lie in a store,
the prefetcher opens the files and starts to read the column chunks, while the bytes that are not fetched yet stay
within ``ahead_bytes``. `Prefetcher.fetch` waits for the bytes of one row group, whether the row group was expected or
not. A row group that is fetched never waits for row groups that are only expected. Local files are opened and read by
the thread that fetches.

Each file is open once, for all threads. The files that were used last stay open; a file that was dropped is closed when
the last thread that uses it has finished.

Threads may share a prefetcher. It decodes nothing, and its background work runs in the threads of
`lakeckpt.lake.parquet.ranges`. A forked process begins anew. The garbage collector may call `forget` and `close` in any
thread. So nothing that takes another lock is called under the lock of the prefetcher, which its holder may take again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from lakeckpt.lake.parquet.fit import FileFit
from lakeckpt.lake.parquet.ranges import Arriving, in_background
from lakeckpt.lake.parquet.row_group import HeldRowGroup, RowGroupPlan, RowGroupReader
from lakeckpt.lake.table.index import TableIndex

__all__ = ["OpenedFile", "Prefetcher"]

OPENED_AHEAD = 16
"""Files that are being opened at once."""
MOST_AHEAD = 64
"""Row groups that are held ahead."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedFile:
    """The reader of one file, and the fit of its columns to the table. It closes when nothing refers to it any more."""

    reader: RowGroupReader
    fit: FileFit
    plan: Callable[[int], RowGroupPlan]
    """Returns the columns to read of a row group, which is named by its ordinal in the table."""

    def __del__(self) -> None:
        self.reader.source.close()


@dataclass(slots=True, kw_only=True, eq=False)
class _Expected:
    """A row group that will be decoded."""

    file: Future[OpenedFile] | None = None
    size_bytes: int = 0
    """The read that was begun and not fetched yet."""
    arriving: Future[Arriving] | None = None
    is_settled: bool = False
    """Whether no more work is done ahead: the read was begun or fetched, is too large to hold ahead, or failed."""


@dataclass(slots=True, kw_only=True)
class _State:
    lock: threading.RLock = field(default_factory=threading.RLock)
    process: int = field(default_factory=os.getpid)
    files: OrderedDict[int, Future[OpenedFile]] = field(default_factory=OrderedDict)
    """By ordinal; the one used last is the last."""
    expected: dict[int, _Expected] = field(default_factory=dict)
    """By the row group's ordinal in the table, in the order in which they will be decoded."""


class Prefetcher:
    """Fetches row groups of the table of ``index``. ``open_file(ordinal)`` opens a file; at most ``most_open`` stay
    open. ``ahead_bytes``: how much is held ahead; 0: nothing is read ahead."""

    def __init__(
        self, index: TableIndex, open_file: Callable[[int], OpenedFile], *, most_open: int, ahead_bytes: int
    ) -> None:
        self._index, self._open_file = index, open_file
        self._most_open, self._ahead_bytes = most_open, ahead_bytes
        self._state = _State()

    def expect(self, groups: Iterable[int]) -> None:
        """Say that ``groups`` will be fetched next, in this order, and no others. It never waits and never raises."""
        if not self._ahead_bytes:
            return
        state = self._here()
        with state.lock:
            before = dict(state.expected)
            state.expected = {group: before.pop(group, _Expected()) for group in groups}
        _abandon(before.values())
        self._advance()

    @property
    def has_room(self) -> bool:
        """Whether more row groups would be fetched ahead now."""
        waiting = [one for one in list(self._state.expected.values()) if one.size_bytes or not one.is_settled]
        held = sum(one.size_bytes for one in waiting)
        return held < self._ahead_bytes and len(waiting) < MOST_AHEAD

    def fetch(self, group: int) -> tuple[OpenedFile, HeldRowGroup]:
        """Return the bytes of a row group, and the file that decodes them. Raises what opening and reading raise."""
        state = self._here()
        with state.lock:
            expected = state.expected.get(group) or _Expected()
            file, arriving = expected.file, expected.arriving
            expected.file, expected.arriving, expected.size_bytes, expected.is_settled = None, None, 0, True
        opened = self.opened(self._index.group(group)[0]) if file is None else file.result()
        plan = opened.plan(group)
        begun = opened.reader.begin(plan) if arriving is None else arriving.result()
        self._advance()  # after the row group that is wanted now
        return opened, opened.reader.arrived(plan, begun)

    def opened(self, ordinal: int) -> OpenedFile:
        """Return a file, which is opened if it is not open. Raises what opening raises."""
        state = self._here()
        with state.lock:
            file, is_new = self._file(state, ordinal)
        if is_new:
            self._open(state, ordinal, file)
        return file.result()

    def drop(self, ordinal: int) -> None:
        """Let the next user of a file open it anew."""
        with self._state.lock:
            self._state.files.pop(ordinal, None)

    def forget(self) -> None:
        """Drop what was fetched ahead."""
        state = self._here()
        with state.lock:
            gone, state.expected = state.expected, {}
        _abandon(gone.values())

    def close(self) -> None:
        """Drop what was fetched ahead, and close all files, those in use as soon as their users have finished."""
        self.forget()
        with self._state.lock:
            files, self._state.files = self._state.files, OrderedDict()
        files.clear()

    def _here(self) -> _State:
        if self._state.process != os.getpid():  # forked: a thread of the parent may hold the lock
            self._state = _State()
        return self._state

    def _file(self, state: _State, ordinal: int) -> tuple[Future[OpenedFile], bool]:
        """Return a file, and whether the caller must `_open` it. The caller has the lock."""
        found = state.files.pop(ordinal, None)
        state.files[ordinal] = file = Future() if found is None else found
        while len(state.files) > self._most_open:
            state.files.popitem(last=False)
        return file, found is None

    def _open(self, state: _State, ordinal: int, file: Future[OpenedFile]) -> None:
        """Open a file for all callers that wait for it. It never raises: the callers that wait get the error."""
        try:
            file.set_result(self._open_file(ordinal))
        except BaseException as error:
            self._failed(state, ordinal, file, error)

    def _failed(self, state: _State, ordinal: int, file: Future[OpenedFile], error: BaseException) -> None:
        with state.lock:
            if state.files.get(ordinal) is file:  # the next user tries again
                del state.files[ordinal]
        file.set_exception(error)

    def _advance(self) -> None:
        """Begin the expected reads for which there is room."""
        state = self._state
        while (begin := self._next(state)) is not None:
            begin()

    def _next(self, state: _State) -> Callable[[], None] | None:
        """Return a function that begins the next read, to be called without the lock; None: nothing can begin now."""
        with state.lock:
            opening = 0
            for group, one in list(state.expected.items())[:MOST_AHEAD]:
                if one.is_settled:
                    continue
                if one.file is None:
                    ordinal = self._index.group(group)[0]
                    one.file, is_new = self._file(state, ordinal)
                    if is_new:
                        return partial(self._open_ahead, state, ordinal, one.file)
                if not one.file.done():
                    opening += 1
                    if opening == OPENED_AHEAD:
                        return None
                elif (begin := self._planned(state, group, one, one.file)) is not None:
                    return begin
                elif not one.is_settled:
                    return None  # this row group has to wait until others were fetched
        return None

    def _planned(
        self, state: _State, group: int, one: _Expected, file: Future[OpenedFile]
    ) -> Callable[[], None] | None:
        """Return a function that begins to read a row group whose file is open; None where nothing is begun now."""
        try:
            opened = file.result()
            plan = opened.plan(group)
        except Exception:  # it is raised again when the row group is fetched
            one.is_settled = True
            return None
        size = plan.size_bytes
        if size > self._ahead_bytes:
            one.is_settled = True
            return None
        if size + sum(other.size_bytes for other in state.expected.values()) > self._ahead_bytes:
            return None
        one.arriving, one.size_bytes, one.is_settled = Future(), size, True
        return partial(_begin, opened.reader, plan, one.arriving)

    def _open_ahead(self, state: _State, ordinal: int, file: Future[OpenedFile]) -> None:
        """Let a background thread open a file. When the interpreter is ending, the callers that wait get an error."""

        def done(opening: Future[None]) -> None:
            error = opening.exception()
            if error is not None and not file.done():
                self._failed(state, ordinal, file, error)
            self._advance()

        try:
            in_background(self._open, state, ordinal, file).add_done_callback(done)
        except RuntimeError as error:
            self._failed(state, ordinal, file, error)


def _begin(reader: RowGroupReader, plan: RowGroupPlan, arriving: Future[Arriving]) -> None:
    try:
        arriving.set_result(reader.begin(plan))
    except BaseException as error:
        arriving.set_exception(error)


def _abandon(expected: Iterable[_Expected]) -> None:
    for one in expected:
        if one.arriving is not None:
            one.arriving.add_done_callback(_abandon_arriving)


def _abandon_arriving(arriving: Future[Arriving]) -> None:
    if arriving.exception() is None:
        arriving.result().abandon()
