"""What is shown without a library, and what is said where one is missing."""

from __future__ import annotations

import errno
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.errors import ConfigError
from lakeckpt.metrics import METRICS, Collector, export, log, open_telemetry, serve
from lakeckpt.metrics.open_telemetry import instrument_name
from tests.checkpoint.rig import manager, train_step, training
from tests.lakes import LakeSpec
from tests.patience import PATIENCE_S


class Writer:
    """What a SummaryWriter is asked for."""

    def __init__(self) -> None:
        self.written: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert tag not in self.written.setdefault(step, {})
        self.written[step][tag] = value


def test_scalars_are_gauges_and_the_growth_of_counters_since_the_call_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("lakeckpt.metrics.tensorboard.time.perf_counter", lambda: clock[0])
    loader = LakeLoader(LakeDataset(LakeSpec(files=((40,),)).write(tmp_path / "lake"), batch_size=4))
    iterator, writer, other = iter(loader), Writer(), Writer()
    for _ in range(2):
        next(iterator)
    log(writer, 2)
    log(other, 2)
    assert writer.written[2]["lakeckpt/epochs/loader"] == pytest.approx(0.2)
    assert not any("per_second" in tag for tag in writer.written[2])
    clock[0] += 4.0
    for _ in range(5):
        next(iterator)
    log(writer, 7)
    assert writer.written[7]["lakeckpt/rows_per_second/loader"] == 5.0
    assert writer.written[7]["lakeckpt/batches_per_second/loader"] == 1.25
    assert 0 < writer.written[7]["lakeckpt/wait_per_second/loader"] < 1
    clock[0] += 1.0
    log(other, 7)
    assert other.written[7]["lakeckpt/rows_per_second/loader"] == 4.0
    log(writer, 8)
    assert writer.written[8]["lakeckpt/rows_per_second/loader"] == 0.0


def test_scalars_of_saves_are_means_since_the_call_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, objects = Writer(), training()
    with manager(tmp_path / "run", objects) as one:
        one.restore()
        log(writer, 0)
        one._counters.committed(1, 5.0, 3.0)
        one._counters.committed(2, 6.0, 1.0)
        log(writer, 2)
        assert writer.written[2]["lakeckpt/persist_seconds"] == 2.0
        assert "lakeckpt/capture_seconds" not in writer.written[2]
        log(writer, 3)
        assert "lakeckpt/persist_seconds" not in writer.written[3]
        train_step(objects)
        one.step()


def test_wrong_uses_say_what_to_give() -> None:
    with pytest.raises(ConfigError, match="SummaryWriter"):
        log("run", 1)
    with pytest.raises(ConfigError, match="port is an integer"):
        serve("9400")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="port is an integer"):
        serve(70000)


@pytest.mark.parametrize("call", [serve, Collector, lambda: export(object())])
def test_a_library_that_is_missing_is_named_with_what_installs_it(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus_client", "opentelemetry", "opentelemetry.metrics"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r'pip install "lakeckpt\[metrics\]"'):
        call()


def test_metrics_load_no_library_and_no_torch() -> None:
    script = (
        "import sys, lakeckpt; lakeckpt.metrics.read(); "
        "print(sorted({'torch', 'pyarrow', 'prometheus_client', 'opentelemetry', 'tensorboard'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout.strip() == "[]"


def test_names_in_opentelemetry_become_those_of_prometheus() -> None:
    units = {"seconds": "_seconds", "bytes": "_bytes", "": ""}
    for one in METRICS:
        exported = instrument_name(one).replace(".", "_") + units[one.unit] + "_total" * (one.kind == "counter")
        assert exported == one.name


def test_the_module_is_public() -> None:
    assert set(lakeckpt.metrics.__all__) >= {"serve", "export", "log", "read", "readings", "METRICS"}


def test_all_instruments_of_a_collection_show_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(open_telemetry, "readings", lambda: read.append(1) or [])
    monkeypatch.setattr(open_telemetry, "_LASTS_S", float("inf"))
    collection = open_telemetry._Collection()
    for count in (1, 2, 3):
        for metric in METRICS:
            assert collection.readings(metric) == []
        assert len(read) == count


def test_a_port_that_is_taken_is_a_warning_and_the_default_is_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(port: int, host: str, registry: Any) -> Any:
        assert host == "127.0.0.1"
        raise OSError(errno.EADDRINUSE, "Address already in use")

    client = types.SimpleNamespace(
        start_http_server=taken, CollectorRegistry=lambda: types.SimpleNamespace(register=lambda one: None)
    )
    monkeypatch.setattr("lakeckpt.metrics.prometheus._client", lambda: client)
    with pytest.warns(UserWarning, match=r"127\.0\.0\.1:9400: Address already in use.*port \+ local rank"):
        endpoint = serve(9400)
    with endpoint:
        assert endpoint.port == 0
