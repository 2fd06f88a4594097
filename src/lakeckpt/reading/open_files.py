"""Which files are open?  Each once, for all threads; those used last stay open, and one that is in use is never closed.

`OpenFiles.lease` says who opens a file that is not open yet: the first who asked. All others wait for it. Opens nothing
of its own accord, starts no threads, and knows nothing of row groups.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from lakeckpt.lake.deferring import Deferring
from lakeckpt.reading.fitting import FileFit
from lakeckpt.reading.row_groups import RowGroupReader

__all__ = ["Lease", "OpenFiles", "OpenedFile"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedFile:
    """What reads a file of the table, and how its columns become the table's."""

    reader: RowGroupReader
    fit: FileFit


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The use of a file, until it is given back. ``file`` has it as soon as it is open, or why it cannot be."""

    ordinal: int
    file: Future[OpenedFile] = field(default_factory=Future)
    users: int = 0

    def close(self) -> None:
        """Close the file, if it was ever open."""
        if self.file.done() and self.file.exception() is None:
            with contextlib.suppress(OSError):  # it was read only
                self.file.result().reader.source.close()


class OpenFiles:
    """Files of a table, opened by ``opener(ordinal)``; at most ``most`` stay open beside those that are in use."""

    def __init__(self, opener: Callable[[int], OpenedFile], *, most: int) -> None:
        self._opener, self._most = opener, most
        self.renew()

    def renew(self) -> None:
        """Begin anew in a forked process, where those who were to open files are not."""
        self._state = Deferring()
        self._files: OrderedDict[int, Lease] = OrderedDict()

    def lease(self, ordinal: int) -> tuple[Lease, bool]:
        """The use of a file, and whether the caller must `open` it. It is given back by `release`."""
        with self._state.lock:
            self._state.catch_up()
            lease = self._files.pop(ordinal, None)
            is_new = lease is None
            if lease is None:
                unused = [one for one in self._files.values() if not one.users]
                for one in unused[: max(0, len(self._files) - self._most + 1)]:
                    self._files.pop(one.ordinal).close()
                lease = Lease(ordinal=ordinal)
            self._files[ordinal] = lease
            lease.users += 1
            return lease, is_new

    def open(self, lease: Lease) -> None:
        """Open the file, for all who wait for it; never raises: they are told."""
        try:
            lease.file.set_result(self._opener(lease.ordinal))
        except BaseException as error:
            self.fail(lease, error)

    def fail(self, lease: Lease, error: BaseException) -> None:
        """The file cannot be opened, and all who wait for it are told. Called instead of `open`, once."""
        self._forget(lease)  # whoever asks next, tries again
        lease.file.set_exception(error)

    def release(self, lease: Lease) -> None:
        """Give a file back."""
        self._state.when_free(partial(self._released, lease))

    def drop(self, ordinal: int) -> None:
        """Let who asks for the file next open it anew."""
        self._state.when_free(partial(self._dropped, ordinal))

    def close(self) -> None:
        """Close all files, those in use as soon as they are given back."""
        self._state.when_free(self._all_dropped)

    def _released(self, lease: Lease) -> None:
        lease.users -= 1
        if not lease.users and self._files.get(lease.ordinal) is not lease:
            lease.close()

    def _dropped(self, ordinal: int) -> None:
        lease = self._files.pop(ordinal, None)
        if lease is not None and not lease.users:
            lease.close()

    def _all_dropped(self) -> None:
        for ordinal in list(self._files):
            self._dropped(ordinal)

    def _forget(self, lease: Lease) -> None:
        with self._state.lock:
            self._state.catch_up()
            if self._files.get(lease.ordinal) is lease:
                del self._files[lease.ordinal]
