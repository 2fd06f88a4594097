"""The list of explicit faults and the list of ordinary lines are complete and well formed."""

from __future__ import annotations

import signal
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOTS = {
    *("device memory", "host memory", "device lost", "device memory error", "device illegal access", "device assert"),
    *("nvlink", "network card", "network", "collective mismatch", "rendezvous", "name lookup", "address in use"),
    *("credentials", "storage away", "storage denied", "storage full", "file missing", "file damaged", "file handles"),
    *("shared memory", "threads limit", "library missing", "driver mismatch", "version mismatch"),
    *("checkpoint mismatch", "not a number", "code", "data", "segmentation fault", "abort", "killed by a signal"),
    *("preempted", "time limit", "thermal", "power", "clock", "cpu machine check", "disk error", "compiler"),
    "configuration",
}
CASCADES = {"collective timeout", "peer gone", "launcher"}


@pytest.fixture(scope="module")
def faults() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((HERE / "explicit_faults.toml").read_text())["fault"]
    return found


def test_there_are_150_faults_and_at_least_two_of_each_cause(faults: list[dict[str, Any]]) -> None:
    causes = Counter(fault["cause"] for fault in faults)
    assert causes.total() == 150
    assert set(causes) == ROOTS | CASCADES and min(causes.values()) >= 2


def test_each_fault_has_one_sign_of_its_kind(faults: list[dict[str, Any]]) -> None:
    for fault in faults:
        [sign] = set(fault) - {"where", "cause", "role"}
        assert sign in {"exception": {"text"}, "log": {"text"}, "kernel": {"text", "xid"}}.get(
            fault["where"], {fault["where"]}
        )
        assert fault["role"] == ("cascade" if fault["cause"] in CASCADES else "root")
        if sign == "signal":
            assert signal.Signals[fault["signal"]]


def test_texts_are_all_different_and_have_one_to_six_lines(faults: list[dict[str, Any]]) -> None:
    texts = [fault["text"] for fault in faults if "text" in fault]
    assert len(set(texts)) == len(texts) > 130
    assert all(1 <= len(text.splitlines()) <= 6 for text in texts)


def test_there_are_100_ordinary_lines_and_none_is_a_fault_of_the_list(faults: list[dict[str, Any]]) -> None:
    lines = tomllib.loads((HERE / "ordinary_lines.toml").read_text())["lines"]
    assert len(lines) == len(set(lines)) == 100
    assert not {line.strip() for line in lines} & {fault.get("text", "").strip() for fault in faults}
