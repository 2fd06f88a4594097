"""This module formats what commands print: plain text in columns for people, one JSON document for programs.

Commands pass values, and this module formats them: bytes, counts, ranges of rows, times. It also makes sure that
output that cannot be written (a narrow encoding, a full disk, a closed pipe) is reported as an error, and does not look
like a result.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from lakeckpt.errors import ConfigError

__all__ = [
    "StatusLine",
    "TextTable",
    "add_run_arguments",
    "drop_output",
    "escape_output",
    "options_of",
    "print_json",
    "progress_bar",
    "say_bytes",
    "say_many",
    "say_rows",
    "say_when",
]

Progress = Callable[[int, int], None]


def escape_output() -> None:
    """Make stdout and stderr escape characters that their encoding lacks; a closed stream becomes ``/dev/null``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Redirect stdout to ``/dev/null``. Otherwise Python would fail at its exit, with a status of its own."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class TextTable:
    """A table of cells in columns. A column whose head begins with ``>`` is aligned to the right. Cells and heads may
    have several lines. A table without any head has no line of heads.

    >>> table = TextTable("file", ">rows\\nread", title="A table")
    >>> table.add_row("part-0", "1,000")
    >>> table.add_row("part-10\\nagain", "7")
    >>> print(table)
    A table
    file      rows
              read
    part-0   1,000
    part-10      7
    again
    """

    def __init__(self, *heads: str, title: str | None = None) -> None:
        self._right = [head.startswith(">") for head in heads]
        self._title = title
        texts = [head.removeprefix(">") for head in heads]
        self._rows: list[list[str]] = []
        if any(texts):
            self.add_row(*texts)

    def add_row(self, *cells: str) -> None:
        """Add a row, one cell for each column."""
        lines = [cell.split("\n") for cell in cells]
        self._rows += [list(line) for line in itertools.zip_longest(*lines, fillvalue="")]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        lines = [] if self._title is None else [self._title]
        for row in self._rows:
            cells = zip(row, widths, self._right, strict=True)
            lines.append("  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells))
        return "\n".join(line.rstrip() for line in lines)


class StatusLine:
    """A line on stderr that is replaced again and again. Does nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        """Show ``text`` in place of the present line."""
        if text != self._shown and sys.stderr.isatty():
            print("\r" + text.ljust(len(self._shown)), end="", file=sys.stderr, flush=True)
            self._shown = text

    def clear(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r" + " " * len(self._shown), end="\r", file=sys.stderr, flush=True)
            self._shown = ""


def print_json(value: Mapping[str, object]) -> None:
    """Write one JSON document to stdout, in ASCII."""
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


@contextlib.contextmanager
def progress_bar(what: str, *, show: bool) -> Iterator[Progress | None]:
    """Give a ``(done, total)`` callable that shows progress on stderr while the body runs; None unless ``show``."""
    line = StatusLine()
    try:
        yield (lambda done, total: line.show(f"{what} {done / max(1, total):.0%}")) if show else None
    finally:
        line.clear()


def say_bytes(size: float) -> str:
    """Return a size in a fitting unit: ``999 B``, ``1.5 MB``.

    >>> say_bytes(999), say_bytes(1_500_000), say_bytes(0)
    ('999 B', '1.5 MB', '0 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def say_many(count: int, one: str, many: str | None = None) -> str:
    """Return a count and its noun.

    >>> say_many(1, "row"), say_many(2000, "row"), say_many(2, "index", "indexes")
    ('1 row', '2,000 rows', '2 indexes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def say_rows(ranges: Sequence[tuple[int, int]], *, of: int | None = None, most: int = 8) -> str:
    """Return half-open ranges of rows as text for people.

    >>> say_rows([(0, 1), (3, 6)]), say_rows([(0, 30)], of=30), say_rows([(i, i + 1) for i in range(0, 9, 2)], most=3)
    ('0, 3–5', 'all 30', '0, 2, 4, … 2 more')
    """
    if of is not None and list(ranges) == [(0, of)]:
        return f"all {of:,}"
    shown = [str(start) if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in ranges[:most]]
    left = sum(stop - start for start, stop in ranges[most:])
    return ", ".join(shown) + (f", … {left:,} more" if left else "")


def say_when(seconds: float) -> str:
    """Return seconds since 1970 as local time."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "?"


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that read a run."""
    parser.add_argument("place", metavar="RUN", help="where the run's checkpoints are: a folder, or a URL")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def options_of(text: str | None) -> dict[str, Any] | None:
    """Return the value of ``--storage-options``: a JSON object. `ConfigError` if it is anything else."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--storage-options must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--storage-options must be a JSON object, got {text!r}")
    return value
