"""No mixture of versions, ever: whichever way copies, updates and crashes fall, a generation holds one step alone."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture import moves, slice_copier
from lakeckpt.checkpoint.capture import samples as samples_module
from lakeckpt.checkpoint.capture import store as store_module
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.links import CopyBatch
from lakeckpt.checkpoint.capture.samples import Samples
from lakeckpt.checkpoint.capture.slice_copier import SliceCopier
from lakeckpt.errors import SaveFailed, UnannouncedChange
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.device import Device, LinkedEngine, SimulatedLink
from tests.checkpoint.capturing.reading import CUT, IDENTITY
from tests.checkpoint.capturing.stamped import Stamped, Stamper, check_stamps
from tests.examples import examples
from tests.patience import PATIENCE_S

SLICE_BYTES = 256


class Steps:
    """Lets the copier take one small step at a time: half a piece, or a slice."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.left = 0
        self.free = False
        self.resting = True
        self.trainer = threading.get_ident()

    def point(self) -> None:
        """The copier may be held here."""
        if threading.get_ident() == self.trainer:
            return
        with self.changed:
            self.resting = True
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.free or self.left > 0, 5)
            self.left -= not self.free
            self.resting = False

    def allow(self, steps: int) -> None:
        """Let the copier take so many steps, and return when it has, or has nothing to do."""
        with self.changed:
            self.left = steps
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.idle or (self.resting and not self.left), 5)
            self.left = 0

    idle = True

    @contextmanager
    def freely(self) -> Iterator[None]:
        """The copier runs as it likes in here: somebody waits for it."""
        with self.changed:
            self.free = True
            self.changed.notify_all()
        yield
        with self.changed:
            self.free = False


def stepping(engine: CaptureEngine, steps: Steps) -> None:
    """Have the engine's copier take its steps one by one."""
    do, run, slices_of = engine._copier.do, engine._run, engine._slices_of

    def stepped_do(job: Callable[[], None]) -> None:
        with steps.changed:
            steps.idle = steps.resting = False
        do(job)

    def stepped_run(job: Any) -> None:
        run(job)
        with steps.changed:
            steps.idle = True
            steps.changed.notify_all()

    def stepped_slices_of(*of: Any) -> SliceCopier:
        slices = slices_of(*of)
        next_bytes = slices._next_bytes

        def stepped_next_bytes() -> int | None:
            steps.point()
            return next_bytes()

        slices._next_bytes = stepped_next_bytes  # type: ignore[method-assign]
        return slices

    engine._copier.do, engine._run = stepped_do, stepped_run  # type: ignore[method-assign]
    engine._slices_of = stepped_slices_of  # type: ignore[method-assign]


@contextmanager
def halving(steps: Steps) -> Iterator[None]:
    """Copies in host memory are made in two halves, with a step between them."""

    def foreach(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        for part in (slice(None, None, 2), slice(1, None, 2)):
            for one, other in zip(to, source, strict=True):
                one.reshape(-1)[part].copy_(other.reshape(-1)[part])
            steps.point()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves.torch, "_foreach_copy_", foreach)
        yield


actions = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["train", "crash", "forward", "half"]), st.just(0)),
    ),
    max_size=25,
)


def run_actions(folder: ArenaFolder, todo: list[tuple[str, int]], *, fences: bool = True) -> int:
    """Train, capture every step, and crash as ``todo`` says; returns how many generations were seen whole."""
    steps, seen = Steps(), 0
    crashes: list[Callable[[], object]] = []
    model = Stamped()

    def launch(work: Callable[[], object]) -> None:
        work()
        if crashes:
            crashes.pop()()  # in the middle of an update

    optimizer = Stamper(model, launch)
    objects = {"model": model, "optimizer": optimizer}
    engine = CaptureEngine(objects, IDENTITY, folder=folder, slice_bytes=SLICE_BYTES)

    def crash() -> None:
        """What a process finds that opens a copy of the memory as it is now."""
        nonlocal seen
        steps.allow(0)
        completed = engine.completed
        (info,) = folder.found()
        with TemporaryDirectory() as name:
            copies = ArenaFolder(Path(name, "arenas"))
            Path(copies.path).mkdir(mode=0o700)
            shutil.copy2(Path(folder.path, info.name), copies.path)
            with copies.open(info.name) as found:
                held = check_stamps(found)
        assert completed is None or completed in held
        seen += len(held)

    def train(*, must: bool = False) -> None:
        optimizer.step()
        model.seen.fill_(optimizer.stamp)
        engine.cut(CutId(attempt=0, step=optimizer.stamp), digest=CUT, must=must)

    try:
        with halving(steps):
            with steps.freely():
                train(must=True)
                engine.wait()
            stepping(engine, steps)
            fence = engine.fence if fences else lambda: None

            def freely_fenced() -> None:
                with steps.freely():
                    fence()

            engine._step_fence._fence = freely_fenced
            for action, number in todo:
                if action == "copy":
                    steps.allow(number)
                elif action == "crash":
                    crash()
                elif action == "forward":
                    model.seen.fill_(-1.0)
                else:
                    if action == "half":
                        crashes.append(crash)
                    train()
            with steps.freely():
                engine.wait()
            crash()
    finally:
        with steps.freely():
            engine.close()
    return seen


@given(actions)
@settings(max_examples=examples(30), deadline=None)
def test_copies_updates_and_crashes_in_any_order_leave_whole_steps(todo: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as name:
        assert run_actions(ArenaFolder(Path(name, "arenas")), todo) > 0


def test_without_the_fence_changes_are_noticed_and_unnoticed_they_would_be_mixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would find: it is no test if it cannot fail."""
    todo = [("train", 0), ("copy", 9), ("train", 0)]
    with pytest.raises(UnannouncedChange, match="the capture was dropped"):
        run_actions(ArenaFolder(tmp_path / "one"), todo, fences=False)
    monkeypatch.setattr(slice_copier, "versions_of", lambda _: [])
    with pytest.raises(UnannouncedChange, match="the capture was dropped"):
        run_actions(ArenaFolder(tmp_path / "two"), todo, fences=False)
    monkeypatch.setattr(Samples, "changed", lambda *_: frozenset())
    with pytest.raises(AssertionError, match=r"of step 2 holds \[2\.0, 3\.0\]"):
        run_actions(ArenaFolder(tmp_path / "other"), todo, fences=False)


class SlowGate(Gate):
    """Keeps every other slice until the fence has come."""

    paces = True

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hurried = threading.Event()

    def start(self, size_bytes: int, /) -> None:
        self.hurried.clear()

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        if self.random.random() < 0.5 and not urgent.is_set():
            self.hurried.wait(PATIENCE_S)

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None: ...

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None: ...

    def hurry(self) -> None:
        self.hurried.set()


def run_device(
    folder: ArenaFolder,
    seed: int,
    turns: list[int],
    *,
    orders: bool = True,
    holds: bool = True,
    full: bool = False,
    joins: bool = False,
    after_cut: Callable[[CaptureEngine], None] = lambda engine: None,
) -> set[int]:
    """Train on a simulated device that does ``turns[n]`` pieces of work after step n; the steps that were whole.

    ``full``: at every other cut the device has no memory, so that the cut is skipped.
    """
    device = Device(seed)
    model = Stamped()
    optimizer = Stamper(model, lambda work: device.queue(0, work))
    link = SimulatedLink(device, orders=orders, holds=holds)
    engine = LinkedEngine(
        {"model": model, "optimizer": optimizer},
        IDENTITY,
        folder=folder,
        slice_bytes=SLICE_BYTES,
        gate=SlowGate(seed) if seed % 2 else Gate(),
        links={torch.device("cpu"): link},
    )
    engine._store._joins = joins
    seen: set[int] = set()
    try:
        for number, turn in enumerate([0, *turns]):
            optimizer.step()
            device.queue(0, _stamps(model, optimizer.stamp))
            link.full = full and number % 2 == 1
            begins = engine.cut(CutId(attempt=0, step=optimizer.stamp), digest=CUT, must=not number)
            assert not (begins and link.full)
            after_cut(engine)
            device.queue(0, _stamps(model, -1))  # the next forward pass
            device.run(at_most=turn)
            if engine._store.arena is not None:
                seen.update(check_stamps(engine._store.arena))
        engine.wait()
        device.run()
        assert engine._store.arena is not None
        seen.update(check_stamps(engine._store.arena))
        assert threading.get_ident() not in device.waited_by, "the fence kept the host waiting"
    finally:
        device.run()
        engine.close()
    return seen


def _stamps(model: Stamped, stamp: int) -> Callable[[], object]:
    return lambda: model.get_buffer("seen").data.fill_(stamp)


turns = st.lists(st.integers(0, 60), min_size=1, max_size=8)


@given(st.integers(0, 2**32), turns, st.booleans(), st.booleans())
@example(2, [20] * 6, False, False)
@example(1, [20] * 6, True, False)
@example(2, [20] * 6, False, True)
@settings(max_examples=examples(40), deadline=None)
def test_a_device_with_queues_of_its_own_leaves_whole_steps_also_where_its_memory_is_full(
    seed: int, turns: list[int], full: bool, joins: bool
) -> None:
    how: dict[str, Any] = {"full": full, "joins": joins}
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_JOINED_BYTES", 3 * SLICE_BYTES)
        seen = run_device(ArenaFolder(Path(name, "arenas")), seed, turns, **how)
    assert 1 in seen


class Behind(SimulatedLink):
    """Its copies are not done before they may be: all of them, or so many."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.changed = threading.Condition()
        self.free = False
        self.allowed = 0

    def allow(self, *, free: bool | None = None, more: int = 0) -> None:
        with self.changed:
            self.free = self.free if free is None else free
            self.allowed += more
            self.changed.notify_all()

    def copy(self, batch: CopyBatch, /) -> Any:
        ticket = super().copy(batch)
        wait, done = ticket.wait, threading.Event()

        def wait_until_it_may() -> None:
            with self.changed:
                assert self.changed.wait_for(lambda: done.is_set() or self.free or self.allowed > 0, PATIENCE_S)
                self.allowed -= not (done.is_set() or self.free)
                done.set()
            wait()

        ticket.wait = wait_until_it_may  # type: ignore[method-assign]
        return ticket


class Mixed(Stamper):
    """What is tiny lies in host memory, as Adam's counts of steps do beside a model on a GPU, and changes at once."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.stamp += 1
        for one in [*self.state, *(state["moment"] for state in self.state.values())]:
            if is_tiny(one):
                one.data.fill_(self.stamp)
            else:
                self.launch(partial(one.data.fill_, self.stamp))
            torch.autograd.graph.increment_version(one)


def is_tiny(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= 12


class Ahead:
    """Training on a device whose host may be an iteration ahead of it, with captures of every step."""

    def __init__(self, folder: Path, *, stamper: type[Stamper] = Stamper, ranks: int = 1, **options: Any) -> None:
        self.ranks = ranks
        self.device, self.model = Device(1), Stamped()
        self.optimizer = stamper(self.model, lambda work: self.device.queue(0, work))
        self.link = Behind(self.device)
        objects = {"model": self.model, "optimizer": self.optimizer}
        how: dict[str, Any] = {"slice_bytes": SLICE_BYTES, "links": {torch.device("cpu"): self.link}, **options}
        self.engine = LinkedEngine(objects, IDENTITY, folder=ArenaFolder(folder), **how)
        with self.freely():
            self.train()
            self.engine.wait()

    def train(self) -> bool:
        """One step, and a cut."""
        self.optimizer.step()
        return self.cut()

    def cut(self) -> bool:
        """A cut, and the next forward pass."""
        step, engine = self.optimizer.stamp, self.engine
        self.device.queue(0, _stamps(self.model, step))
        common = engine.completed if self.ranks == 1 else None  # of others nothing is known here
        began = engine.cut(CutId(attempt=0, step=step), digest=CUT, common=common, must=step == 1)
        self.device.queue(0, _stamps(self.model, -1))
        return began

    @contextmanager
    def freely(self) -> Iterator[None]:
        """Copies in the block are done when somebody waits for them."""
        self.link.allow(free=True)
        yield
        self.link.allow(free=False)

    def seen(self) -> set[int]:
        """The steps that are whole."""
        with self.freely():
            self.engine.wait()
        self.device.run()
        assert self.engine._store.arena is not None
        return set(check_stamps(self.engine._store.arena))

    def close(self) -> None:
        with self.freely():
            self.engine.close()


@pytest.fixture
def ahead(tmp_path: Path) -> Iterator[Callable[..., Ahead]]:
    made: list[Ahead] = []

    def make(**options: Any) -> Ahead:
        made.append(Ahead(tmp_path / f"arenas-{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_host_that_is_an_iteration_ahead_of_its_device_leaves_no_cut_out(ahead: Callable[..., Ahead]) -> None:
    job = ahead()
    for step in range(2, 20, 3):
        assert job.train() and job.train(), "the second begins while the copies of the first are still to come"
        assert not job.train(), "a third would leave nothing that is complete"
        assert {step, step + 1} <= job.seen()


def test_with_several_ranks_a_fourth_generation_has_room_for_the_second(ahead: Callable[..., Ahead]) -> None:
    job = ahead(ranks=2, generations=4)
    for step in range(2, 5):
        assert job.train() and step in job.seen()
    for step in range(5, 20, 3):
        assert job.train() and job.train() and not job.train()
        assert {step, step + 1} <= job.seen()


def test_host_memory_beside_a_device_is_sampled_for_each_cut(
    ahead: Callable[..., Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (moves, samples_module):
        monkeypatch.setattr(module, "link_of", lambda one, links: None if is_tiny(one) else links.get(one.device))
    job = ahead(stamper=Mixed)
    for step in range(2, 20, 3):
        assert job.train() and job.train() and not job.train()
        assert {step, step + 1} <= job.seen()


def test_two_cuts_without_an_update_between_are_both_fenced_before_the_next_one(ahead: Callable[..., Ahead]) -> None:
    job = ahead()
    assert job.train()
    assert job.cut(), "the same step again"
    assert not job.train()
    assert {2} <= job.seen()


def test_the_second_is_fenced_though_the_first_has_ended(ahead: Callable[..., Ahead]) -> None:
    job = ahead()
    assert job.train() and job.train()
    while job.engine.completed != 2:  # copies of the first alone are done
        job.link.allow(more=1)
        time.sleep(0.01)
    assert job.engine._current is not None
    job.optimizer.step()
    assert job.engine._current.slices._sealed, "the update was fenced"
    assert {2, 3} <= job.seen()


def test_a_gate_that_paces_knows_of_one_capture_at_a_time_and_of_single_slices(ahead: Callable[..., Ahead]) -> None:
    paced, free = ahead(gate=SlowGate(0)), ahead(slice_bytes=None)
    assert (paced.engine._most_under_way(), paced.engine._store._joins) == (1, False)
    assert (free.engine._most_under_way(), free.engine._store._joins) == (2, True)
    paced = ahead(gate=SlowGate(0), slice_bytes=None)
    assert not paced.engine._store._joins


def test_captures_behind_one_that_failed_are_whole(ahead: Callable[..., Ahead]) -> None:
    job = ahead()
    copy = job.link.copy
    for step in range(2, 14, 3):
        made = iter(range(100))

        def copy_some(batch: CopyBatch, /, made: Iterator[int] = made) -> Any:
            if next(made) == 5:
                raise RuntimeError("the device is gone")
            return copy(batch)

        job.link.copy = copy_some  # type: ignore[method-assign]
        with job.freely():
            assert job.train()
            until = time.monotonic() + PATIENCE_S
            while not job.engine._failures or job.engine._under_way:
                assert time.monotonic() < until
                time.sleep(0.001)
        job.link.copy = copy  # type: ignore[method-assign]
        with pytest.raises(SaveFailed, match="the device is gone"):
            job.engine.wait()
        assert job.train() and job.train() and {step + 1, step + 2} <= job.seen()


@pytest.mark.parametrize("missing", ["orders", "holds"])
def test_without_its_events_a_device_leaves_mixtures_and_samples_see_them(
    tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        for seed in range(40):
            run_device(ArenaFolder(tmp_path / str(seed)), seed, [3, 20, 3, 20, 3], **{missing: False})  # type: ignore[arg-type]

    with pytest.raises((AssertionError, UnannouncedChange), match=r"holds \[|was dropped"):
        run()
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    monkeypatch.setattr(Samples, "changed", lambda *_: frozenset())
    with pytest.raises(AssertionError, match=r"holds \["):
        run()


@pytest.mark.soak
def test_a_thousand_steps_with_a_slow_copier_and_a_reader_hold_no_mixture(tmp_path: Path) -> None:
    folder, model = ArenaFolder(tmp_path / "arenas"), Stamped((50_000, 3, 700_000, 1))
    optimizer = Stamper(model, lambda work: work())
    objects = {"model": model, "optimizer": optimizer}
    engine = CaptureEngine(objects, IDENTITY, folder=folder, slice_bytes=2**16, gate=SlowGate(5))
    done, looked, seen = threading.Event(), threading.Event(), set[int]()

    def read() -> None:
        try:
            with folder.open(folder.found()[0].name) as arena:
                while not done.is_set():
                    seen.update(check_stamps(arena))
                    looked.set()
        finally:
            looked.set()

    reader = ThreadPoolExecutor(1)
    reading, skipped = None, 0
    try:
        for step in range(1, 1001):
            optimizer.step()
            model.seen.fill_(step)
            skipped += not engine.cut(CutId(attempt=0, step=step), digest=CUT, must=step % 10 == 1)
            reading = reader.submit(read) if reading is None else reading
            model.seen.fill_(-1)
            if step % 10 == 0 and not reading.done():  # whoever is slow, what is complete by now is looked at
                looked.clear()
                assert looked.wait(PATIENCE_S)
        engine.wait()
    finally:
        done.set()
    assert reading is not None
    reading.result()
    assert len(seen) > 50
    assert skipped <= 900
    engine.close()
    reader.shutdown()
