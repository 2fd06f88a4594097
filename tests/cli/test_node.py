"""doctor --node names a node that errs, or that is slower than its peers twice, and no other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lakeckpt.cli.node import measures
from lakeckpt.cli.node.facts import nvml_checks
from lakeckpt.cli.node.history import NODES, keep, others, own_history
from lakeckpt.cli.node.report import NodeCheck, NodeHistory, NodeReport
from lakeckpt.cli.node.tools import tool_checks
from lakeckpt.cli.node.verdict import findings, slow_checks
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.watch.avoid import Avoid, put_avoid
from tests.patience import PATIENCE_S

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]
SHORT = ("--seconds", "1e-9")
"""Each rate is measured three times, and no more."""


def report(rate: float, node: str = "node", *, version: str = "2.13", is_named: bool = False) -> NodeReport:
    checks = (
        NodeCheck(name="matmul", value=rate, unit="GFLOP/s"),
        NodeCheck(name="torch", text=version, is_alike=True),
    )
    return NodeReport(node=node, rank=0, at_s=0.0, checks=checks, is_named=is_named)


def faults(own: NodeReport, *peers: NodeReport, **options: Any) -> list[str]:
    return [one.fault for one in findings(own, peers, **options) if one.fault]


class Rates:
    """What the products say one after the other; the last value holds for all that follow. All else is constant."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
        self.rates, self.measured = list(rates), 0
        monkeypatch.setattr(measures.Meter, "rate", lambda meter: self.next() if meter.name == "matmul" else 5.0)

    def next(self) -> float:
        self.measured += 1
        return self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]


def test_a_rate_below_ten_percent_of_the_median_is_slow() -> None:
    peers = [report(100.0), report(101.0), report(99.0)]
    assert faults(report(91.0), *peers) == []
    (fault,) = faults(report(80.0), *peers)
    assert "80 GFLOP/s" in fault and "4 nodes" in fault
    assert slow_checks(findings(report(80.0), peers)) == ["matmul"]


def test_nodes_that_differ_widely_name_nobody() -> None:
    assert faults(report(70.0), report(100.0), report(120.0), report(85.0)) == []


def test_two_nodes_cannot_tell_which_one_is_slow() -> None:
    assert faults(report(10.0), report(100.0)) == []


def test_a_node_that_was_to_be_avoided_is_no_measure_for_others() -> None:
    slow = [report(20.0, is_named=True)] * 3
    assert faults(report(100.0), report(98.0), report(99.0), *slow) == []
    assert faults(report(20.0), report(98.0), report(99.0), *slow) != []


def test_a_node_alone_is_compared_with_at_least_three_earlier_checks() -> None:
    earlier = [report(100.0)] * 3
    assert "earlier checks" in faults(report(50.0), earlier=earlier)[0]
    assert faults(report(50.0), earlier=earlier[:2]) == []
    assert faults(report(95.0), earlier=earlier) == []


def test_the_version_of_the_minority_is_a_fault_within_one_job_only() -> None:
    peers = [report(1.0), report(1.0)]
    (fault,) = faults(report(1.0, version="2.12"), *peers, is_one_job=True)
    assert "2.12" in fault and "2 of 3" in fault
    assert faults(peers[0], peers[1], report(1.0, version="2.12"), is_one_job=True) == []
    assert faults(report(1.0, version="2.12"), *peers) == []


def test_a_matrix_product_with_one_flipped_bit_is_a_fault() -> None:
    meter = measures.Matmul()
    meter.once()
    meter.inspect()
    assert meter.fault == ""
    meter._product.view(torch.int32)[3, 5] ^= 1
    meter.inspect()
    assert "in 1 element:" in meter.fault


def test_memory_that_loses_a_bit_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measures.memory_test(2**16, 60.0, block_bytes=2**14).fault == ""
    count = np.count_nonzero

    def flips(differs: Any) -> Any:
        differs[7] = True
        return count(differs)

    monkeypatch.setattr(np, "count_nonzero", flips)
    found = measures.memory_test(2**16, 60.0, block_bytes=2**14)
    assert "65.5 kB" in found.text and "did not keep" in found.fault


def test_the_memory_test_fills_no_more_than_it_may_and_ends_with_its_time() -> None:
    ticks = iter(range(1000))
    found = measures.memory_test(2**40, 8.0, clock=lambda: float(next(ticks)), block_bytes=2**12)
    assert found.text == "8.2 kB, 2 patterns"
    assert measures.memory_test(2**13, 60.0, block_bytes=2**12).text == "8.2 kB, 2 patterns"


def test_a_folder_without_direct_writes_is_said_and_is_no_fault() -> None:
    disk = measures.Disk("/proc")
    assert not disk.can_write and "/proc has no direct writes" in disk.text and disk.check({}).fault == ""


def test_all_is_measured_three_times_at_least_and_the_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(monkeypatch, 3.0, 9.0, 4.0)
    assert measures.best_rates([measures.Matmul(), measures.HostCopy()], 0.0) == {"matmul": 9.0, "host copy": 5.0}
    assert rates.measured == 3


def test_a_well_node_has_status_0_and_leaves_its_checks_in_the_run(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rates(monkeypatch, 100.0)
    status, plain = ask("doctor", "--node", *SHORT, "--peers", tmp_path / "run", "--name", "a/b")
    assert (status, plain["avoid"], plain["reasons"]) == (0, False, [])
    by_name = {one["name"]: one for one in plain["checks"]}
    assert by_name["matmul"]["value"] == 100.0 and by_name["clock"]["text"] == "as the store's"
    assert {"memory test", "/dev/shm", "limits", "torch", "NVML"} <= by_name.keys()
    assert by_name["dcgmi diag -r 1"]["text"] == "absent"
    storage = LocalStorage(tmp_path / "run")
    assert own_history(storage, "a/b").reports[0].rate("matmul") == 100.0
    assert [info.path for info in storage.list(NODES)] == ["nodes/a%2Fb"]


def test_a_slow_node_is_measured_again_before_it_is_named(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for number in range(3):
        keep(LocalStorage(run), NodeHistory(reports=()), [report(100.0, f"peer-{number}")])
    rates = Rates(monkeypatch, 50.0, 50.0, 50.0, 98.0)
    status, told = show("doctor", "--node", *SHORT, "--peers", run, "--name", "ours")
    assert status == 0 and "WELL  ours" in told and rates.measured == 6
    Rates(monkeypatch, 50.0)
    status, told = show("doctor", "--node", *SHORT, "--peers", run, "--name", "slow")
    assert status == 75 and "AVOID  slow: exit status 75" in told and "measured twice" in told
    assert [one.is_named for one in own_history(LocalStorage(run), "slow").reports] == [True]
    assert "slow" not in {one.node for one in others(LocalStorage(run), "ours")}


def test_a_marked_node_has_status_75_at_once(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(monkeypatch, 100.0)
    mark = Avoid(node=socket.gethostname(), by="the watch of node-7", at_s=1e9, reason="twice a hang")
    put_avoid(LocalStorage(tmp_path / "run"), mark)
    status, told = show("doctor", "--node", "--peers", tmp_path / "run")
    assert status == 75 and rates.measured == 0
    assert "the watch of node-7 wrote on 2001-09-0" in told and "twice a hang" in told
    assert show("doctor", "--node", *SHORT, "--peers", tmp_path / "run", "--name", "another")[0] == 0


@pytest.mark.parametrize("words", [("--seconds", "0"), ("--minutes", "-1"), ("--disk", "/no/folder")])
def test_bad_usage_has_status_2(words: tuple[str, ...], show: Show) -> None:
    assert show("doctor", "--node", *words)[0] == 2


def test_a_damaged_document_of_a_peer_is_skipped(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    keep(storage, NodeHistory(reports=()), [report(1.0, "well")])
    storage.put("nodes/bad", [b"nothing"])
    assert [one.node for one in others(storage, "us")] == ["well"]
    assert own_history(storage, "bad").reports == ()


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_tools_on_path_are_run_and_a_failed_diagnosis_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [one.text for one in tool_checks(8, timeout_s=PATIENCE_S)] == ["absent"] * 3
    fake(tmp_path, "dcgmi", 'echo "| Memory | Fail - GPU 3 |"; exit 226')
    fake(tmp_path, "ncclras", 'echo "Job summary"; echo "all ranks are OK"')
    fake(tmp_path, "all_reduce_perf", 'echo "$@" > "$0.args"; echo "# Avg bus bandwidth    : 412.5"')
    dcgmi, ras, perf = tool_checks(8, timeout_s=PATIENCE_S)
    assert "226" in dcgmi.fault and "GPU 3" in dcgmi.fault
    assert (ras.text, ras.fault) == ("all ranks are OK", "")
    assert perf.value == 412.5 and (tmp_path / "all_reduce_perf.args").read_text().endswith("-g 8\n")
    fake(tmp_path, "dcgmi", 'echo "Successfully ran diagnostic for group."')
    assert tool_checks(8, timeout_s=PATIENCE_S)[0] == NodeCheck(name="dcgmi diag -r 1", text="passed")


def test_a_tool_that_does_not_end_is_killed_and_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "dcgmi", "exec tail -f /dev/null")
    found = tool_checks(1, timeout_s=0.2)[0]
    assert "did not end" in found.text and found.fault == ""


class Nvml:
    """A stand-in for pynvml with two GPUs, of which the second has uncorrected errors and waits for a reset."""

    def __init__(self) -> None:
        self.module = SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=int,
            nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: 3 * gpu,
            nvmlDeviceGetRemappedRows=lambda gpu: (0, gpu, gpu, 0),
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x40,
        )


def test_nvml_names_a_gpu_with_uncorrected_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml().module)  # type: ignore[arg-type]
    well, bad = nvml_checks()
    assert well.fault == "" and "thermal slowdown" in well.text
    assert "3 uncorrected" in bad.fault and "waits for a reset" in bad.fault


@pytest.mark.soak
def test_ranks_of_torchrun_compare_themselves_and_time_collectives(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    command = ["lakeckpt", "doctor", "--node", *SHORT, "--json", "--name", "one", "--peers", str(tmp_path)]
    done = subprocess.run([*run, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert '"ranks": 2' in done.stdout and "all_reduce 67.1 MB" in done.stdout
    assert len(own_history(LocalStorage(tmp_path), "one").reports) == 1
