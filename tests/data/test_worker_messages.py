"""What workers and the main process tell one another stays true when forms change and iterations begin anew."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import Batch
from lakeckpt.data.worker_process import FORMS
from lakeckpt.data.workers import Order, Workers
from lakeckpt.errors import StateUnavailable
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


def test_an_iterator_says_that_start_gave_its_workers_to_the_next_one(lake: Path) -> None:
    loader = loader_of(lake, num_workers=1, loader={"persistent_workers": True})
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
