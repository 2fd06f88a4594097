"""This module shows how far long work has come: one line of the terminal, if stderr is one, and nothing otherwise.

Work that takes long calls ``progress(done, total, what)`` as it advances. `progress_bar` makes such a function, which
shows a bar of the library rich if that is installed, else a line of text. The line is cleared at the end. The module
starts no threads, and imports rich when there is something to show.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["Advance", "Progress", "progress_bar"]

Progress = Callable[[int, int, str], object]
"""Is called with what is done, the total and what it is of, on the thread that asked for the work."""
_EVERY_S = 0.1


class Advance(Protocol):
    """Shows that ``done`` of ``total`` are done of ``what``; the bar's own name if it is not given."""

    def __call__(self, done: int, total: int, what: str = ..., /) -> None: ...


@contextmanager
def progress_bar(what: str, *, show: bool = True, after_s: float = 0.0) -> Iterator[Advance | None]:
    """Give a function that shows progress while the body runs; None unless ``show``. One thread calls it.

    ``after_s``: nothing is shown of work that is done sooner.
    """
    bar: _Line | _Bar | None = None
    begin_s = time.monotonic()

    def advance(done: int, total: int, of: str = what, /) -> None:
        nonlocal bar
        if time.monotonic() - begin_s < after_s or not sys.stderr.isatty():
            return
        if bar is None:
            bar = _opened()
        bar.show(done, max(1, total), of)

    try:
        yield advance if show else None
    finally:
        if bar is not None:
            bar.close()


def _opened() -> _Line | _Bar:
    try:
        return _Bar()
    except ImportError:
        return _Line()


class _Line:
    """A line of text."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, done: int, total: int, what: str) -> None:
        """Write the line, if it has changed."""
        text = f"{what} {done / total:.0%}"
        if text != self._shown:
            print("\r" + text.ljust(len(self._shown)), end="", file=sys.stderr, flush=True)
            self._shown = text

    def close(self) -> None:
        """Clear the line."""
        print("\r" + " " * len(self._shown), end="\r", file=sys.stderr, flush=True)


class _Bar:
    """A bar of rich. Raises ``ImportError`` if that is not installed."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        texts = [TextColumn(one) for one in ("{task.description}", "{task.percentage:>3.0f}%")]
        columns: list[Any] = [texts[0], BarColumn(), texts[1], TimeRemainingColumn()]
        self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
        self._task = self._bar.add_task("", total=None)
        self._next_s = 0.0
        self._bar.start()

    def show(self, done: int, total: int, what: str) -> None:
        """Draw the bar, ten times a second at most."""
        now_s = time.monotonic()
        if now_s >= self._next_s or done >= total:
            self._next_s = now_s + _EVERY_S
            self._bar.update(self._task, description=what, total=total, completed=done, refresh=True)

    def close(self) -> None:
        """Clear the bar."""
        self._bar.stop()
