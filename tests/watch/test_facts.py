"""What /proc says of a real process: what it waits for, and on whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.watch.facts import children_of, look_at_process
from lakeckpt.watch.looks import ProcessLook
from tests.patience import PATIENCE_S

SCRIPTS = {
    "sleep": "import time; time.sleep(1000)",
    "socket": "import socket as s; a = s.create_server(('', 0)); b = s.create_connection(a.getsockname()); b.recv(1)",
    "pipe": "import os\nend = os.pipe()[1]\nwhile True: os.write(end, bytes(4096))",
    "lock": "import fcntl as f, sys; a, b = (open(sys.argv[1], 'w') for _ in '12'); f.flock(a, 2); f.flock(b, 2)",
    "child": "import subprocess; subprocess.run(['sleep', '1000'])",
    "futex": "import threading; a = threading.Lock(); a.acquire(); a.acquire()",
}


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    command = [sys.executable, "-c", SCRIPTS[request.param], str(tmp_path / "locked")]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("started", "waits", "on"),
    [
        ("sleep", "sleep", ""),
        ("socket", "socket", "127.0.0.1:"),
        ("pipe", "pipe", "pipe:["),
        ("lock", "lock", "held by process "),
        ("child", "child", ""),
        ("futex", "futex", ""),
    ],
    indirect=["started"],
)
def test_a_process_is_seen_with_what_it_waits_for(started: int, waits: str, on: str) -> None:
    look = seen(started, waits)
    assert (look.state, look.waits) == ("S", waits) and on in look.waits_on
    if waits == "child":
        assert [one.name for one in children_of(started)] == ["sleep"]


@pytest.mark.parametrize("started", ["sleep"], indirect=True)
def test_a_stopped_process_is_seen_as_that(started: int) -> None:
    seen(started, "sleep")
    os.kill(started, signal.SIGSTOP)
    end = time.monotonic() + PATIENCE_S
    while (look := look_at_process(started)) is not None and look.state != "T" and time.monotonic() < end:
        os.sched_yield()
    assert look is not None and look.state == "T"


def seen(pid: int, waits: str) -> ProcessLook:
    """Look until the process waits for what its script says."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        look = look_at_process(pid)
        assert look is not None
        if look.waits == waits:
            return look
        os.sched_yield()
    raise AssertionError(f"it never waited for {waits}: {look}")


def test_a_log_file_is_seen_with_how_far_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    with path.open("wb") as log, subprocess.Popen(["sh", "-c", "echo five >&2; sleep 1000"], stderr=log) as process:
        while path.stat().st_size < 5:
            time.sleep(0.01)
        look = look_at_process(process.pid)
        process.kill()
    assert look is not None and (look.log, look.log_bytes) == (str(path), 5)
    with subprocess.Popen(["sleep", "1000"], stderr=subprocess.DEVNULL) as process:
        look = look_at_process(process.pid)
        process.kill()
    assert look is not None and not look.log
