"""This module draws the two runs of the demo: both loss curves, and where the kills came.

The x axis is rows counted, in epochs, because optimizer steps of other topologies hold other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lakeckpt.demo.records import Step, surviving_steps
from lakeckpt.demo.verdict import Job

__all__ = ["draw"]

_SHARE = 60
"""A point of a curve is the mean over this part of the steps."""


def draw(path: Path, reference: Job, faulted: Job, rows: int) -> bool:
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
    _draw_curve(axes, calm, rows, color="#c3cad6", lw=7, label="never interrupted")
    places = _draw_curve(axes, rough, rows, color="#0b62d6", lw=1.7, label="killed and resumed")
    for number, death in enumerate(faulted.deaths, start=1):
        place = places.get(death.fault.step, 0.0)
        axes.axvline(place, color="#d92d3a", lw=0.9, ls="--")
        axes.text(place, 0.97, f" {number}: {death.fault.who}", transform=axes.get_xaxis_transform(), color="#d92d3a")
    axes.set_title(f"The same training twice: never interrupted, and through {len(faulted.deaths)} kills", loc="left")
    axes.set(xlabel="rows counted (epochs)", ylabel="loss (nats per byte)")
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _draw_curve(axes: Any, steps: Sequence[Step], rows: int, **style: Any) -> dict[int, float]:
    """Draw the loss. Return optimizer step → the epochs of rows counted at its end."""
    places = np.cumsum([len(step.ids) for step in steps]) / rows
    total = np.cumsum([0.0, *(step.loss for step in steps)])
    ends = np.arange(1, len(steps) + 1)
    starts = np.maximum(0, ends - max(1, len(steps) // _SHARE))
    axes.plot(places, (total[ends] - total[starts]) / (ends - starts), **style)
    return dict(zip((step.step for step in steps), places.tolist(), strict=True))
