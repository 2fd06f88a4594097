"""What do the two runs look like side by side? One PNG: both loss curves, the faults, and the difference below.

How: the x axis is rows counted, in epochs, because optimizer steps of other topologies hold other numbers of rows.
Work that a fault destroyed is drawn too, in red, going beyond the point to which the job went back.

Never: it decides nothing; the verdict does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.cli.demo.records import Launch, Step, surviving_steps
from lakeckpt.cli.demo.scenario import topology
from lakeckpt.cli.demo.verdict import FaultCost, JobFacts

__all__ = ["draw"]

_INK, _SOFT, _FAINT = "#1c2430", "#6b7685", "#e6e9ee"
_CALM, _ROUGH, _LOST = "#c3cad6", "#0b62d6", "#d92d3a"
_BANDS = ("#ffffff", "#eef5ff", "#f3eefc")


def _smooth(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """The mean over the last ``width`` values (fewer at the start)."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return np.asarray((total[ends] - total[starts]) / (ends - starts))


def _places(steps: Sequence[Step], rows: int, before: int = 0) -> npt.NDArray[np.float64]:
    """Epochs of rows counted at the end of each step."""
    return np.asarray((before + np.cumsum([len(step.ids) for step in steps])) / rows)


def _bands(axes: Any, launches: Sequence[Launch], history: Sequence[Step], places: npt.NDArray[np.float64]) -> None:
    """A tint and a label for each stretch of the history with one topology."""
    sizes = {launch.launch: (launch.world_size, launch.workers) for launch in launches}
    kinds = [sizes[step.launch] for step in history]
    start = 0.0
    tints: list[tuple[int, int]] = []
    for number, kind in enumerate(kinds):
        if kind not in tints:
            tints.append(kind)
        if number + 1 == len(kinds) or kinds[number + 1] != kind:
            end = float(places[number])
            axes.axvspan(start, end, color=_BANDS[tints.index(kind) % len(_BANDS)], zorder=0, lw=0)
            across = axes.get_xaxis_transform()
            axes.text(start, 1.012, f" {topology(*kind)}", transform=across, fontsize=9.5, color=_SOFT)
            axes.plot([start, start], [1, 1.05], transform=across, color=_SOFT, lw=0.8, clip_on=False)
            start = end


def _draw_losses(axes: Any, calm: Sequence[Step], facts: JobFacts, rough: Sequence[Step], rows: int) -> None:
    width = max(1, len(calm) // 60)
    curve = _smooth(np.array([step.loss for step in calm]), width)
    places = _places(calm, rows)
    axes.plot(places, curve, color=_CALM, lw=7, solid_capstyle="round", label="never interrupted", zorder=2)
    places = _places(rough, rows)
    curve = _smooth(np.array([step.loss for step in rough]), width)
    axes.plot(places, curve, color=_ROUGH, lw=1.7, label="killed and resumed", zorder=4)
    axes.set_ylim(min(curve) - 0.15, max(curve[0], curve.max()) + 0.25)


def _draw_faults(
    axes: Any, facts: JobFacts, rough: Sequence[Step], costs: Sequence[FaultCost], rows: int, width: int
) -> None:
    """For each fault: the losses that were computed and thrown away, and a numbered mark where the kill struck."""
    places = {step.step: float(place) for step, place in zip(rough, _places(rough, rows), strict=True)}
    curve = dict(zip([step.step for step in rough], _smooth(np.array([s.loss for s in rough]), width), strict=True))
    launches = {launch.launch: launch for launch in facts.launches}
    for cost, death in zip(costs, facts.outcome.deaths, strict=False):
        lost = [step for number, step in launches[death.launch].steps.items() if number > cost.restored]
        begin = places.get(cost.restored, 0.0)
        ends = _places(lost, rows, before=round(begin * rows)) if lost else np.array([begin])
        top = float(curve.get(cost.restored, next(iter(curve.values()))))
        strike = float(ends[-1])
        axes.axvspan(begin, strike, color=_LOST, alpha=0.10, lw=0, zorder=1)
        axes.plot([strike, strike], [0, 1], transform=axes.get_xaxis_transform(), color=_LOST, lw=0.9, ls=(0, (3, 2)),
                  zorder=3)  # fmt: skip
        axes.annotate(
            str(cost.number), (strike, top), xytext=(0, 26), textcoords="offset points", ha="center", va="center",
            color="white", fontsize=9.5, fontweight="bold", zorder=6,
            bbox={"boxstyle": "circle,pad=0.28", "fc": _LOST, "ec": "white", "lw": 1.2},
        )  # fmt: skip


def _draw_difference(axes: Any, calm: Sequence[Step], rough: Sequence[Step], rows: int) -> None:
    """|loss - loss of the fault-free run|: of the same step where it had the same rows, else of the smoothed curves."""
    width = max(1, len(calm) // 60)
    ours = _places(rough, rows)
    theirs = np.interp(ours, _places(calm, rows), _smooth(np.array([step.loss for step in calm]), width))
    gap = np.abs(_smooth(np.array([step.loss for step in rough]), width) - theirs)
    twins = {step.step: step for step in calm}
    same = np.zeros(len(rough), dtype=bool)
    for number, step in enumerate(rough):
        twin = twins.get(step.step)
        if twin is not None and sorted(twin.ids) == sorted(step.ids):
            gap[number], same[number] = abs(step.loss - twin.loss), True
    floor, equal = 1e-9, gap == 0
    axes.set_yscale("log")
    axes.set_ylim(floor / 4, 10)
    for where, height, colour, words in (
        (equal, np.full(len(gap), floor), "#14804a", "0: bitwise equal"),
        (same & ~equal, gap, _ROUGH, "same rows in each step, other order of sums"),
        (~same & ~equal, gap, "#7a4fd0", "other batches: the curves' distance"),
    ):
        if where.any():
            axes.scatter(ours[where], np.maximum(height[where], floor), s=5, color=colour, lw=0, zorder=4)
            above = 12 * float(np.maximum(height[where], floor).max())
            place = float(np.median(ours[where]))
            axes.text(place, min(above, 1.5), words, color=colour, fontsize=9.5, ha="center", va="center")
    axes.set_yticks([floor, 1e-6, 1e-3, 1], ["0", "1e-6", "1e-3", "1"])
    axes.minorticks_off()


def _dress(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_SOFT, length=0, labelsize=9.5)
    axes.grid(axis="y", color=_FAINT, lw=0.8, zorder=1)
    axes.set_axisbelow(True)


def draw(path: Path, reference: JobFacts, faulted: JobFacts, costs: Sequence[FaultCost], rows: int) -> bool:
    """Write the PNG (``rows`` of the lake); False, and nothing is written, where a run left no whole history."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        calm, rough = surviving_steps(reference.launches), surviving_steps(faulted.launches)
    except ValueError:  # the verdict says so
        return False
    if not calm or not rough:
        return False
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(12, 7), height_ratios=[3.2, 1], sharex=True, dpi=160)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.1)
    _bands(upper, faulted.launches, rough, _places(rough, rows))
    _draw_losses(upper, calm, faulted, rough, rows)
    _draw_faults(upper, faulted, rough, costs, rows, max(1, len(calm) // 60))
    _draw_difference(lower, calm, rough, rows)
    for axes in (upper, lower):
        _dress(axes)
        axes.set_xlim(0, float(_places(rough, rows)[-1]))
    upper.set_ylabel("loss (nats per byte)", color=_SOFT, fontsize=10)
    lower.set_ylabel("difference", color=_SOFT, fontsize=10)
    lower.set_xlabel("rows counted (epochs)", color=_SOFT, fontsize=10)
    upper.plot([], [], color=_LOST, alpha=0.25, lw=7, label="work lost with a fault, made again")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10, labelcolor=_INK)
    title = f"The same training twice: never interrupted, and through {len(costs)} kills"
    figure.suptitle(title, x=0.015, ha="left", fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path)
    pyplot.close(figure)
    return True
