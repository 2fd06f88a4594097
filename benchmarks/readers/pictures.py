"""What do the speeds look like side by side?  One PNG for each data set: bars of rows per second, limits and all.

The axis is logarithmic, for readers lie three orders of magnitude apart; the whisker is the spread of the repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.readers.registry import READERS
from benchmarks.readers.summary import median_rate

__all__ = ["draw"]

_INK, _SOFT, _FAINT = "#1c2430", "#6b7685", "#e6e9ee"
_COLOURS = {"ours": "#0b62d6", "limit": "#1c2430", "parquet": "#c3cad6", "converted": "#b9a3e3"}
_WORDS = {"ours": "lakeckpt", "limit": "bare pyarrow, a limit", "parquet": "reads Parquet",
          "converted": "reads a format of its own, converted before"}  # fmt: skip


def _label(case: dict[str, Any]) -> str:
    entry = READERS[case["reader"]]
    workers = f"{case['workers']} {'threads' if entry.threads else 'workers'}" if case["workers"] else "in process"
    return entry.label if entry.kind == "limit" else f"{entry.label}, {workers}"


def _panel(axes: Any, found: Sequence[dict[str, Any]], title: str) -> None:
    rated = [(one, rate) for one in found if (rate := median_rate(one)) is not None]
    rated.sort(key=lambda pair: pair[1])
    for place, (one, rate) in enumerate(rated):
        rates = [run["rows_per_s"] for run in one["runs"]]
        kind = READERS[one["case"]["reader"]].kind
        axes.barh(place, rate, color=_COLOURS[kind], height=0.72, zorder=2)
        axes.plot([min(rates), max(rates)], [place, place], color=_SOFT, lw=1.2, zorder=3)
        axes.text(max(rates) * 1.12, place, f"{rate:,.0f}", va="center", fontsize=8.5, color=_INK)
    axes.tick_params(colors=_SOFT, which="both", length=0, labelsize=9)
    axes.set_yticks(range(len(rated)), [_label(one["case"]) for one, _ in rated])
    for (one, _), text in zip(rated, axes.get_yticklabels(), strict=True):
        ours = READERS[one["case"]["reader"]].kind == "ours"
        text.set(color=_COLOURS["ours"] if ours else _INK, fontweight="bold" if ours else "normal")
    axes.set_xscale("log")
    axes.margins(x=0.18, y=0.01)
    axes.set_title(title, loc="left", fontsize=10.5, color=_SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.grid(axis="x", color=_FAINT, lw=0.8, zorder=0)


def _draw_one(path: Path, table: str, found: Sequence[dict[str, Any]]) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    orders = [shuffled for shuffled in (False, True) if any(o["case"]["shuffle"] == shuffled for o in found)]
    figure, panels = pyplot.subplots(1, len(orders), figsize=(7.2 * len(orders), 7.4), dpi=140, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.12)
    for axes, shuffled in zip(panels[0], orders, strict=True):
        _panel(axes, [o for o in found if o["case"]["shuffle"] == shuffled], "shuffled" if shuffled else "in order")
        axes.set_xlabel("rows delivered as tensors, per second (log scale)", color=_SOFT, fontsize=9.5)
    kinds = [kind for kind in _WORDS if any(READERS[o["case"]["reader"]].kind == kind for o in found)]
    patches = [Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5, labelcolor=_INK)
    case = found[0]["case"]
    title = f"{table}: {case['rows']:,} rows in batches of {case['batch_size']:,}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path)
    pyplot.close(figure)


def draw(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Write a picture for each data set, at the batch size that everybody was measured with; return the paths."""
    import matplotlib

    matplotlib.use("Agg")
    paths = []
    for table in dict.fromkeys(one["case"]["table"] for one in results.get("speed", [])):
        found = [one for one in results["speed"] if one["case"]["table"] == table and median_rate(one) is not None]
        if found:
            size = found[0]["case"]["batch_size"]
            paths.append(folder / f"readers-{table}.png")
            _draw_one(paths[-1], table, [one for one in found if one["case"]["batch_size"] == size])
    return paths
