"""This module draws the two runs of the demo: both loss curves, and the faults.

The x axis is rows counted, in epochs, because optimizer steps of other topologies hold other numbers of rows. Work that
a fault destroyed is a red band.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.demo.records import Step, surviving_steps
from lakeckpt.demo.verdict import FaultCost, Job

__all__ = ["draw"]

_INK, _SOFT, _FAINT = "#1c2430", "#6b7685", "#e6e9ee"
_CALM, _FAULTED, _LOST = "#c3cad6", "#0b62d6", "#d92d3a"


def draw(path: Path, reference: Job, faulted: Job, costs: Sequence[FaultCost], rows: int) -> bool:
    """Write the PNG; ``rows`` are those of the lake. Return False, without a file, where a run left no history."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        calm, rough = surviving_steps(reference.launches), surviving_steps(faulted.launches)
    except ValueError:  # a check of the verdict says so
        return False
    if not calm or not rough:
        return False
    figure, axes = pyplot.subplots(figsize=(12, 6), dpi=150, layout="constrained")
    axes.plot(_places(calm, rows), _smooth(calm), color=_CALM, lw=7, label="never interrupted")
    axes.plot(_places(rough, rows), _smooth(rough), color=_FAULTED, lw=1.7, label="killed and resumed")
    _draw_faults(axes, faulted, rough, costs, rows)
    axes.plot([], [], color=_LOST, alpha=0.25, lw=7, label="work lost with a fault, made again")
    _dress(axes)
    title = f"The same training twice: never interrupted, and through {len(costs)} kills"
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", color=_INK, pad=16)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _places(steps: Sequence[Step], rows: int) -> npt.NDArray[np.float64]:
    """Return the epochs of rows counted at the end of each step."""
    return np.asarray(np.cumsum([len(step.ids) for step in steps]) / rows)


def _smooth(steps: Sequence[Step]) -> npt.NDArray[np.float64]:
    """Return the mean loss over the last 1/60 of the steps, at each step."""
    width = max(1, len(steps) // 60)
    total = np.cumsum([0.0, *(step.loss for step in steps)])
    ends = np.arange(1, len(steps) + 1)
    starts = np.maximum(0, ends - width)
    return np.asarray((total[ends] - total[starts]) / (ends - starts))


def _draw_faults(axes: Any, faulted: Job, rough: Sequence[Step], costs: Sequence[FaultCost], rows: int) -> None:
    """Draw a band for the rows that were counted and lost, and a numbered mark where the kill came."""
    places = {step.step: float(place) for step, place in zip(rough, _places(rough, rows), strict=True)}
    launches = {launch.launch: launch for launch in faulted.launches}
    for number, (cost, death) in enumerate(zip(costs, faulted.deaths, strict=False), start=1):
        lost = [step for step in launches[death.launch].steps.values() if step.step > cost.restored]
        begin = places.get(cost.restored, 0.0)
        end = begin + sum(len(step.ids) for step in lost) / rows
        axes.axvspan(begin, end, color=_LOST, alpha=0.2, lw=0)
        axes.axvline(end, color=_LOST, lw=0.9, ls=(0, (3, 2)))
        axes.text(
            end, 0.96, str(number), transform=axes.get_xaxis_transform(), ha="center", va="top", color="white",
            fontsize=9.5, fontweight="bold", bbox={"boxstyle": "circle,pad=0.28", "fc": _LOST, "ec": "white"},
        )  # fmt: skip
        axes.text(
            end, 0.02, f" back as {cost.after}", transform=axes.get_xaxis_transform(), rotation=90, va="bottom",
            ha="left", fontsize=8.5, color=_SOFT,
        )  # fmt: skip


def _dress(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_SOFT, length=0, labelsize=9.5)
    axes.grid(axis="y", color=_FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0)
    axes.set_xlabel("rows counted (epochs)", color=_SOFT, fontsize=10)
    axes.set_ylabel("loss (nats per byte)", color=_SOFT, fontsize=10)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.9), frameon=False, fontsize=10, labelcolor=_INK)
