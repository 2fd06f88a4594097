"""This module makes tables of what was measured of streams: a grid for each group, and one for the bars.

A ratio is the median of the ratios of the rounds, with the least and the greatest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.readers.registry import STREAMS
from benchmarks.readers.streams.plan import LENGTH, MANY, OURS, PLACE, SEQUENCES, SOURCES
from benchmarks.readers.summary import Grid

__all__ = ["Ratio", "ratio", "stream_grids"]

Found = dict[str, Any]
TITLES = {
    "packed": f"packed: sequences of {LENGTH:,} tokens, batches of {SEQUENCES}, in process",
    "mixed": f"mixed: documents of one table and of {SOURCES}, shuffled, in process",
    "both": f"packed and mixed: sequences of one table and of {SOURCES}, shuffled, in process",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the rounds' ratios, and their spread."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} … {self.most:.2f})"


def ratio(one: Found | None, other: Found | None, key: str = "tokens_per_s") -> Ratio | None:
    """Return ``key`` of ``one`` to that of ``other``, by rounds; None where they have no round together."""
    if one is None or other is None:
        return None
    others = {run["round"]: run[key] for run in other["runs"]}
    found = [run[key] / others[run["round"]] for run in one["runs"] if others.get(run["round"])]
    return Ratio(median=statistics.median(found), least=min(found), most=max(found)) if found else None


def stream_grids(found: Sequence[Found]) -> list[Grid]:
    """Return every table of ``found``, which `benchmarks.readers.streams.measuring.streams` yielded."""
    if not found:
        return []
    grids = [_bars(found)]
    for group, title in TITLES.items():
        if some := [one for one in found if one["group"] == group]:
            grids.append(_flow_grid(title, some))
    total = [one for one in found if one["group"] == "total"]
    return [*grids, _total_grid(total)] if total else grids


def _median(one: Found, key: str = "tokens_per_s") -> float:
    return statistics.median(run[key] for run in one["runs"]) if one["runs"] else 0.0


def _flow_grid(title: str, found: Sequence[Found]) -> Grid:
    length = found[-1]["case"]["length"]
    ours = {one["case"]["sources"]: one for one in reversed(found) if _is_ours(one, length)}
    ordered = sorted(found, key=_median, reverse=True)
    return Grid(
        title=title,
        columns=("reader", "delivers", "order", "M tokens/s, median (spread)", "by processor time",
                 "lakeckpt, shuffled, to it", "first batch, s", ""),
        rows=tuple(_flow_row(one, ours.get(one["case"]["sources"])) for one in ordered),
    )  # fmt: skip


def _is_ours(one: Found, length: int) -> bool:
    case = one["case"]
    return bool(case["reader"] == OURS and case["length"] == length and case["shuffle"])


def _flow_row(one: Found, ours: Found | None) -> tuple[str, ...]:
    case, runs = one["case"], one["runs"]
    what = "sequences" if case["length"] else "documents"
    tables = {0: "", 1: " of one table"}.get(case["sources"], f" of {case['sources']} tables")
    name = (STREAMS[case["reader"]].label, what + tables, "shuffled" if case["shuffle"] else "in order")
    failure = one["failures"][-1][:100] if one["failures"] else "" if runs else "not run"
    if not runs:
        return (*name, "", "", "", "", failure)
    rates = [run["tokens_per_s"] / 1e6 for run in runs]
    times = ratio(ours, one)
    return (
        *name,
        f"{statistics.median(rates):,.1f} ({min(rates):,.1f} … {max(rates):,.1f})",
        f"{_median(one, 'tokens_per_processor_s') / 1e6:,.1f}",
        "" if times is None or one is ours else str(times),
        f"{_median(one, 'first_batch_s'):.2f}",
        failure,
    )


def _total_grid(found: Sequence[Found]) -> Grid:
    def row(one: Found) -> tuple[str, ...]:
        label = STREAMS[one["case"]["reader"]].label
        if not one["runs"]:
            return label, "", "", "", one["failures"][-1][:100] if one["failures"] else "not run"
        run = one["runs"][0]
        return label, f"{run['delivered']:,}", f"{run['lost']:,}", f"{run['repeated']:,}", ""

    return Grid(
        title=f"tokens of one epoch of {found[0]['case']['rows']:,} documents, packed, counted by value",
        columns=("reader", "delivered", "lost", "repeated", ""),
        rows=tuple(row(one) for one in found),
    )


def _find(found: Sequence[Found], *, group: str = "", save: bool = False, **case: Any) -> Found | None:
    for one in found:
        right = group in ("", one["group"]) and save == bool(one["save_at"])
        if right and all(one["case"][key] == value for key, value in case.items()):
            return one
    return None


def _best(found: Sequence[Found], **case: Any) -> Found | None:
    """The peer that is fastest at the same."""
    peers = [
        one
        for one in found
        if STREAMS[one["case"]["reader"]].kind in ("parquet", "converted")
        and all(one["case"][key] == value for key, value in case.items())
    ]
    return max(peers, key=_median, default=None)


def _bars(found: Sequence[Found]) -> Grid:
    """What the project holds itself to, and what came of it."""
    rows = [row for make in (_speed_bars, _other_bars) for row in make(found)]
    return Grid(
        title="streams: the bars of lakeckpt",
        columns=("figure", "ratio (spread)", "by processor time", "bar", ""),
        rows=tuple(rows),
    )


def _row(what: str, value: Ratio | None, bar: str, note: str = "") -> tuple[str, ...]:
    return what, "not measured" if value is None else str(value), "", bar, note


def _speed_row(what: str, one: Found | None, other: Found | None, bar: str, note: str = "") -> tuple[str, ...]:
    name, value, _, *rest = _row(what, ratio(one, other), bar, note)
    return name, value, str(ratio(one, other, "tokens_per_processor_s") or ""), *rest


def _speed_bars(found: Sequence[Found]) -> list[tuple[str, ...]]:
    def ours(group: str, length: int, sources: int, shuffle: bool = True) -> Found | None:
        return _find(found, group=group, reader=OURS, length=length, sources=sources, shuffle=shuffle)

    limit = _find(found, group="packed", reader="stream-bare", length=LENGTH)
    packed, mixed, both = ours("packed", LENGTH, 0), ours("mixed", 0, SOURCES), ours("both", LENGTH, SOURCES)
    in_order = ours("packed", LENGTH, 0, shuffle=False)
    return [
        _speed_row("packed to unpacked reading, shuffled", packed, ours("packed", 0, 0), "at least 0.8"),
        _speed_row("the same in order", in_order, ours("packed", 0, 0, shuffle=False), ""),
        _speed_row("packed, in order, to pyarrow and numpy", in_order, limit, ""),
        _ahead("packed, shuffled", packed, _of(found, "packed", length=LENGTH, shuffle=True)),
        _ahead("packed, in order", in_order, _of(found, "packed", length=LENGTH, shuffle=False)),
        _speed_row(f"mixture of {SOURCES} to one source", mixed, ours("mixed", 0, 1), "at least 0.9"),
        _ahead(f"mixture of {SOURCES}", mixed, _of(found, "mixed", sources=SOURCES)),
        _speed_row("packed mixture to one packed source", both, ours("both", LENGTH, 1), "at least 0.9"),
        _ahead("packed mixture", both, _of(found, "both", sources=SOURCES)),
    ]


def _of(found: Sequence[Found], group: str, **case: Any) -> Found | None:
    return _best([one for one in found if one["group"] == group], **case)


def _ahead(what: str, ours: Found | None, peer: Found | None) -> tuple[str, ...]:
    label = "" if peer is None else STREAMS[peer["case"]["reader"]].label
    return _speed_row(f"{what}, to the fastest peer", ours, peer, "more than 1", label)


def _other_bars(found: Sequence[Found]) -> list[tuple[str, ...]]:
    def memory(length: int, sources: int) -> Found | None:
        return _find(found, group="memory", length=length, sources=sources)

    rows = []
    for what, length in (("documents", 0), ("sequences", LENGTH)):
        many, one = memory(length, MANY), memory(length, 1)
        peaks = f"{_megabytes(many)} to {_megabytes(one)} MB; above the imports {_megabytes(many, own=True)} to "
        rows.append(
            _row(
                f"peak memory of {MANY} sources of {what} to one",
                ratio(many, one, "peak_bytes"),
                "at most 1.5",
                f"{peaks}{_megabytes(one, own=True)}",
            )
        )
    resumed, fresh = (_find(found, group="resumed", save=save) for save in (True, False))
    place = f"packed mixture: first batch at {PLACE:.0%} of an epoch to a fresh one"
    size = "" if resumed is None else f"a state of {resumed.get('state_bytes', 0):,} bytes, pickled"
    return [*rows, _row(place, ratio(resumed, fresh, "first_batch_s"), "at most 1.2", size)]


def _megabytes(one: Found | None, *, own: bool = False) -> str:
    if one is None or not one["runs"]:
        return "?"
    size: Callable[[Found], int] = lambda run: run["peak_bytes"] - own * run["start_bytes"]  # noqa: E731
    return f"{statistics.median(map(size, one['runs'])) / 1e6:,.0f}"
