"""This module writes the metrics of this process to TensorBoard, as scalars of a step.

A curve of a counter says little: `log` writes how much a counter has grown per second since the call before, such as
rows per second; of times, how long each capture and each save took.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

from lakeckpt.errors import ConfigError
from lakeckpt.metrics.collect import Reading, readings, tag_of

__all__ = ["log"]

_Key = tuple[str, int, tuple[str, ...]]
_before: WeakKeyDictionary[Any, tuple[float, dict[_Key, float]]] = WeakKeyDictionary()
"""Writer → when it was written to last, and the counters then."""


def log(writer: Any, step: int) -> None:
    """Write all metrics to ``writer``, a ``SummaryWriter`` of torch or tensorboardX, as scalars of ``step``.

    Gauges are written as they are. Counters are written as their growth per second since the last call with this
    writer: ``lakeckpt/rows_per_second/train``; ``wait_per_second`` and ``stall_per_second`` are parts of the time.
    ``persist_seconds`` and ``capture_seconds`` are the mean of the saves and captures since then. The first call writes
    gauges only. One thread calls it. Raises `ConfigError` if ``writer`` has no ``add_scalar``.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise ConfigError(f"log takes a SummaryWriter, which has add_scalar, got {type(writer).__name__}")
    now_s, every = time.perf_counter(), readings()
    tag = tag_of(every)
    counts = {_key(one): one.value for one in every if one.metric.kind == "counter"}
    then_s, before = _before.get(writer, (now_s, {}))
    _before[writer] = now_s, counts
    grown = {key: value - before.get(key, 0.0) for key, value in counts.items()}
    for one in every:
        if one.metric.kind == "gauge":
            writer.add_scalar(tag(one), one.value, step)
            continue
        by = grown.get((one.metric.per, one.rank, one.labels), 0.0) if one.metric.per else now_s - then_s
        if before and by > 0:
            writer.add_scalar(_renamed(tag(one), one), grown[_key(one)] / by, step)


def _key(one: Reading) -> _Key:
    return one.metric.name, one.rank, one.labels


def _renamed(tag: str, one: Reading) -> str:
    """Return the tag of the growth of a counter."""
    name = one.metric.name.removeprefix("lakeckpt_")
    short = name.removesuffix("_total")
    if not one.metric.per:
        short = short.removesuffix("_seconds") + "_per_second"
    return tag.replace(name, short, 1)
