"""Windows of a device whose host runs ahead of it, on a device that is only a line of time."""

from __future__ import annotations

import threading

import pytest

from lakeckpt.checkpoint.bubbles.device import DeviceGate
from lakeckpt.checkpoint.bubbles.policy import BubblePolicy, IdleWindow
from tests.checkpoint.bubbles.moved import bubble_share, urgent_bytes
from tests.patience import PATIENCE_S


class Device:
    """Marks are the seconds at which they are passed; ``at`` is that of the next one, ``passed`` how far it is."""

    def __init__(self) -> None:
        self.at = 0.0
        self.passed = 0.0
        self.now = 0.0
        self.waits = 0

    def mark(self) -> float:
        return self.at

    def seconds(self, earlier: float, later: float) -> float | None:
        return later - earlier if max(earlier, later) <= self.passed else None

    def wait(self, mark: float) -> None:
        self.waits += 1
        self.passed = max(self.passed, mark)
        self.now = max(self.now, mark)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def gate(device: Device) -> DeviceGate:
    return DeviceGate(device, clock=device.clock)


def iterate(gate: DeviceGate, device: Device, step: int, begin: float, *windows: tuple[str, float, float]) -> None:
    """What the training thread says of one iteration, all at once; the device is elsewhere."""
    device.at = begin
    gate.cut(step)
    for site, opens, closes in windows:
        device.at = begin + opens
        gate.begin(site)
        device.at = begin + closes
        gate.end()


def asking(gate: DeviceGate) -> tuple[threading.Event, threading.Event, threading.Thread]:
    urgent, admitted = threading.Event(), threading.Event()

    def ask() -> None:
        gate.admit(1, urgent)
        admitted.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return urgent, admitted, thread


def test_a_slice_moves_when_the_device_should_be_idle_not_when_the_host_says_so(
    gate: DeviceGate, device: Device
) -> None:
    for step in range(3):
        iterate(gate, device, step, step * 10.0, ("gap", 4.0, 8.0))
    device.passed = 30.0
    iterate(gate, device, 3, 30.0, ("gap", 4.0, 8.0))
    _, admitted, thread = asking(gate)
    while not gate._policy.foresees:
        pass
    assert not admitted.is_set()
    device.now = 34.5
    assert admitted.wait(PATIENCE_S)
    thread.join()


def test_whoever_asks_late_still_knows_when_the_iteration_began(gate: DeviceGate, device: Device) -> None:
    for step in range(3):
        iterate(gate, device, step, step * 10.0, ("gap", 4.0, 8.0))
    device.passed = 30.0
    iterate(gate, device, 3, 30.0)
    device.now = 33.0  # the copier was at the capture before until now
    urgent, admitted, thread = asking(gate)
    while not gate._policy.foresees:
        pass
    assert gate._policy._foreseen == (IdleWindow(site="gap 0", kind="bubble", begin_s=34.0, end_s=38.0),)
    urgent.set()
    gate.hurry()
    assert admitted.wait(PATIENCE_S)
    thread.join()


def test_what_cannot_be_marked_is_passed_over(gate: DeviceGate, device: Device) -> None:
    """While a graph is captured nothing can be: an event would become a part of it."""
    iterate(gate, device, 0, 0.0, ("gap", 4.0, 8.0))
    mark, device.mark = device.mark, lambda: None  # type: ignore[method-assign,assignment,return-value]
    gate.begin("forward", "free")
    gate.end("free")
    gate.cut(1)
    device.mark = mark  # type: ignore[method-assign]
    device.passed = 20.0
    iterate(gate, device, 2, 10.0)
    iterate(gate, device, 3, 20.0)
    assert [(one.step, [window.site for window in one.windows]) for one in gate.records()] == [(0, ["gap 0"]), (2, [])]


def test_before_anything_was_measured_the_fence_lets_slices_through(gate: DeviceGate, device: Device) -> None:
    iterate(gate, device, 0, 0.0)
    urgent, admitted, thread = asking(gate)
    urgent.set()
    gate.hurry()
    assert admitted.wait(PATIENCE_S)
    thread.join()


def test_the_training_thread_waits_for_the_device_at_the_first_cut_only(gate: DeviceGate, device: Device) -> None:
    for step in range(40):
        iterate(gate, device, step, step * 10.0, ("gap", 4.0, 8.0))
    assert device.waits == 1
    assert gate.records() == ()
    assert len(gate._over) <= 16


def test_iterations_are_told_in_the_time_of_the_host(gate: DeviceGate, device: Device) -> None:
    iterate(gate, device, 0, 5.0, ("gap", 4.0, 8.0), ("gap", 9.0, 9.5))
    urgent = threading.Event()
    urgent.set()
    gate.admit(7, urgent)
    gate.moved(7, 9.0, 11.0)
    iterate(gate, device, 1, 15.0)
    device.passed = 15.0
    iterate(gate, device, 2, 25.0)
    record = gate.records()[0]
    assert (record.step, record.begin_s, record.end_s) == (0, 5.0, 15.0)
    assert [(one.site, one.begin_s, one.end_s) for one in record.windows] == [
        ("gap 0", 9.0, 13.0),
        ("gap 1", 14.0, 14.5),
    ]
    assert bubble_share([record]) == 1.0 and urgent_bytes([record]) == 7


def test_a_window_is_foreseen_where_it_was_most_of_the_time(gate: DeviceGate, device: Device) -> None:
    places = [(4.0, 8.0), (4.2, 7.0), (4.1, 8.0), (1.0, 9.0)]
    for step, (opens, closes) in enumerate(places):
        iterate(gate, device, step, step * 10.0, ("gap", opens, closes))
    device.passed = 40.0
    iterate(gate, device, 4, 40.0)
    assert gate._windows_from(100.0) == [IdleWindow(site="gap 0", kind="bubble", begin_s=104.2, end_s=108.0)]


def test_a_slice_must_lie_within_one_window_that_is_foreseen() -> None:
    policy = BubblePolicy()
    policy.moved(1, 0.0, 1.0)
    policy.begin_iteration()
    policy.foresee(
        [
            IdleWindow(site="gap 0", kind="bubble", begin_s=3.0, end_s=3.5),
            IdleWindow(site="gap 1", kind="bubble", begin_s=5.0, end_s=7.0),
        ]
    )
    assert policy.admits_at(1, 0.0) == 5.0
    assert policy.admits_at(1, 6.0) == 6.0
    assert policy.admits_at(1, 6.1) is None
    policy.begin_iteration()
    assert policy.admits_at(1, 5.0) is None


def test_what_foreseen_bubbles_do_not_hold_goes_into_foreseen_free_time() -> None:
    policy = BubblePolicy()
    policy.moved(1, 0.0, 1.0)
    windows = [
        IdleWindow(site="forward 0", kind="free", begin_s=0.0, end_s=10.0),
        IdleWindow(site="gap 0", kind="bubble", begin_s=20.0, end_s=22.0),
    ]
    policy.begin_capture(2)
    policy.foresee(windows)
    assert policy.admits_at(1, 0.0) == 20.0
    policy.begin_capture(3)
    assert policy.admits_at(1, 0.0) == 0.0
