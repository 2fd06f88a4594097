"""This module shows the metrics of this process to Prometheus, by the library prometheus_client.

`serve` starts an HTTP server of that library, on a thread, which `Endpoint.close` ends and joins. A forked process, as
loader workers are, closes its copy of the socket: it would keep the port when the trainer has ended. A process that has
an endpoint of its own registers a `Collector` instead. The library is imported when one of them is used.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from lakeckpt.errors import ConfigError
from lakeckpt.metrics.catalogue import METRICS
from lakeckpt.metrics.collect import readings

__all__ = ["Collector", "Endpoint", "serve"]


class Collector:
    """The metrics for a registry of prometheus_client: ``REGISTRY.register(Collector())``."""

    def __init__(self) -> None:
        _client()

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics, as prometheus_client asks for them."""
        core = _client().core
        every = readings()
        for metric in METRICS:
            kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
            family = kind(metric.name, metric.about, labels=[*metric.labels, "rank"])
            for one in every:
                if one.metric is metric:
                    family.add_metric([*one.labels, str(one.rank)], one.value)
            yield family


class Endpoint:
    """A server that `serve` has started."""

    def __init__(self, server: Any, thread: threading.Thread | None) -> None:
        self._server, self._thread = server, thread
        if server is not None:
            _served.add(self)
        self.port: int = 0 if server is None else server.server_port
        """The port on which it listens; 0: the port was taken, and nothing is served."""

    def close(self) -> None:
        """Stop the server, and return when its thread has ended. It may be called again."""
        if self._thread is not None and self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_served: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _close_copies() -> None:
    for one in list(_served):
        one._server.socket.close()


os.register_at_fork(after_in_child=_close_copies)


def serve(port: int = 0, *, host: str = "127.0.0.1") -> Endpoint:
    """Serve the metrics of this process on ``http://host:port/metrics``, for Prometheus to scrape.

    Each rank is a process with metrics of its own: give each a port, such as 9400 + local rank. ``port`` 0: any free
    port (`Endpoint.port`). The server ends with the process, or with `Endpoint.close`; a ``with`` closes it, too. It
    listens on this node alone, unless ``host`` names another address of it; ``"0.0.0.0"``: all of them.

    If another process listens on the port, training goes on: a warning says so, and `Endpoint.port` is 0. Raises
    `ConfigError` if prometheus_client is not installed, for a port that is not valid, and for a host that is not this
    node.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ConfigError(f"a port is an integer from 0 to 65535, and 0 takes any free one, got {port!r}")
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(Collector())
    try:
        server, thread = client.start_http_server(port, host, registry)
    except OSError as error:
        what = (
            f"metrics cannot be served on {host}:{port}: {error.strerror or error}. Each rank needs a port of its own, "
            "such as port + local rank; 0 takes any free one"
        )
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(what) from error
        warnings.warn(what, UserWarning, stacklevel=2)
        return Endpoint(None, None)
    return Endpoint(server, thread)


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise ConfigError(
            'metrics are served by prometheus_client, which is not installed: pip install "lakeckpt[metrics]"'
        ) from None
    return prometheus_client
