"""This module formats what commands print: plain text in columns for people, one JSON document for programs.

Commands pass values, and this module formats them: bytes, counts, ranges of rows, times. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime

__all__ = [
    "TextTable",
    "drop_output",
    "format_bytes",
    "format_count",
    "format_rows",
    "format_time",
    "print_json",
]


def drop_output() -> None:
    """Redirect stdout to ``/dev/null``. Otherwise Python would fail at its exit, with a status of its own."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class TextTable:
    """A table of cells in columns. A column whose head begins with ``>`` is aligned to the right. A table without any
    head has no line of heads.

    >>> table = TextTable("file", ">rows", title="A table")
    >>> table.add_row("part-0", 1000)
    >>> table.add_row("part-10", 7)
    >>> print(table)
    A table
    file      rows
    part-0   1,000
    part-10      7
    """

    def __init__(self, *heads: str, title: str | None = None) -> None:
        self._right = [head.startswith(">") for head in heads]
        self._title = title
        texts = [head.removeprefix(">") for head in heads]
        self._rows: list[Sequence[str]] = [texts] if any(texts) else []

    def add_row(self, *cells: str | int) -> None:
        """Add a row, one cell for each column. Numbers get separators of thousands."""
        self._rows.append([cell if isinstance(cell, str) else f"{cell:,}" for cell in cells])

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        lines = [] if self._title is None else [self._title]
        for row in self._rows:
            cells = zip(row, widths, self._right, strict=True)
            lines.append("  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells))
        return "\n".join(line.rstrip() for line in lines)


def print_json(value: Mapping[str, object]) -> None:
    """Write one JSON document to stdout, in ASCII."""
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


def format_bytes(size: float) -> str:
    """Return a size in a fitting unit: ``999 B``, ``1.5 MB``.

    >>> format_bytes(999), format_bytes(1_500_000), format_bytes(0)
    ('999 B', '1.5 MB', '0 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def format_count(count: int, one: str, many: str | None = None) -> str:
    """Return a count and its noun.

    >>> format_count(1, "row"), format_count(2000, "row"), format_count(2, "index", "indexes")
    ('1 row', '2,000 rows', '2 indexes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_rows(ranges: Sequence[tuple[int, int]], *, of: int | None = None, most: int = 8) -> str:
    """Return half-open ranges of rows as text for people.

    >>> format_rows([(0, 1), (3, 6)]), format_rows([(0, 30)], of=30), format_rows([(0, 1), (2, 3), (4, 6)], most=2)
    ('0, 3–5', 'all 30', '0, 2, … 2 more')
    """
    if of is not None and list(ranges) == [(0, of)]:
        return f"all {of:,}"
    shown = [str(start) if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in ranges[:most]]
    left = sum(stop - start for start, stop in ranges[most:])
    return ", ".join(shown) + (f", … {left:,} more" if left else "")


def format_time(seconds: float) -> str:
    """Return seconds since 1970 as local time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
