"""Where do the results go?  Tables to the terminal; JSON, pictures and the page's tables to a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.readers.pictures import draw
from benchmarks.readers.registry import READERS
from benchmarks.readers.summary import Grid, grids

__all__ = ["publish", "show"]


def show(results: dict[str, Any]) -> None:
    """Print every table."""
    console = Console(width=max(Console().width, 190))
    for grid in grids(results):
        table = Table(title=grid.title, title_justify="left")
        for number, column in enumerate(grid.columns):
            table.add_column(column, justify="left" if number < 3 else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


def publish(folder: Path, results: dict[str, Any]) -> None:
    """Write ``readers.json``, a picture for each data set, and ``readers-results.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "readers.json").write_text(json.dumps(results, indent=1) + "\n")
    pictures = draw(folder, results)
    (folder / "readers-results.md").write_text(_page(results, pictures))


def _page(results: dict[str, Any], pictures: Sequence[Path]) -> str:
    parts = [
        "# Readers: the results\n",
        "Made by the command below; do not edit. What is measured, how fair it is, and what it means: "
        "[readers.md](readers.md). Everything, with every repetition: [readers.json](readers.json).\n",
        "```text\n" + "\n".join(f"{name}: {value}" for name, value in results["about"].items()) + "\n```\n",
        *(f"![{path.stem}]({path.name})\n" for path in pictures),
        *(_markdown(grid) for grid in grids(results)),
        _remarks(results),
    ]
    return "\n".join(parts)


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
    for name, entry in READERS.items():
        version = versions.get(name) or "not installed"
        lines.append(f"| {entry.label} | {entry.package} {version} | {words[entry.kind]} | {entry.why} |")
    return "\n".join([*lines, ""])
