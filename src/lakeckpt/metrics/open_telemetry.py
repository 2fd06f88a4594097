"""This module gives the metrics of this process to OpenTelemetry, as observable instruments of a user's meter.

The meter's readers call the instruments when they export, on their own threads. A metric has the name that an exporter
to Prometheus makes the name of `METRICS` of: ``lakeckpt.wait`` in seconds becomes ``lakeckpt_wait_seconds_total``. The
library is imported when `export` is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.metrics.catalogue import METRICS, Metric
from lakeckpt.metrics.collect import Reading, readings

__all__ = ["export", "instrument_name"]

_LASTS_S = 5.0
"""The longest time for which a collection's reading is used."""
_UNITS = {"seconds": "s", "bytes": "By", "": ""}


def export(meter: Any) -> None:
    """Create an observable instrument of ``meter`` (``opentelemetry.metrics.get_meter("training")``) for each metric.

    Call it once for a meter. Raises `ConfigError` if ``meter`` is no meter, or opentelemetry-api is not installed.
    """
    try:
        from opentelemetry.metrics import Meter, Observation
    except ImportError:
        raise ConfigError(
            'metrics are exported by opentelemetry-api, which is not installed: pip install "lakeckpt[metrics]"'
        ) from None
    if not isinstance(meter, Meter):
        raise ConfigError(
            f'export takes a meter of OpenTelemetry, opentelemetry.metrics.get_meter("training"), got {meter!r:.100}'
        )
    collection = _Collection()
    for metric in METRICS:
        is_counter = metric.kind == "counter"
        create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        create(
            instrument_name(metric),
            callbacks=[partial(_observed, collection, metric, Observation)],
            unit=_UNITS[metric.unit],
            description=metric.about,
        )


def instrument_name(metric: Metric) -> str:
    """Return the name of a metric in OpenTelemetry, which has neither the unit nor ``_total``.

    >>> [instrument_name(one) for one in METRICS[:3]]
    ['lakeckpt.rows', 'lakeckpt.batches', 'lakeckpt.wait']
    """
    short = metric.name.removesuffix("_total").removesuffix(f"_{metric.unit}" if metric.unit else "")
    return short.replace("lakeckpt_", "lakeckpt.", 1)


class _Collection:
    """One reading for all instruments of a collection: looking at 64 loaders takes long. An instrument that is asked
    again begins the next collection. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = {one.name for one in METRICS}
        self._read: list[Reading] = []
        self._read_s = 0.0

    def readings(self, metric: Metric) -> list[Reading]:
        """Return the readings of the collection in which ``metric`` is asked for."""
        with self._lock:
            if metric.name in self._asked or time.monotonic() - self._read_s > _LASTS_S:
                self._read, self._asked, self._read_s = readings(), set(), time.monotonic()
            self._asked.add(metric.name)
            return self._read


def _observed(collection: _Collection, metric: Metric, make: Any, _options: Any) -> Iterable[Any]:
    return [
        make(one.value, {**dict(zip(metric.labels, one.labels, strict=True)), "rank": one.rank})
        for one in collection.readings(metric)
        if one.metric is metric
    ]
