"""How does a profile get beside a run that is still going on?  Written every so often, so that a crash leaves one, too.

`ProfileKeeper` writes what `Bubbles` has seen, some seconds after it began and then once a minute, by a thread of its
own that lives from `begin` to `end`; `end` joins it, and writes the last iterations. A profile that cannot be written
is no reason to end a job: `end` says so.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from lakeckpt.checkpoint.report import SaveWarning
from lakeckpt.errors import StorageError

__all__ = ["ProfileKeeper"]

_FIRST_S = 10.0
_EVERY_S = 60.0


class ProfileKeeper:
    """Calls ``write`` every so often. ``who`` is for the warning."""

    def __init__(
        self, write: Callable[[], None], who: str, *, first_s: float = _FIRST_S, every_s: float = _EVERY_S
    ) -> None:
        self._write, self._who = write, who
        self._first_s, self._every_s = first_s, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lakeckpt-profile", daemon=True)

    def begin(self) -> None:
        """Start to write."""
        self._thread.start()

    def end(self) -> None:
        """Write a last time, and stop."""
        self._over.set()
        self._thread.join()
        try:
            self._write()
        except StorageError as error:
            warnings.warn(f"where {self._who} was idle could not be written: {error}", SaveWarning, stacklevel=5)

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._over.wait(wait_s):
            wait_s = self._every_s
            try:
                self._write()
            except StorageError:
                continue  # there is another time; the last one is told of
