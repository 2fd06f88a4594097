"""A run that was removed when its trainers were gone stays removed: agents write nothing of it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt.checkpoint.persist.log import read_log
from lakeckpt.tracking.waiting import SystemWaiter
from tests.checkpoint.agent.rig import RUN, SETTINGS, Desk, attempt, begin, fill, make_arena
from tests.checkpoint.rig import Counter, EventWaiter, MemoryStorage, manager
from tests.patience import PATIENCE_S

GONE = "nothing was saved of a run that was removed: log/0000000000.lkc in memory"


def remove(storage: MemoryStorage) -> None:
    for path in list(storage.objects):
        storage.delete(path)


def ended(desk: Desk, end: Callable[[], None]) -> None:
    end()
    desk.persister.start()
    assert desk.persister.join(PATIENCE_S), "it does not end"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_final_save_of_a_run_that_was_removed_is_not_done(tmp_path: Path, rank: int) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    with make_arena(tmp_path, rank, 2) as arena:
        fill(arena, 5)
    desk = Desk(storage, tmp_path, EventWaiter(storage), rank=rank, world_size=2)
    remove(storage)
    ended(desk, desk.persister.die)
    assert storage.objects == {} and GONE in desk.log[-1] and desk.said() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_final_save_that_waits_for_other_ranks_sees_that_the_run_was_removed(tmp_path: Path, rank: int) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    desk = Desk(storage, tmp_path, SystemWaiter(), rank=rank, world_size=2, linger_s=10**6)
    with make_arena(tmp_path, rank, 2) as arena:
        fill(arena, 5)
    desk.persister.start()
    desk.persister.die()
    assert not desk.persister.join(0.2)
    remove(storage)
    assert desk.persister.join(PATIENCE_S) and GONE in desk.log[-1] and storage.objects == {}


def test_orders_of_a_trainer_that_is_gone_do_not_bring_a_removed_run_back(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    with make_arena(tmp_path) as arena:
        for number, step in enumerate((5, 6)):
            fill(arena, step)
            desk.order(step, number)
    remove(storage)
    ended(desk, desk.persister.leave)
    assert storage.objects == {} and desk.said() == [(5, "save_failed"), (6, "save_failed")]
    assert all(GONE in one.text for one in desk.outcomes)


@pytest.mark.parametrize("kind", ["objects/", "parts/"])
def test_a_run_that_is_removed_while_a_final_save_is_written_is_not_begun_again(tmp_path: Path, kind: str) -> None:
    class Removed(MemoryStorage):
        def put(self, path: str, chunks: object) -> int:
            size = super().put(path, chunks)  # type: ignore[arg-type]
            if path.startswith(kind):
                remove(self)
            return size

    storage = Removed()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
    soon = replace(SETTINGS, timeout_s=0.5)  # a part that was removed does not come, however long it is waited for
    desk = Desk(storage, tmp_path, SystemWaiter(), settings=soon)
    ended(desk, desk.persister.die)
    assert not [path for path in storage.objects if path.startswith("log/") or "fail" in path], storage.objects
    assert desk.said() == [(5, "save_failed")] and GONE in desk.outcomes[0].text


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_run_that_began_in_the_place_of_a_removed_one_gets_nothing_of_it(tmp_path: Path, commits: int) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 500)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    remove(storage)
    saver = manager(storage, {"n": Counter(1)})
    saver.restore()
    for _ in range(commits):
        saver.step()
        saver.save()
    there = dict(storage.objects)
    ended(desk, desk.persister.die)
    assert storage.objects == there and desk.said() == []
    assert read_log(storage).run != RUN and desk.persister.recorded == attempt().recorded


def test_while_its_trainer_lives_a_removed_run_is_saved_whole(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    remove(storage)
    desk.persister.start()
    desk.order(5, 0)
    assert desk.settled.wait(PATIENCE_S)
    desk.persister.leave()
    assert desk.persister.join(PATIENCE_S)
    assert desk.said() == [(5, "")] and "not there any more" in desk.outcomes[0].remarks.lost
