"""This module lays out the tables of a mixture, and computes their weights.

Source n is a folder with one file of the data set, file n modulo the number of files, as a hard link. So a mixture of
eight reads the same bytes as the data set itself, and 64 sources take no room on the disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.readers.case import Case

__all__ = ["Source", "lay_out", "sources", "weights"]

LEAST = {8: 0.03, 64: 1e-4}
"""The smallest weight of a mixture of so many sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One table of a mixture."""

    name: str
    folder: Path
    file: Path
    """The file of the data set that the folder holds."""
    weight: float


def weights(count: int) -> list[float]:
    """Return ``count`` weights that grow by one factor from `LEAST`; their sum is 1."""
    if count == 1:
        return [1.0]
    least = LEAST[count]
    low, high = 1.0, 1.0 / least
    for _ in range(100):
        factor = (low + high) / 2
        if sum(least * factor**n for n in range(count)) < 1:
            low = factor
        else:
            high = factor
    found = [round(least * low**n, 6) for n in range(count - 1)]
    return [*found, round(1 - sum(found), 6)]


def sources(case: Case) -> list[Source]:
    """Return the tables that ``case`` mixes; one source alone is the data set itself, with all its files."""
    files = case.files
    folders = [case.converted(f"sources-{case.sources}") / f"{n:02d}" for n in range(case.sources)]
    if case.sources == 1:
        folders = [Path(case.folder)]
    return [
        Source(name=f"source {n}", folder=folder, file=files[n % len(files)], weight=weight)
        for n, (folder, weight) in enumerate(zip(folders, weights(case.sources), strict=True))
    ]


def lay_out(case: Case) -> None:
    """Make the folders of the sources, where they are not there yet."""
    for source in sources(case) if case.sources > 1 else ():
        source.folder.mkdir(parents=True, exist_ok=True)
        link = source.folder / source.file.name
        if not link.exists():
            os.link(source.file, link)
