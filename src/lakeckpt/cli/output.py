"""How does a command speak?  Tables, bars and colours for people with rich, one JSON document for programs without it.

Commands hand over values; what they look like is settled here: bytes, counts, ranges of rows, times. Never decides
anything, and imports rich only when something is to be shown to people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lakeckpt.cli.streams import holds_all_characters
from lakeckpt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "add_run_arguments",
    "literal",
    "make_console",
    "make_table",
    "options_of",
    "print_json",
    "progress_bar",
    "say_bytes",
    "say_many",
    "say_rows",
    "say_when",
]

_PLAIN_WIDTH = 140
"""Columns of an output that is no terminal."""

Progress = Callable[[int, int], None]


def make_console(*, stderr: bool = False) -> Console:
    """Where tables go. `ConfigError` naming the extra where rich is missing."""
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError(
            "tables need the package rich, which is not installed: pip install 'lakeckpt[cli]', or ask for --json"
        ) from None
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, highlight=False, soft_wrap=not stream.isatty(), width=None if stream.isatty() else _PLAIN_WIDTH
    )


def make_table(*columns: str, title: str | None = None) -> Table:
    """A table without lines; a column whose name begins with ``>`` is aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, title=title, title_justify="left", title_style="bold", padding=(0, 2, 0, 0), header_style="dim"
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(Text(column.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    return table


def print_json(value: Mapping[str, object]) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=1, ensure_ascii=not holds_all_characters(sys.stdout))
    sys.stdout.write("\n")


@contextlib.contextmanager
def progress_bar(what: str, *, show: bool, unit: str = "") -> Iterator[Progress | None]:
    """A bar on stderr while the body runs, if ``show`` and stderr is a terminal: gives a ``(done, total)`` callable."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        TimeRemainingColumn(),
        console=make_console(stderr=True),
        transient=True,
    )
    with bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def say_bytes(size: float) -> str:
    """In the unit that suits: ``999 B``, ``1.5 MB``.

    >>> say_bytes(999), say_bytes(1_500_000), say_bytes(0)
    ('999 B', '1.5 MB', '0 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def say_many(count: int, one: str, many: str | None = None) -> str:
    """A count and its noun.

    >>> say_many(1, "row"), say_many(2000, "row"), say_many(2, "index", "indexes")
    ('1 row', '2,000 rows', '2 indexes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def say_rows(ranges: Sequence[tuple[int, int]], *, of: int | None = None, most: int = 8) -> str:
    """Half-open ranges of rows as people write them.

    >>> say_rows([(0, 1), (3, 6)]), say_rows([(0, 30)], of=30), say_rows([(i, i + 1) for i in range(0, 9, 2)], most=3)
    ('0, 3–5', 'all 30', '0, 2, 4, … 2 more')
    """
    if of is not None and list(ranges) == [(0, of)]:
        return f"all {of:,}"
    shown = [str(start) if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in ranges[:most]]
    left = sum(stop - start for start, stop in ranges[most:])
    return ", ".join(shown) + (f", … {left:,} more" if left else "")


def say_when(seconds: float) -> str:
    """Seconds since 1970 as local time."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "?"


def literal(text: str) -> str:
    """A text in which brackets mean brackets, not styles."""
    return text.replace("\\", "\\\\").replace("[", "\\[") if "[" in text else text


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of all commands that read a run."""
    parser.add_argument("place", metavar="RUN", help="where the run's checkpoints are: a folder, or a URL")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def options_of(text: str | None) -> dict[str, Any] | None:
    """What ``--storage-options`` gave: a JSON object. `ConfigError` where it is none."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--storage-options must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--storage-options must be a JSON object, got {text!r}")
    return value
