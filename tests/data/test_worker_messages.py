"""What workers and the main process tell one another stays true when forms change and iterations begin anew."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakeckpt import Batch
from lakeckpt.data.channel import Channel
from lakeckpt.data.slots import SlotMemory
from lakeckpt.data.worker_process import FORMS, WorkerSetup, _Worker
from lakeckpt.data.workers import Order, Workers
from lakeckpt.errors import StateUnavailable, WorkerTimeout
from lakeckpt.testing import LakeSpec
from tests.data.reading import ROWS, flat, loader_of, same


def alternates(batch: Batch) -> dict[str, Any]:
    first = int(batch["id"][0])
    return {f"row {first}": batch["id"]} if first % 2 else {"id": batch["id"]}


def test_micro_batches_of_many_forms_come_as_they_are(tmp_path: Path) -> None:
    folder = LakeSpec(files=((4 * FORMS,),)).write(tmp_path / "lake")
    alone = list(loader_of(folder, batch_size=1, shuffle=False, transform=alternates))
    options = {"prefetch_factor": 2 * FORMS}
    loader = loader_of(folder, batch_size=1, shuffle=False, transform=alternates, num_workers=1, loader=options)
    assert all(map(same, alone, loader))


def test_what_was_delivered_and_is_not_wanted_gives_its_slots_back(tmp_path: Path) -> None:
    folder = LakeSpec(files=((40,),)).write(tmp_path / "lake")
    workers = Workers(loader_of(folder, batch_size=2).dataset, num_workers=1, base_seed=0, ahead=8)
    progress = loader_of(folder, batch_size=2).dataset._progress
    progress.settle(1, 0)
    (worker,) = workers._all
    starts = set()
    for _ in range(20):
        results = workers.read(progress.assignments(0))
        next(results)
        while len(worker.delivered) < 7:
            workers._hear(worker, worker.channel.receive(None) or b"")
        starts |= {entry[2] for _, entry in worker.delivered}
        del results
    workers.close()
    assert len(starts) <= 24, "of 140: those of one iteration are free in the next but one"


@pytest.mark.parametrize("pins", [False, True])
def test_an_iterator_says_that_start_gave_its_workers_to_the_next_one(
    lake: Path, accelerator: None, pins: bool
) -> None:
    loader = loader_of(lake, num_workers=1, loader={"persistent_workers": True, "pin_memory": pins})
    iterator = iter(loader)
    found = [next(iterator)]
    loader.start()
    with pytest.raises(StateUnavailable, match="iterate again"):
        next(iterator)
    assert sorted(flat([*found, *loader])) == list(range(ROWS))


def test_no_more_is_dealt_than_workers_have_room_for_and_what_they_may_deliver(tmp_path: Path) -> None:
    folder = LakeSpec(files=((400,),)).write(tmp_path / "lake")
    loader = loader_of(folder, batch_size=1, num_lanes=2)
    progress = loader.dataset._progress
    progress.settle(1, 2)
    workers = Workers(loader.dataset, num_workers=2, base_seed=0, ahead=8)
    order: Order = deque()
    first, second = workers._all
    assignments = progress.assignments(0)
    first.has_room = second.has_room = False
    assert not workers.deal(order, assignments, 100) and len(order) == 32
    second.has_room = True
    assert workers.deal(order, assignments, 100) and len(order) == 132
    assert not workers.deal(order, assignments, 1000) and len(order) == 400
    assert (first.told, second.told) == (200, 200)
    workers.close()


def test_the_room_of_a_worker_without_a_lane_has_nothing_dealt_to_the_others(tmp_path: Path) -> None:
    folder = LakeSpec(files=((400,),)).write(tmp_path / "lake")
    loader = loader_of(folder, batch_size=1, num_lanes=1)
    loader.dataset._progress.settle(1, 2)
    workers = Workers(loader.dataset, num_workers=2, base_seed=0, ahead=8)
    order: Order = deque()
    first, second = workers._all
    first.has_room = False
    assert second.has_room and not workers.deal(order, loader.dataset._progress.assignments(0), 100)
    assert (len(order), second.told) == (32, 0)
    workers.close()


def test_the_loop_never_waits_for_a_worker_to_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeckpt.data.worker_handle.STOP_S", 0.05)
    folder = LakeSpec(files=((20_000,),)).write(tmp_path / "lake")
    loader = loader_of(folder, batch_size=1)
    progress = loader.dataset._progress
    progress.settle(1, 1)
    workers = Workers(loader.dataset, num_workers=1, base_seed=0, ahead=1, timeout_s=0.2)
    (worker,) = workers._all
    os.kill(worker.process.pid, signal.SIGSTOP)
    order: Order = deque()
    for _ in range(4):
        worker.has_room = True
        workers.deal(order, progress.assignments(0), 4096)
        workers.permit(at_once=True)  # in all, more than a socket holds
        order.clear()
    with pytest.raises(WorkerTimeout):
        next(workers.read(progress.assignments(0)))


def test_what_a_worker_has_room_for_is_told_anew_in_each_iteration(lake: Path) -> None:
    dataset = loader_of(lake).dataset
    memory, descriptor = SlotMemory.make()
    setup = WorkerSetup(
        worker=0,
        workers=1,
        base_seed=0,
        dataset=dataset,
        worker_init_fn=None,
        memory_bytes=memory.size_bytes,
        parent=os.getpid(),
    )
    main, end = map(Channel, socket.socketpair())
    worker = _Worker(end, descriptor, setup)
    has_no_room = SimpleNamespace(has_room=False, clear=lambda: None)
    worker._source = has_no_room  # type: ignore[assignment]
    for iteration in range(2):
        worker._hear((iteration, [], 1, 1, [], 4))
        worker._send()
        worker._send()
        assert pickle.loads(main.receive(0) or pickle.dumps(None)) == (iteration, [], False, 0.0)
        assert main.receive(0) is None, "once"
    for channel in (main, end):
        channel.close()
    os.close(descriptor)
