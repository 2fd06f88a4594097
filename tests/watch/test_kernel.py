"""Lines that bpftrace printed become events; other lines become none."""

from __future__ import annotations

import json

import pytest

from lakeckpt.cli.main import main
from lakeckpt.watch.system import kernel
from lakeckpt.watch.system.kernel import EventLines, KernelEvent

RECORDED = """{"type": "attached_probes", "data": {"probes": 4}}
{"type": "value", "data": ["tick",4325180421594]}
{"type": "value", "data": ["signal",28292,"bash",19,28303,"python \\"x\\""]}
{"type": "value", "data": ["blocked",29,"dd",8123]}
{"type": "map", "data": {"@bytes": {"28325,a,b,WS": 52428800, "28325,dd,RA": 4096}}}
{"type": "stats", "data": {"@us": {"7,python,ncclAllReduce": {"count": 3, "average": 1500, "total": 4500}}}}

Lost 17 events
{"type": "value", "data": ["signal",1]}
{"type": "value", "data": ["tick",4326180421594]}"""


def test_recorded_lines_become_events_and_the_first_tick_says_ready() -> None:
    lines = EventLines()
    events = [event for line in RECORDED.splitlines() for event in lines.events(line)]
    assert events == [
        KernelEvent(kind="ready"),
        KernelEvent(kind="signals", pid=28292, process="bash", text='sent SIGSTOP to 28303 (python "x")', amount=28303),
        KernelEvent(kind="blocked", pid=29, process="dd", text="was blocked in state D, 8,123 ms", amount=8123),
        KernelEvent(kind="disk", pid=28325, process="a,b", text="wrote 52,428,800 bytes", amount=52428800),
        KernelEvent(kind="disk", pid=28325, process="dd", text="read 4,096 bytes", amount=4096),
        KernelEvent(
            kind="calls", pid=7, process="python", text="called ncclAllReduce 3 times, 1,500 us each", amount=4500
        ),
    ]


def test_a_thread_that_is_still_blocked_is_reported_once_and_only_beyond_the_limit() -> None:
    lines = EventLines(blocked_ms=5000)
    since = {"type": "map", "data": {"@since": {"41,dd": 1_000_000_000, "42,quick": 6_000_000_000}}}
    found = []
    for second in (5, 7, 8):
        found += lines.events(json.dumps({"type": "value", "data": ["tick", second * 10**9]}))
        found += lines.events(json.dumps(since))
    assert [(one.kind, one.pid, one.amount) for one in found] == [("ready", 0, 0), ("blocked", 41, 6000)]


def test_a_trace_without_root_or_bpftrace_says_so_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel.os, "geteuid", lambda: 1000)
    assert main(["doctor", "--trace", "1"]) == 0
    assert "need root" in capsys.readouterr().err
    monkeypatch.setattr(kernel.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert main(["doctor", "--trace", "1"]) == 0
    assert "bpftrace is not installed" in capsys.readouterr().err
    assert main(["doctor", "--trace", "0"]) == 2
