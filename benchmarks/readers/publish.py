"""Where do the results go?  Tables to the terminal; JSON, pictures and the page's tables to a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.readers.pictures import draw
from benchmarks.readers.plan import TRANSITIONS
from benchmarks.readers.registry import ENTRIES, READERS
from benchmarks.readers.streams.summary import stream_grids
from benchmarks.readers.summary import Grid, grids

__all__ = ["publish", "show"]


def show(results: dict[str, Any]) -> None:
    """Print every table."""
    console = Console(width=max(Console().width, 190))
    for grid in _all_grids(results):
        table = Table(title=grid.title, title_justify="left")
        for number, column in enumerate(grid.columns):
            table.add_column(column, justify="left" if number < 3 else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


def _all_grids(results: dict[str, Any]) -> list[Grid]:
    return [*grids(results), *stream_grids(results.get("streams", ()))]


def publish(folder: Path, results: dict[str, Any]) -> None:
    """Write ``readers.json``, a picture for each data set, and ``readers-results.md``.

    Parts (speed, resume, exact, streams) that were not measured this time are kept as they were; each says what it
    is of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "readers.json"
    old = json.loads(path.read_text()) if path.exists() else {"versions": {}, "about": {}}
    merged: dict[str, Any] = {name: {**old[name], **results[name]} for name in ("versions", "about")}
    if "exact" in results:  # counts, unlike times, may be of different runs
        found = {_key(one): one for one in (*old.get("exact", ()), *results["exact"])}
        merged["exact"] = sorted(found.values(), key=_order)
    results = {**old, **results, **merged}
    for part in ("speed", "resume", "exact", "streams"):
        for one in results.get(part, ()):
            one["case"]["folder"] = Path(one["case"]["folder"]).name  # where it lay is nobody's business
    path.write_text(json.dumps(results, indent=1) + "\n")
    pictures = draw(folder, results)
    (folder / "readers-results.md").write_text(_page(results, pictures))


def _key(one: dict[str, Any]) -> str:
    """What an exactness was counted of."""
    return json.dumps([one["case"]["reader"], one["case"]["rows"], one["before"], one["after"]])


def _order(one: dict[str, Any]) -> tuple[int, int, int]:
    """Where a count stands in the tables."""
    changes = [[asdict(before), asdict(after)] for before, after in TRANSITIONS]
    readers, change = list(READERS), [one["before"], one["after"]]
    reader = one["case"]["reader"]
    return (
        -one["case"]["rows"],
        readers.index(reader) if reader in readers else len(readers),
        changes.index(change) if change in changes else len(changes),
    )


def _page(results: dict[str, Any], pictures: Sequence[Path]) -> str:
    parts = [
        "# Readers: the results\n",
        "Made by the command below; do not edit. What is measured, how fair it is, and what it means: "
        "[readers.md](readers.md). Everything, with every repetition: [readers.json](readers.json).\n",
        *(_about(part, about) for part, about in results["about"].items()),
        *(f"![{path.stem}]({path.name})\n" for path in pictures),
        *(_markdown(grid) for grid in _all_grids(results)),
        _remarks(results),
    ]
    return "\n".join(parts)


def _about(part: str, about: dict[str, Any]) -> str:
    lines = [f"{name}: {value}" for name, value in {"part": part, **about}.items()]
    return "\n".join(["```text", *lines, "```", ""])


def _markdown(grid: Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    rule = "| " + " | ".join("---" if number == 0 else "---:" for number in range(len(grid.columns))) + " |"
    return "\n".join(
        [f"## {grid.title[:1].upper()}{grid.title[1:]}\n", line(grid.columns), rule, *map(line, grid.rows), ""]
    )


def _remarks(results: dict[str, Any]) -> str:
    versions = results["versions"]
    lines = ["## The readers\n", "| reader | version | what it reads | remarks |", "| --- | --- | --- | --- |"]
    words = {"ours": "Parquet", "limit": "Parquet", "parquet": "Parquet", "converted": "its own format, converted"}
    for name, entry in ENTRIES.items():
        version = versions.get(name) or "not installed"
        lines.append(f"| {entry.label} | {entry.package} {version} | {words[entry.kind]} | {entry.why} |")
    return "\n".join([*lines, ""])
