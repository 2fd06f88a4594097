"""Each script of bpftrace sees the fault that it is for, made on purpose while it runs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lakeckpt.checkpoint.agent.generations import digest_of_run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.notes import living_pages
from lakeckpt.checkpoint.faults.records import stalls_of
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.watch.beat import Page
from lakeckpt.watch.limits import FEW_STEPS
from lakeckpt.watch.system.kernel import READY, KernelEvent, missing, trace
from tests.frameworks.harness import ROOT, write_table
from tests.jobs import stalls
from tests.patience import PATIENCE_S
from tests.system.disks import Disk

LIBRARY = """
#include <unistd.h>
int ncclAllReduce(void) { return usleep(20000); }
"""
CALLER = "import ctypes; f = ctypes.CDLL({path!r}).ncclAllReduce; print('loaded', flush=True)\nwhile True: f()"


@pytest.fixture(autouse=True)
def events() -> None:
    subprocess.run(["mount", "-t", "tracefs", "tracefs", "/sys/kernel/tracing"], stderr=subprocess.DEVNULL)
    assert missing() == ""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["tail", "-f", "/dev/null"]) as process:
        yield process
        process.kill()


def first(
    script: str, fault: Callable[[], object], wanted: Callable[[KernelEvent], bool], *, blocked_ms: int = 1000
) -> KernelEvent:
    """Run a script, make the fault once it is ready, and return the first event that is wanted."""
    with closing(trace([script], PATIENCE_S, blocked_ms=blocked_ms)) as found:
        for event in found:
            if event.kind == READY:
                fault()
            elif wanted(event):
                return event
    raise AssertionError(f"{script} did not see the fault")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL])
def test_signals_says_who_sent_it(sleeper: subprocess.Popen[bytes], number: signal.Signals) -> None:
    seen = first("signals", lambda: sleeper.send_signal(number), lambda event: event.amount == sleeper.pid)
    assert seen.pid == os.getpid() and f"sent {number.name} to {sleeper.pid} (tail)" in seen.text


def test_blocked_names_a_process_that_writes_to_a_frozen_disk(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "ext4")
    writers: list[subprocess.Popen[bytes]] = []

    def freeze() -> None:
        subprocess.run(["fsfreeze", "--freeze", str(disk.path)], check=True)
        writers.append(subprocess.Popen(["dd", "if=/dev/zero", f"of={disk.path}/file", "bs=4096", "count=1"]))

    try:
        seen = first("blocked", freeze, lambda event: bool(writers) and event.pid == writers[0].pid)
        assert seen.process == "dd" and seen.amount > 1000 and "is blocked" in seen.text
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk.path)], check=True)
        for one in writers:
            one.wait(PATIENCE_S)
        disk.close()


def test_disk_names_the_process_that_writes(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "ext4")
    command = ["dd", "if=/dev/zero", f"of={disk.path}/file", "bs=1M", "count=8", "oflag=direct"]
    try:
        seen = first("disk", lambda: subprocess.run(command, check=True), lambda event: event.process == "dd")
        assert "wrote" in seen.text or "read" in seen.text
    finally:
        disk.close()


def test_calls_times_a_function_of_a_library_that_a_process_has_loaded(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    command = [sys.executable, "-c", CALLER.format(path=str(library))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as caller:
        try:
            assert caller.stdout is not None and caller.stdout.readline() == b"loaded\n"
            seen = first("calls", lambda: None, lambda event: event.pid == caller.pid)
            assert "ncclAllReduce" in seen.text and seen.amount >= 20_000
        finally:
            caller.kill()


TRACES = """
from lakeckpt.watch.system.kernel import trace
for event in trace(["signals"], 1000): print(event.kind, flush=True)
"""


def test_scripts_end_with_the_process_that_runs_them() -> None:
    with subprocess.Popen([sys.executable, "-c", TRACES], stdout=subprocess.PIPE) as runner:
        assert runner.stdout is not None and runner.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split()
        scripts = [os.pidfd_open(int(child)) for child in children]
        runner.kill()
        for script in scripts:
            assert select.select([script], [], [], PATIENCE_S)[0]
            os.close(script)
    assert len(scripts) == 1


def page_of(storage: LocalStorage, rank: int) -> Page | None:
    """Return the page of a rank of this node that trains the run."""
    begins = read_history(storage).begins
    pages = living_pages(ArenaFolder(None).path, digest_of_run(begins[-1].run, storage)) if begins else []
    return next((page for page in pages if page.rank == rank), None)


def test_the_evidence_of_a_stall_names_who_stops_a_rank(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=4 * stalls.ROWS, group=256)
    command = [sys.executable, "-m", "lakeckpt", "run", "--nproc-per-node=3", stalls.__file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    storage, found = LocalStorage(tmp_path / "run"), list[str]()
    with (tmp_path / "said.txt").open("wb") as out:
        arguments = [str(tmp_path), "none", "0", "report"]
        job = subprocess.Popen([*command, *arguments], env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not found:
            assert job.poll() is None and time.monotonic() < until_s, (tmp_path / "said.txt").read_text()[-4000:]
            if (page := page_of(storage, 2)) is not None and page.step > FEW_STEPS:
                os.kill(page.pid, signal.SIGSTOP)  # again and again, as a limiter of processor time does
            time.sleep(0.2)
            found += [event for _, stall in stalls_of(storage) for event in stall.events if "SIGSTOP" in event]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    [(_, stall)] = stalls_of(storage)
    assert (stall.verdict.ranks, stall.verdict.kind) == ((2,), "stopped")
    assert f"process {os.getpid()} (" in found[0] and "sent SIGSTOP to " in found[0]
