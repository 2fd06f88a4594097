"""The gate between a copier's thread and a training thread, without a clock of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.bubbles.watch import watch_data
from tests.checkpoint.bubbles.moved import bubble_share, urgent_bytes
from tests.patience import PATIENCE_S


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> BubbleGate:
    """One that knows gaps of 10 s and slices of 1 s."""
    made = BubbleGate(clock=clock, look_again_s=10 * PATIENCE_S)
    for step in range(3):
        made.cut(step)
        made.begin("gap")
        clock.now += 10
        made.end()
        made.moved(1, 0.0, 1.0)
    return made


class Copier:
    """A thread that asks for one slice."""

    def __init__(self, gate: BubbleGate, size_bytes: int = 1) -> None:
        self.urgent = threading.Event()
        self.admitted = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(gate, size_bytes), daemon=True)
        self._thread.start()

    def _ask(self, gate: BubbleGate, size_bytes: int) -> None:
        gate.admit(size_bytes, self.urgent)
        self.admitted.set()

    def wait(self) -> None:
        assert self.admitted.wait(PATIENCE_S)
        self._thread.join()


def test_a_slice_that_fits_is_admitted_into_a_bubble_that_is_open(gate: BubbleGate) -> None:
    gate.cut(3)
    gate.begin("gap")
    Copier(gate).wait()


def test_a_bubble_that_closes_on_a_slice_is_learnt_as_long_as_it_was_before_it(gate: BubbleGate, clock: Clock) -> None:
    for step in range(3, 10):
        gate.cut(step)
        gate.begin("gap")
        clock.now += 4
        Copier(gate).wait()
        clock.now += 100  # the slice under way may be why
        gate.end()
        gate.moved(1, clock.now - 1, clock.now)
    assert gate._policy.history.expected_s("gap 0") == 4.0


def test_a_copier_that_waits_is_let_in_when_a_bubble_opens(gate: BubbleGate) -> None:
    gate.cut(3)
    copier = Copier(gate)
    while gate._asked is None:
        pass
    assert not copier.admitted.is_set()
    gate.begin("gap")
    copier.wait()


def test_a_copier_is_not_woken_for_a_bubble_that_never_held_a_slice(
    gate: BubbleGate, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3, 5):
        gate.cut(step)
        gate.begin("border")
        clock.now += 0.5
        gate.end()
    gate.cut(5)
    copier, woken = Copier(gate), list[str]()
    while gate._asked is None:
        pass
    for site in ("border", "gap", "unknown"):
        monkeypatch.setattr(gate._changed, "notify", lambda site=site: woken.append(site))
        gate.begin(site)
        gate.end()
    assert woken == ["gap", "unknown"]
    monkeypatch.undo()
    copier.urgent.set()
    gate.hurry()
    copier.wait()


def test_what_was_admitted_and_did_not_move_is_no_slice_and_says_nothing(gate: BubbleGate, clock: Clock) -> None:
    gate.cut(3)
    gate.start(3)
    gate.begin("gap")
    gate.admit(1, threading.Event())
    begin = clock.now
    clock.now += 2
    gate.moved(0, begin, clock.now)
    clock.now += 8
    gate.end()
    gate.cut(4)
    record = gate.records()[-1]
    assert record.slices == ()
    assert gate._policy.rate.seconds(1) == 1.0
    assert list(gate._policy.history._lengths["gap 0"]) == [10.0] * 4


def test_a_slice_that_does_not_fit_waits_for_the_fence(gate: BubbleGate) -> None:
    gate.cut(3)
    gate.begin("gap")
    copier = Copier(gate, size_bytes=11)
    while gate._asked is None:
        pass
    assert not copier.admitted.is_set()
    copier.urgent.set()
    gate.hurry()
    copier.wait()
    gate.moved(11, 0.0, 1.0)
    gate.cut(4)
    assert urgent_bytes(gate.records()[-1:]) == 11


def test_what_the_fence_copied_itself_is_told_and_is_no_measure_of_rates(gate: BubbleGate) -> None:
    gate.cut(3)
    gate.start(5)
    gate.fenced(5, 2.0, 1000.0)
    assert gate._policy.rate.seconds(1) == 1.0
    gate.cut(4)
    assert urgent_bytes(gate.records()[-1:]) == 5


def test_a_fence_that_tells_nobody_is_noticed_all_the_same() -> None:
    gate = BubbleGate()
    copier = Copier(gate)
    while gate._asked is None:
        pass
    copier.urgent.set()
    copier.wait()


def test_what_happened_is_kept_by_iteration(gate: BubbleGate, clock: Clock) -> None:
    gate.cut(3)
    gate.start(1)
    with gate.idle("gap"):
        clock.now += 4
        gate.moved(1, clock.now - 2, clock.now)
    clock.now += 1
    gate.cut(4)
    record = gate.records()[-1]
    assert (record.step, record.end_s - record.begin_s) == (3, 5.0)
    assert [(one.site, one.end_s - one.begin_s) for one in record.windows] == [("gap 0", 4.0)]
    assert bubble_share([record]) == 1.0


def test_records_and_windows_are_bounded(clock: Clock) -> None:
    gate = BubbleGate(clock=clock, iterations=2)
    for step in range(5):
        gate.cut(step)
    assert [record.step for record in gate.records()] == [2, 3]


def test_a_loop_that_never_cuts_does_not_fill_the_memory(gate: BubbleGate) -> None:
    for _ in range(5000):
        gate.begin("gap")
        gate.moved(1, 0.0, 1.0)
    assert len(gate._windows) == len(gate._slices) == 4096


def test_waiting_for_data_is_a_bubble_and_the_batches_are_the_same(gate: BubbleGate, clock: Clock) -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            clock.now += 5
            yield number

    gate.cut(3)
    found = []
    for batch in watch_data(gate, slow()):
        found.append(batch)
        clock.now += 1
    gate.cut(4)
    assert found == [0, 1, 2]
    windows = gate.records()[-1].windows
    assert [(one.site, one.end_s - one.begin_s) for one in windows] == [
        ("data 0", 5.0),
        ("data 1", 5.0),
        ("data 2", 5.0),
        ("data 3", 0.0),
    ]


def test_an_error_while_waiting_ends_the_bubble(gate: BubbleGate) -> None:
    with pytest.raises(KeyError), gate.idle("gap"):
        raise KeyError
    assert gate._policy.close("bubble", 0.0) is None
