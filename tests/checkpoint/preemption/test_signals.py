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


def threads_here() -> set[threading.Thread]:
    """All threads but those that readers share: the readers of earlier tests begin and end these at any time."""
    return {one for one in threading.enumerate() if not one.name.startswith(("lakeckpt-window", "lakeckpt-part"))}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = [signal.getsignal(one) for one in NUMBERS]
    threads = threads_here()
    yield
    assert [signal.getsignal(one) for one in NUMBERS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threads_here() == threads and ignored_signals() == frozenset()


def test_without_save_on_nothing_is_taken_over_and_no_thread_begins() -> None:
    threads = threads_here()
    with manager(MemoryStorage(), training()) as saver:
        saver.restore()
        assert [signal.getsignal(one) for one in NUMBERS] == [signal.SIG_DFL] * 2
        assert threads_here() == threads


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


class Clock:
    """A clock that moves when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(preemption, "time", clock)
    return clock


@pytest.mark.parametrize("capture_every", [None, 1])
def test_a_step_that_takes_minutes_is_saved_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, capture_every: int | None
) -> None:
    ended: list[Exception] = []
    monkeypatch.setattr(preemption.Preemption, "_end", lambda self, error: ended.append(error))
    objects = training()
    options = {} if capture_every is None else {"capture_every": capture_every, "arenas": tmp_path / "arenas"}
    saver = CheckpointManager(tmp_path / "run", objects, save_on="SIGUSR1", persist_every=10**9, **options)

    def train() -> None:
        with saver:
            saver.restore()
            for step in range(5):
                if step == 4:
                    signal.raise_signal(signal.SIGUSR1)
                    saver._preemption._got.wait()
                clock.now_s += 90 if step < 4 else 200  # the last step evaluates, too
                with saver._preemption._changed:
                    saver._preemption._changed.notify_all()
                train_step(objects)
                saver.step()

    with pytest.raises(SystemExit):
        train()
    assert ended == [] and CheckpointManager(tmp_path / "run", {}).latest().step == 5


def test_the_grace_is_three_usual_steps_and_at_least_15_s_unless_it_was_given(clock: Clock) -> None:
    for asked_s, step_s, grace_s in ((None, 0.1, 15.0), (None, 5.0, 15.0), (None, 40.0, 120.0), (7.0, 40.0, 7.0)):
        objects = training()
        with manager(MemoryStorage(), objects, save_on="SIGUSR1", grace_s=asked_s) as saver:
            saver.restore()
            assert saver._preemption.grace_s == (asked_s or 15.0), "no step is known"
            for step in range(12):
                clock.now_s += step_s * (100 if step == 7 else 1)  # an evaluation is no usual step
                train_step(objects)
                saver.step()
            with saver._preemption.busy():  # nor is a save
                clock.now_s += 1e6
            clock.now_s += step_s
            saver.step()
            assert saver._preemption.grace_s == pytest.approx(grace_s)
            assert max(list(saver._preemption._steps_s)[-4:]) == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("asked_s", "step_s", "level", "said"),
    [
        (None, 1.0, "INFO", "has 15 s to its next cut, and its steps usually take 1 s"),
        (None, 40.0, "WARNING", "has 120 s to its next cut, and its steps usually take 40 s"),
        (15.0, 40.0, "WARNING", "has 15 s to its next cut, and its steps usually take 40 s"),
        (300.0, 40.0, "INFO", "has 300 s to its next cut, and its steps usually take 40 s"),
    ],
)
def test_how_long_a_loop_has_after_a_signal_is_said_once_when_its_steps_are_known(
    clock: Clock, caplog: pytest.LogCaptureFixture, asked_s: float | None, step_s: float, level: str, said: str
) -> None:
    caplog.set_level("INFO", "lakeckpt")
    with manager(MemoryStorage(), objects := training(), save_on="SIGUSR1", grace_s=asked_s) as saver:
        saver.restore()
        for _ in range(25):
            clock.now_s += step_s
            train_step(objects)
            saver.step()
    [line] = [one for one in caplog.records if "after a signal" in one.getMessage()]
    assert line.levelname == level and said in line.getMessage()


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
        ({"save_on": NAMES, "grace_s": 0}, "grace_s is a positive number of seconds, or None, got 0"),
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
