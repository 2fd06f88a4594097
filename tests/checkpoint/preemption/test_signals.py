"""What a manager takes over of a process's signals, what it refuses, and that it gives everything back."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.preemption import preemption
from lakeckpt.checkpoint.preemption.signals import Signals
from lakeckpt.data.workers.signals import ignored_signals
from lakeckpt.errors import ConfigError
from tests.checkpoint.rig import MemoryStorage, manager, train_step, training

NAMES = ("SIGTERM", "SIGUSR1")
NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = [signal.getsignal(one) for one in NUMBERS]
    threads = set(threading.enumerate())
    yield
    assert [signal.getsignal(one) for one in NUMBERS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert set(threading.enumerate()) == threads and ignored_signals() == frozenset()


def test_without_save_on_nothing_is_taken_over_and_no_thread_begins() -> None:
    threads = set(threading.enumerate())
    with manager(MemoryStorage(), training()) as saver:
        saver.restore()
        assert [signal.getsignal(one) for one in NUMBERS] == [signal.SIG_DFL] * 2
        assert set(threading.enumerate()) == threads


def test_a_manager_takes_the_signals_over_at_its_restore_and_gives_them_back() -> None:
    with manager(MemoryStorage(), training(), save_on=NAMES) as saver:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        saver.restore()
        assert signal.SIG_DFL not in [signal.getsignal(one) for one in NUMBERS]
        assert ignored_signals() == set(NUMBERS)


def train_to_the_signal(saver: CheckpointManager, objects: dict[str, Any]) -> None:
    with saver:
        saver.restore()
        signal.raise_signal(signal.SIGUSR1)
        saver._preemption._got.wait()
        train_step(objects)
        saver.step()
        raise AssertionError("the step was to exit")


def test_the_step_after_a_signal_saves_and_exits_with_its_status() -> None:
    storage, objects = MemoryStorage(), training()
    with pytest.raises(SystemExit) as found:
        train_to_the_signal(manager(storage, objects, save_on="SIGUSR1"), objects)
    assert found.value.code == 128 + signal.SIGUSR1
    with manager(storage, training()) as saver:
        assert saver.restore() == 1


def test_a_signal_that_nobody_has_acted_on_goes_to_the_handler_of_before() -> None:
    got: list[int] = []
    saver = manager(MemoryStorage(), training(), save_on="SIGUSR1")
    saver.restore()
    thread = next(one for one in saver._preemption._threads)
    os.kill(os.getpid(), signal.SIGUSR1)
    saver._preemption._got.wait()
    assert thread.is_alive()
    saver._preemption._signals._before[signal.SIGUSR1] = lambda number, frame: got.append(number)
    saver.close()
    assert got == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"save_on": ("SIGKILL",)}, "save_on names signals, some of SIGTERM, SIGINT, .*, got 'SIGKILL'"),
        ({"save_on": (15,)}, "save_on names signals, .*, got 15"),
        ({"save_on": NAMES, "grace_s": 0}, "grace_s is a positive number of seconds, got 0"),
        ({"save_on": NAMES, "requeue": "pbs"}, "requeue is 'slurm' or None, got 'pbs'"),
        ({"requeue": "slurm"}, "requeue='slurm' acts on a signal: name the signals"),
        ({"save_on": NAMES, "requeue": "slurm"}, "requeue='slurm' needs SLURM_JOB_ID"),
    ],
)
def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wrong: str) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=wrong):
        CheckpointManager(MemoryStorage(), training(), **options)


def test_a_handler_of_somebody_else_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(number: int, frame: Any) -> None: ...

    signal.signal(signal.SIGUSR1, mine)
    try:
        with pytest.raises(ConfigError, match=r"save_on names SIGUSR1, and this process has a handler .*mine.*SIG_DFL"):
            CheckpointManager(MemoryStorage(), training(), save_on=NAMES)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    saver = manager(MemoryStorage(), training(), save_on=NAMES)
    saver.restore()
    with pytest.raises(ConfigError, match="has a handler for it already: another CheckpointManager"):
        CheckpointManager(MemoryStorage(), training(), save_on="SIGTERM")
    saver.close()


def test_a_wakeup_descriptor_of_somebody_else_is_refused_and_stays() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        signal.set_wakeup_fd(ours.fileno())
        saver = manager(MemoryStorage(), training(), save_on=NAMES)
        with pytest.raises(ConfigError, match="needs the wakeup descriptor of this process"):
            saver.restore()
        assert signal.set_wakeup_fd(-1) == ours.fileno()
        saver.close()


def test_another_thread_is_refused() -> None:
    found: list[BaseException] = []

    def make() -> None:
        try:
            CheckpointManager(MemoryStorage(), training(), save_on=NAMES)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=make, name="a thread of mine")
    thread.start()
    thread.join()
    with pytest.raises(ConfigError, match=r"on the main thread: .* This is thread 'a thread of mine'"):
        raise found[0]


def test_a_handler_that_somebody_sets_later_has_the_signal_and_stays() -> None:
    got: list[int] = []
    signals = Signals([signal.SIGUSR1, signal.SIGUSR2])
    try:
        later = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert signals.wait() == signal.SIGUSR2 and got == [signal.SIGUSR1] and callable(later)
    finally:
        signals.close()
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is not signal.SIG_DFL


def test_a_forked_child_has_the_handlers_of_before_and_does_not_wake_its_parent() -> None:
    signals = Signals(NUMBERS)
    try:
        child = os.fork()
        if not child:
            ok = [signal.getsignal(one) for one in NUMBERS] == [signal.SIG_DFL] * 2 and signal.set_wakeup_fd(-1) == -1
            if ok:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        signals.pretend(signal.SIGUSR1)
        assert signals.wait() == signal.SIGUSR1, "the parent got the signal of its child"
    finally:
        signals.close()


@pytest.mark.parametrize(
    ("state", "status", "asked", "report"),
    [
        ("RUNNING", 0, "requeue 4711\n", "the job is requeued"),
        ("RUNNING", 1, "requeue 4711\n", "scontrol requeue 4711 failed: no such job"),
        ("COMPLETING", 0, "", "Slurm itself ends the job: it is not requeued from here"),  # after scancel
    ],
)
def test_rank_0_requeues_the_running_job_of_slurm_after_the_commit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    state: str,
    status: int,
    asked: str,
    report: str,
) -> None:
    storage, objects = MemoryStorage(), training()
    script, orders = tmp_path / "scontrol", tmp_path / "asked"
    orders.touch()
    script.write_text(
        f"#!/bin/sh\n[ $1 = show ] && echo JobId=4711 JobState={state} Restarts=0 && exit 0\n"
        f'echo "$@" > {orders}\necho no such job >&2\nexit {status}\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    steps: list[int] = []
    run = preemption.requeue_job
    monkeypatch.setattr(
        preemption, "requeue_job", lambda: steps.append(CheckpointManager(storage, {}).latest().step) or run()
    )
    with pytest.raises(SystemExit):
        train_to_the_signal(manager(storage, objects, save_on="SIGUSR1", requeue="slurm"), objects)
    assert steps == [1] and orders.read_text() == asked
    assert report in capfd.readouterr().err
