"""This module gives the metrics of this process to OpenTelemetry, as observable instruments of a user's meter.

The meter's readers call the instruments when they export, on their own threads. A metric has the name that an exporter
to Prometheus makes the name of `METRICS` of: ``lakeckpt.wait`` in seconds becomes ``lakeckpt_wait_seconds_total``. The
library is imported when `export` is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.metrics.catalogue import METRICS, Metric
from lakeckpt.metrics.collect import readings

__all__ = ["export", "instrument_name"]

_UNITS = {"seconds": "s", "bytes": "By", "": ""}


def export(meter: Any) -> None:
    """Create an observable instrument of ``meter`` (``opentelemetry.metrics.get_meter("training")``) for each metric.

    Call it once for a meter. Raises `ConfigError` where ``meter`` is none, or opentelemetry-api is not installed.
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
    for metric in METRICS:
        is_counter = metric.kind == "counter"
        create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        create(
            instrument_name(metric),
            callbacks=[partial(_observed, metric, Observation)],
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


def _observed(metric: Metric, make: Any, _options: Any) -> Iterable[Any]:
    return [
        make(one.value, {**dict(zip(metric.labels, one.labels, strict=True)), "rank": one.rank})
        for one in readings()
        if one.metric is metric
    ]
