"""What do the measurements come to?  Grids of text, for the terminal and for the page alike; medians, with spreads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.readers.plan import TRANSITIONS
from benchmarks.readers.registry import READERS

__all__ = ["Grid", "exact_grid", "grids", "median_rate"]

Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of text; the first column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def median_rate(one: Found) -> float | None:
    """Median rows/s of a case; None where it failed."""
    return _median(one, "rows_per_s")


def _median(one: Found, key: str) -> float | None:
    values = [run[key] for run in one["runs"] if key in run]
    return statistics.median(values) if values else None


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _rate(one: Found) -> str:
    rates = [run["rows_per_s"] for run in one["runs"]]
    if len(rates) == 1:
        return f"{_short(rates[0])} (once)"
    return f"{_short(statistics.median(rates))} ({_short(min(rates))} … {_short(max(rates))})"


def _speed_row(one: Found, limit: float | None) -> tuple[str, ...]:
    case = one["case"]
    entry = READERS[case["reader"]]
    how = "shuffled" if case["shuffle"] else "in order"
    workers = f"{case['workers']} {'threads' if entry.threads else 'workers'}" if case["workers"] else "in process"
    name = (entry.label, how, workers)
    rate = median_rate(one)
    if rate is None:
        return (*name, one["failures"][-1][:100] if one["failures"] else "not run", "", "", "", "", "")
    first = _median(one, "first_batch_s")
    peaks = [run["peak_bytes"] - run["start_bytes"] for run in one["runs"] if "peak_bytes" in run]
    wrong = sum(run["lost_in_whole_epochs"] + run["repeated"] for run in one["runs"])
    return (
        *name,
        _rate(one) + (f"; {wrong} rows lost or repeated" if wrong else ""),
        f"{rate * case['row_bytes'] / 1e6:,.0f}",
        "" if limit is None else f"{rate / limit:.3g}",
        "" if first is None else f"{first:.2f}",
        f"{max(peaks) / 1e6:.0f}" if peaks else "",
        "" if not one["failures"] else f"failed {len(one['failures'])} times: {one['failures'][-1][:60]}",
    )


def _speed_grid(table: str, batch_size: int, found: Sequence[Found]) -> Grid:
    limits = [median_rate(one) for one in found if READERS[one["case"]["reader"]].kind == "limit"]
    limit = max((rate for rate in limits if rate is not None), default=None)
    ordered = sorted(found, key=lambda one: -(median_rate(one) or 0))
    return Grid(
        title=f"{table}: batches of {batch_size}",
        columns=("reader", "order", "workers", "rows/s, median (spread)", "MB/s", "of the fastest limit",
                 "first batch, s", "memory, MB", ""),
        rows=tuple(_speed_row(one, limit) for one in ordered),
    )  # fmt: skip


def _resume_grid(found: Sequence[Found]) -> Grid:
    def seconds(one: Found, place: str) -> float | None:
        values = one["first_batch_s"][place]
        return statistics.median(values) if values else None

    rows = []
    for one in found:
        case = one["case"]
        label = READERS[case["reader"]].label
        start = seconds(one, "0")
        cells = [seconds(one, place) for place in ("0", "50", "90")]
        size = one.get("state_bytes", {}).get("90")
        rows.append((
            label,
            *("" if cell is None else f"{cell:.2f}" for cell in cells),
            "" if start is None or cells[2] is None else f"{cells[2] / start:.2f}",
            "" if size is None else f"{size:,}",
            one["failures"][-1][:100] if one["failures"] else "",
        ))  # fmt: skip
    case = found[0]["case"]
    return Grid(
        title=f"resuming: {case['table']}, {case['rows']:,} rows, shuffled, in process: seconds to the first batch",
        columns=("reader", "at 0 %", "at 50 %", "at 90 %", "90 % to 0 %", "state, bytes", ""),
        rows=tuple(rows),
    )


def _place(topology: Found) -> str:
    return f"{topology['ranks']}×{topology['workers']}"


def exact_grid(rows: int, found: Sequence[Found]) -> Grid:
    """Lost and repeated rows, a column for each change of topology."""
    counted = {(_place(one["before"]), _place(one["after"])) for one in found}
    known = [(_place(asdict(before)), _place(asdict(after))) for before, after in TRANSITIONS]
    changes = [*(change for change in known if change in counted), *sorted(counted.difference(known))]
    readers = list(dict.fromkeys(one["case"]["reader"] for one in found))
    cells = {(one["case"]["reader"], _place(one["before"]), _place(one["after"])): _wrong(one) for one in found}
    return Grid(
        title=f"stopped at 50 % and resumed, {rows:,} rows, shuffled: rows lost / repeated (ranks×workers)",
        columns=("reader", *(f"{before} → {after}" for before, after in changes)),
        rows=tuple(
            (READERS[name].label, *(cells.get((name, *change), "not counted") for change in changes))
            for name in readers
        ),
    )


def _wrong(one: Found) -> str:
    if "why" in one:
        return "fails: " + one["why"][:120]
    return "exact" if not one["lost"] and not one["repeated"] else f"{one['lost']:,} / {one['repeated']:,}"


def grids(results: Found) -> list[Grid]:
    """Every table of the results."""

    def key(one: Found) -> tuple[str, int]:
        return one["case"]["table"], one["case"]["batch_size"]

    found: list[Grid] = []
    speeds, resumed, exact = (results.get(part, []) for part in ("speed", "resume", "exact"))
    for group in dict.fromkeys(map(key, speeds)):
        found.append(_speed_grid(*group, [one for one in speeds if key(one) == group]))
    for table in dict.fromkeys(one["case"]["table"] for one in resumed):
        found.append(_resume_grid([one for one in resumed if one["case"]["table"] == table]))
    for rows in dict.fromkeys(one["case"]["rows"] for one in exact):
        found.append(exact_grid(rows, [one for one in exact if one["case"]["rows"] == rows]))
    return found
