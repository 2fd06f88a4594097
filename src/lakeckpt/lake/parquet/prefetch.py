"""This module opens the files of a table, and fetches the bytes of row groups before they are decoded.

`Prefetcher.expect` takes the row groups that are decoded next, in their order. If the row groups lie in a store,
the prefetcher opens the files and starts to read the column chunks, while the bytes that are not fetched yet stay
within ``ahead_bytes``. `Prefetcher.fetch` waits for the bytes of one row group, whether the row group was expected or
not. A row group that is fetched never waits for row groups that are only expected. Local files are not read ahead: a
file is opened and mapped anew for each row group, so that the process holds neither the descriptors of many files nor
their pages.

A file's footer is looked up once, for all threads. The files that were used last stay known; no file is held open.

Threads may share a prefetcher. It decodes nothing, and its background work runs in the threads of
`lakeckpt.lake.parquet.ranges`. The garbage collector may call `close` in any thread, so `close` takes no lock. A forked
process calls `forget` first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from io import FileIO

import pyarrow as pa

from lakeckpt.counters import store_counters
from lakeckpt.lake.parquet.fit import FileFit
from lakeckpt.lake.parquet.ranges import Fetch, in_background
from lakeckpt.lake.parquet.row_group import RowGroupPlan, RowGroupReader
from lakeckpt.lake.table.index import TableIndex

__all__ = ["AheadBytes", "OpenedFile", "Prefetcher"]

OPENED_AHEAD = 16
"""Files that are being opened at once."""
MOST_AHEAD = 64
"""Row groups that are held ahead."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedFile:
    """The reader of one file, and the fit of its columns to the table."""

    reader: RowGroupReader
    fit: FileFit
    plan: Callable[[int], RowGroupPlan]
    """Returns the columns to read of a row group, which is named by its ordinal in the table."""
    local: Callable[[], FileIO] | None
    """Opens the local file; None: the file lies in a store."""
    read: Callable[[int, int], bytes]
    """Reads bytes [start, stop) from a store."""

    def begin(self, plan: RowGroupPlan) -> Fetch:
        """Start to read a row group from a store."""
        return Fetch(self.read, plan.ranges)


@dataclass(slots=True, kw_only=True, eq=False)
class _Expected:
    """A row group that is decoded soon."""

    file: Future[OpenedFile] | None = None
    fetch: Fetch | None = None
    """The read that was begun and not waited for yet."""
    size_bytes: int = 0
    """The size of this read."""
    is_settled: bool = False
    """True if no more work is done ahead: the read was begun or fetched, is too large to hold ahead, or failed."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class _State:
    """The files that are open, and the reads that are expected, until `Prefetcher.close`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    files: OrderedDict[int, Future[OpenedFile]] = field(default_factory=OrderedDict)
    """By ordinal; the one used last is the last."""
    expected: dict[int, _Expected] = field(default_factory=dict)
    """By the row group's ordinal in the table, in the order in which they are decoded."""
    is_closed: bool = False

    @property
    def held_bytes(self) -> int:
        """The bytes that were fetched ahead, or are being fetched. Any thread may ask."""
        return sum(one.size_bytes for one in list(self.expected.values()))


class AheadBytes:
    """The bytes that some prefetchers hold ahead together: at most ``limit``, as they are stored."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._states: list[weakref.ref[_State]] = []

    def add(self, state: _State) -> None:
        """Count what ``state`` holds, as long as somebody refers to it."""
        self._states = [one for one in self._states if one() is not None]
        self._states.append(weakref.ref(state))

    @property
    def held(self) -> int:
        """The bytes that are held now."""
        return sum(state.held_bytes for one in list(self._states) if (state := one()) is not None)


class Prefetcher:
    """Fetches row groups of the table of ``index``. ``open_file(ordinal)`` opens a file; at most ``most_open`` stay
    known. ``ahead``: how much is held ahead; nothing is read ahead if its limit is 0."""

    def __init__(
        self, index: TableIndex, open_file: Callable[[int], OpenedFile], *, most_open: int, ahead: AheadBytes
    ) -> None:
        self._index, self._open_file = index, open_file
        self._most_open, self._ahead = most_open, ahead
        self._state = self._begun()

    def _begun(self) -> _State:
        state = _State()
        self._ahead.add(state)
        return state

    def expect(self, groups: Iterable[int]) -> None:
        """Replace the row groups that are expected by ``groups``, in this order. It never waits and never raises."""
        if not self._ahead.limit:
            return
        state = self._state
        with state.lock:
            before = dict(state.expected)
            state.expected = {group: before.pop(group, _Expected()) for group in groups}
        _cancel(before.values())
        self._advance(state)

    def fetch(self, group: int) -> tuple[OpenedFile, RowGroupPlan, pa.NativeFile]:
        """Return the opened file of a row group, its plan, and a file that holds the bytes of the plan.

        The caller closes this last file. Raises what opening and reading raise.
        """
        state, ordinal = self._state, self._index.group(group)[0]
        with state.lock:
            expected = state.expected.get(group) or _Expected()
            file, fetch = expected.file, expected.fetch
            expected.file, expected.fetch, expected.size_bytes, expected.is_settled = None, None, 0, True
        opened = self.opened(ordinal) if file is None else _result(state, ordinal, file)
        plan = opened.plan(group)
        if opened.local is not None:
            store_counters("local").read(plan.size_bytes)
            with opened.local() as local:
                return opened, plan, pa.memory_map(f"/proc/self/fd/{local.fileno()}")
        fetch = fetch or opened.begin(plan)
        self._advance(state)  # after the row group that is wanted now
        return opened, plan, fetch.wait()

    def opened(self, ordinal: int) -> OpenedFile:
        """Return a file, which is opened if it is not open. Raises what opening raises."""
        state = self._state
        with state.lock:
            known = self._known(state, ordinal)
            file = known or self._keep(state, ordinal, Future())
        if known is None:
            try:
                file.set_result(self._open_file(ordinal))
            except BaseException as error:
                file.set_exception(error)
        return _result(state, ordinal, file)

    def drop(self, ordinal: int) -> None:
        """Let the next user of a file open it anew."""
        state = self._state
        with state.lock:
            state.files.pop(ordinal, None)

    def close(self) -> None:
        """Drop what was fetched ahead, and forget all files."""
        old, self._state = self._state, self._begun()
        old.is_closed = True
        _cancel(list(old.expected.values()))

    def forget(self) -> None:
        """Begin anew in a forked process: threads that the parent has may hold the locks of what was inherited, and
        never finish its work here."""
        self._state = self._begun()

    def _known(self, state: _State, ordinal: int) -> Future[OpenedFile] | None:
        """Return a file that is open or being opened, if it is. The caller has the lock."""
        if ordinal in state.files:
            state.files.move_to_end(ordinal)
        return state.files.get(ordinal)

    def _keep(self, state: _State, ordinal: int, file: Future[OpenedFile]) -> Future[OpenedFile]:
        """Remember a file, and drop the files that were used least recently. The caller has the lock."""
        state.files[ordinal] = file
        while len(state.files) > self._most_open:
            state.files.popitem(last=False)
        return file

    def _advance(self, state: _State) -> None:
        """Begin the expected work for which there is room. It never waits and never raises."""
        opening: list[Future[OpenedFile]] = []
        try:
            with state.lock:
                self._begin(state, opening)
        except RuntimeError:  # the interpreter is ending: no thread takes more work
            state.is_closed = True
        for file in opening:
            file.add_done_callback(lambda _: self._advance(state))

    def _begin(self, state: _State, opening: list[Future[OpenedFile]]) -> None:
        """Open files, each of which is added to ``opening``, and begin to read. The caller has the lock."""
        waiting = 0
        for group, one in list(state.expected.items())[:MOST_AHEAD]:
            if one.is_settled or state.is_closed:
                continue
            ordinal = self._index.group(group)[0]
            if one.file is None:
                one.file = self._known(state, ordinal)
            if one.file is None:
                one.file = self._keep(state, ordinal, in_background(self._open_file, ordinal))
                opening.append(one.file)
            if not one.file.done():
                waiting += 1
                if waiting == OPENED_AHEAD:
                    return
            elif not self._begin_to_read(state, group, one, one.file):
                return

    def _begin_to_read(self, state: _State, group: int, one: _Expected, file: Future[OpenedFile]) -> bool:
        """Begin to read a row group whose file is open. False: it has to wait until others were fetched."""
        one.is_settled = True
        try:
            opened = file.result()
            plan = opened.plan(group)
        except Exception:  # it is raised again when the row group is fetched
            return True
        if plan.size_bytes > self._ahead.limit:
            return True
        if plan.size_bytes + self._ahead.held > self._ahead.limit:
            one.is_settled = False
            return False
        one.size_bytes, one.fetch = plan.size_bytes, opened.begin(plan)
        return True


def _result(state: _State, ordinal: int, file: Future[OpenedFile]) -> OpenedFile:
    """Wait until a file is open. If opening fails, the next user tries again."""
    try:
        return file.result()
    except BaseException:
        with state.lock:
            if state.files.get(ordinal) is file:
                del state.files[ordinal]
        raise


def _cancel(expected: Iterable[_Expected]) -> None:
    for one in expected:
        if one.fetch is not None:
            one.fetch.cancel()
