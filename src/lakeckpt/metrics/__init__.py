"""This module shows the metrics of this process: to Prometheus, OpenTelemetry, TensorBoard, or as a plain dict.

`METRICS` lists the metrics: what loaders deliver and wait for, what stores give, and what managers save. They are
counted in any case, and computed when somebody asks for them.

::

    counters of the process → [collect], by the names of [catalogue] → readings → [prometheus]
                                                                                  [open_telemetry]
                                                                                  [tensorboard]: TensorBoard
"""

from __future__ import annotations

from lakeckpt.metrics.catalogue import METRICS, Metric
from lakeckpt.metrics.collect import Reading, read, readings
from lakeckpt.metrics.open_telemetry import export
from lakeckpt.metrics.prometheus import Collector, Endpoint, serve
from lakeckpt.metrics.tensorboard import log

__all__ = ["METRICS", "Collector", "Endpoint", "Metric", "Reading", "export", "log", "read", "readings", "serve"]
