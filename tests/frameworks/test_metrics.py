"""Metrics as prometheus_client, OpenTelemetry and TensorBoard have them, of a loop that trains meanwhile."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import lakeckpt
from lakeckpt import counters
from lakeckpt.bubbles import Bubbles
from lakeckpt.errors import ConfigError
from lakeckpt.metrics import METRICS, Collector, readings
from lakeckpt.metrics.open_telemetry import instrument_name
from tests.frameworks.harness import write_table
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.frameworks

ROWS = 200


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    """Begin with the counters of a new process."""
    counters.READERS.renew()
    counters.RUNS.renew()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Iterator[int]]:
    """A loop that yields its step after each, and is over when the test is."""
    table = write_table(tmp_path / "table", rows=ROWS)
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(table, batch_size=8, shuffle=True, drop_last=True))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state, bubbles = {"model": model, "optimizer": optimizer, "train": loader}, Bubbles()

    def loop() -> Iterator[int]:
        with lakeckpt.CheckpointManager(tmp_path / "run", state, persist_every=5, bubbles=bubbles) as manager:
            manager.restore()
            manager._counters.copies = True  # as if nodes kept copies,
            manager._counters.spent = lambda: {"data": 1.0}  # and the rank had a page
            for step in itertools.count(1):
                batch = next(batches)
                loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.step(batch)
                yield step

    def endless() -> Iterator[Any]:
        while True:
            yield from bubbles.watch(loader)

    batches = endless()
    running = loop()
    yield running
    running.close()


def scraped(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample → labels → value, as Prometheus parses what an endpoint says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            assert key not in found.setdefault(sample.name, {}), f"{sample.name} {key} is there twice"
            found[sample.name][key] = sample.value
    return found


def test_prometheus_scrapes_all_metrics_under_their_names(job: Iterator[int]) -> None:
    for _ in range(12):
        next(job)
    with lakeckpt.metrics.serve(0, host="127.0.0.1") as endpoint:
        found = scraped(endpoint.port)
        assert set(found) == {one.name for one in METRICS}
        for one in readings():
            labels = {**dict(zip(one.metric.labels, one.labels, strict=True)), "rank": "0"}
            value = found[one.metric.name][tuple(sorted(labels.items()))]
            if not one.metric.name.endswith("_age_seconds"):
                assert value == one.value
        key = (("rank", "0"), ("reader", "train"))
        assert found["lakeckpt_rows_total"][key] == 96
        next(job)
        assert scraped(endpoint.port)["lakeckpt_rows_total"][key] == 104


def test_scrapes_beside_training_see_counters_that_only_grow(job: Iterator[int]) -> None:
    over, failures, seen = threading.Event(), [], []

    def scrape() -> None:
        try:
            while not over.is_set():
                found = scraped(endpoint.port)
                seen.append(next(iter(found.get("lakeckpt_rows_total", {}).values()), 0.0))
        except Exception as error:
            failures.append(error)

    with lakeckpt.metrics.serve(host="127.0.0.1") as endpoint:
        thread = threading.Thread(target=scrape)
        thread.start()
        for _ in range(120):  # over the ends of epochs
            next(job)
        over.set()
        thread.join()
    assert failures == []
    assert seen == sorted(seen) and len(seen) > 2


def test_an_endpoint_frees_its_port_and_a_port_that_is_taken_is_a_warning() -> None:
    first = lakeckpt.metrics.serve(host="127.0.0.1")
    with pytest.warns(UserWarning, match=rf"127\.0\.0\.1:{first.port}: .*port of its own"):
        assert lakeckpt.metrics.serve(first.port, host="127.0.0.1").port == 0
    first.close()
    first.close()
    with lakeckpt.metrics.serve(first.port, host="127.0.0.1") as again:
        assert again.port == first.port
        assert "lakeckpt_rows_total" not in prometheus_client.generate_latest().decode()


def test_a_forked_worker_that_outlives_the_endpoint_does_not_keep_its_port() -> None:
    first = lakeckpt.metrics.serve(host="127.0.0.1")
    over = multiprocessing.get_context("fork").Event()
    worker = multiprocessing.get_context("fork").Process(target=over.wait, args=(PATIENCE_S,))
    worker.start()
    try:
        assert scraped(first.port) is not None
        first.close()
        with lakeckpt.metrics.serve(first.port, host="127.0.0.1") as again:
            assert scraped(again.port) is not None
    finally:
        over.set()
        worker.join()


def test_a_collector_joins_the_metrics_of_ones_own_registry(job: Iterator[int]) -> None:
    registry = prometheus_client.CollectorRegistry()
    own = prometheus_client.Counter("mine_total", "Mine.", registry=registry)
    registry.register(Collector())
    own.inc()
    next(job)
    text = prometheus_client.generate_latest(registry).decode()
    assert "mine_total 1.0" in text and 'lakeckpt_rows_total{rank="0",reader="train"} 8.0' in text


def test_opentelemetry_exports_all_metrics_with_units_and_labels(job: Iterator[int]) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    lakeckpt.metrics.export(provider.get_meter("training"))
    for _ in range(6):
        next(job)
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {one.name: one for one in data.resource_metrics[0].scope_metrics[0].metrics}
    assert set(metrics) == {instrument_name(one) for one in METRICS}
    rows = metrics["lakeckpt.rows"].data
    assert type(rows).__name__ == "Sum" and rows.is_monotonic
    (point,) = rows.data_points
    assert (point.value, dict(point.attributes)) == (48, {"reader": "train", "rank": 0})
    assert metrics["lakeckpt.wait"].unit == "s" and metrics["lakeckpt.store_read"].unit == "By"
    assert type(metrics["lakeckpt.epochs"].data).__name__ == "Gauge"
    provider.shutdown()


def test_tensorboard_has_scalars_of_each_step(job: Iterator[int], tmp_path: Path) -> None:
    with SummaryWriter(tmp_path / "tensorboard") as writer:
        for _ in range(3):
            for _ in range(5):
                step = next(job)
            lakeckpt.metrics.log(writer, step)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert [one.step for one in scalars["lakeckpt/step"]] == [5, 10, 15]
    assert [one.value for one in scalars["lakeckpt/epochs/train"]] == pytest.approx([0.2, 0.4, 0.6])
    assert [one.step for one in scalars["lakeckpt/rows_per_second/train"]] == [10, 15]
    assert [one.step for one in scalars["lakeckpt/persist_seconds"]] == [10, 15]


def test_what_is_no_meter_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a meter of OpenTelemetry"):
        lakeckpt.metrics.export("training")
