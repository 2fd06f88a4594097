"""From arenas to storage: every order is committed whole or reported, whatever fails and whoever dies."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt.checkpoint.agent.final_save import FINAL, agree_on_final_save, final_folder
from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.orders import Order, Outcome
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import ArenaError, StorageError
from lakeckpt.lake.storage.base import Buffer, Storage
from lakeckpt.recovery.facts import CutId
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from lakeckpt.tracking.obstacles import FAILED, Obstacle
from lakeckpt.tracking.waiting import SystemWaiter
from tests.checkpoint.agent.rig import SETTINGS, Desk, begin, content, fill, make_arena, take_checksums
from tests.checkpoint.rig import EventWaiter, MemoryStorage, good, run_ranks
from tests.patience import PATIENCE_S


class Failing(FaultyStorage):
    """Of which so many reads, or puts, fail that are left."""

    def __init__(self, inner: MemoryStorage, *, reads: int = 0, puts: int = 0) -> None:
        super().__init__(inner, fail_at={})
        self.reads, self.puts = reads, puts

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        if self.reads:
            self.reads -= 1
            raise StorageError(f"{path} cannot be read now")
        return super().read(path, start, stop, etag=etag)

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        if self.puts:
            self.puts -= 1
            raise StorageError(f"{path} cannot be put now")
        return super().put(path, chunks)


def committed(storage: MemoryStorage) -> list[int]:
    """The steps of the history; all of it is whole."""
    assert verify(storage).every_damage == ()
    return [one.step for one in read_history(storage).chain]


def holds(storage: MemoryStorage, step: int, ranks: int = 1) -> bool:
    """Whether the newest checkpoint's tensors are those of ``step``, of every rank."""
    files = b"".join(data for path, data in storage.objects.items() if path.startswith("objects/"))
    return content(step) in files and all(content(step, rank) in files for rank in range(ranks))


def run(desk: Desk) -> None:
    desk.persister.start()
    assert desk.persister.join(PATIENCE_S), "it does not end"


def serve(desk: Desk, *orders: tuple[int, int]) -> None:
    """What comes of ``orders`` (step, number) of a trainer that leaves then."""
    for step, number in orders:
        desk.order(step, number)
    desk.persister.leave()
    run(desk)


def test_an_ordered_cut_is_committed_as_it_was_captured(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk = Desk(storage, tmp_path, EventWaiter(storage))
        serve(desk, (5, 0))
    assert committed(storage) == [5] and desk.said() == [(5, "")] and holds(storage, 5)
    assert desk.outcomes[0].info.slot == 1 and desk.persister.recorded == 5


def test_the_newest_of_several_orders_is_done_and_the_others_are_left_out_and_told(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        desk = Desk(storage, tmp_path, EventWaiter(storage))
        for step in (1, 2, 3):
            fill(arena, step)
        serve(desk, (1, 0), (2, 1), (3, 2))
    assert committed(storage) == [3] and holds(storage, 3)
    assert desk.said() == [(1, "save_skipped"), (2, "save_skipped"), (3, "")]
    assert "was skipped" in desk.outcomes[0].text


def noted(storage: MemoryStorage, notes: list[str]) -> Storage:
    """The storage; ``notes``: those on saves that were given up or left out, as they are put."""

    def before(method: str, path: str) -> None:
        if method == "put" and path.endswith(".failed"):
            notes.append(path)

    return FaultyStorage(storage, before=before)


def test_orders_that_are_left_out_cost_a_rank_that_is_alone_no_time_at_the_store(tmp_path: Path) -> None:
    storage, notes = MemoryStorage(), list[str]()
    begin(storage)
    with make_arena(tmp_path) as arena:
        desk = Desk(noted(storage, notes), tmp_path, EventWaiter(storage))
        for step in (1, 2, 3):
            fill(arena, step)
        serve(desk, *((step, step) for step in (0, 1, 2, 3)))
    assert committed(storage) == [3] and holds(storage, 3) and notes == []


def test_notes_on_what_is_left_out_are_no_reason_to_lose_the_cut_that_is_not(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    with make_arena(tmp_path, 0, 2) as first, make_arena(tmp_path, 1, 2) as second:
        newer, one_trainer = iter(range(4, 100)), threading.Lock()

        def before(method: str, path: str) -> None:
            if path.endswith(".failed") and method == "put":  # meanwhile training goes on
                with one_trainer:
                    fill(first, next(newer))

        desks, _ = ranks(storage, tmp_path, 2, places={0: FaultyStorage(storage, before=before)})
        for step in (1, 2, 3):
            fill(first, step), fill(second, step)
        for desk in desks:
            for step in (0, 1, 2, 3):
                desk.order(step, step)
            desk.persister.leave()
        finish(desks)
    assert committed(storage) == [3] and holds(storage, 3, ranks=2)
    left_out = [(step, "save_skipped") for step in (0, 1, 2)]
    assert [desk.said() for desk in desks] == [[*left_out, (3, "")]] * 2


def test_that_a_cut_is_left_out_is_told_when_other_ranks_can_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    report, noted = Desk._report, list[bool]()

    def seen(self: Desk, outcome: Outcome) -> None:
        if self is desks[0] and outcome.kind == "save_skipped":
            save = SaveId(attempt=0, step=outcome.step, number=outcome.number)
            noted.append(save.failure_path(0) in storage.objects)
        report(self, outcome)

    monkeypatch.setattr(Desk, "_report", seen)

    def before(method: str, path: str) -> None:
        if path.endswith(".failed") and method == "put":
            desks[0].settled.wait(0.2)

    with make_arena(tmp_path, 0, 2) as first, make_arena(tmp_path, 1, 2) as second:
        desks, _ = ranks(storage, tmp_path, 2, places={0: FaultyStorage(storage, before=before)})
        for step in (1, 2, 3):
            fill(first, step), fill(second, step)
        for desk in desks:
            for step in (1, 2, 3):
                desk.order(step, step)
            desk.persister.leave()
        finish(desks)
    assert committed(storage) == [3] and noted == [True, True]


def test_where_arenas_cannot_be_looked_at_every_order_is_answered_and_the_other_ranks_hear_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    with make_arena(tmp_path, 0, 2) as first, make_arena(tmp_path, 1, 2) as second:
        opened = ArenaFolder.open

        def short(self: ArenaFolder, name: str) -> Arena:
            if threading.current_thread().name == "lakeckpt-persister-0":
                raise ArenaError("too many open files")
            return opened(self, name)

        desks, _ = ranks(storage, tmp_path, 2)
        for step in (1, 2, 3):
            fill(first, step), fill(second, step)
        monkeypatch.setattr(ArenaFolder, "open", short)
        for desk in desks:
            for step in (1, 2, 3):
                desk.order(step, step)
            desk.persister.leave()
        finish(desks)
    left_out = [(1, "save_skipped"), (2, "save_skipped")]
    assert [desk.said() for desk in desks] == [[*left_out, (3, "arena")], [*left_out, (3, "save_failed")]]
    assert desks[1].outcomes[-1].text == "nothing was saved at step 3. failure of rank 0: too many open files"


def test_no_order_has_the_number_of_the_final_save(tmp_path: Path) -> None:
    storage = MemoryStorage()
    with pytest.raises(AssertionError, match="at most 999999 saves"):
        Desk(storage, tmp_path, EventWaiter(storage)).order(1, FINAL)


def test_a_cut_that_is_gone_is_reported_and_the_next_one_is_persisted(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 7)
        first = Desk(storage, tmp_path, EventWaiter(storage))
        serve(first, (3, 0))
        assert first.said() == [(3, "save_skipped")]
        assert "step 3 was skipped: rank 0 had not captured it" in first.outcomes[0].text
        again = Desk(storage, tmp_path, EventWaiter(storage))
        serve(again, (7, 1))
    assert committed(storage) == [7]


def test_where_nothing_is_in_memory_any_more_that_is_a_failure_and_no_choice(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    with make_arena(tmp_path) as arena:
        fill(arena, 3)
    ArenaFolder(tmp_path).remove(arena.name)
    serve(desk, (3, 0))
    assert desk.said() == [(3, "save_failed")] and "its arena was removed" in desk.outcomes[0].text


def test_a_cut_that_is_gone_says_nothing_of_what_earlier_ones_wrote(tmp_path: Path) -> None:
    """Else the next save would write anew what has not changed."""
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 7)
        desk = Desk(storage, tmp_path, EventWaiter(storage))
        earlier = desk.persister._publisher._earlier
        serve(desk, (3, 0))
        assert desk.said() == [(3, "save_skipped")] and desk.persister._publisher._earlier is earlier


def test_an_agent_with_nothing_to_persist_takes_the_checksums_of_the_newest_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, looked = MemoryStorage(), threading.Event()
    begin(storage)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    look_over = Generations.look_over

    def look(generations: Generations, goes_on: Callable[[], bool]) -> None:
        look_over(generations, goes_on)
        if generations is desk.persister._generations:  # agents of other tests may live
            looked.set()

    monkeypatch.setattr(Generations, "look_over", look)
    with make_arena(tmp_path) as arena:
        fill(arena, 3), fill(arena, 4)
        desk.persister.start()
        assert looked.wait(PATIENCE_S)
        for step, is_hashed in ((4, True), (3, False)):
            with arena.hold(step=step) as held:
                assert held is not None and (held.checksums() is not None) == is_hashed
        desk.persister.leave()
        assert desk.persister.join()


@pytest.mark.parametrize("why", ["it was made anew", "it was removed"])
def test_an_arena_that_was_made_anew_is_saved_with_its_own_checksums(tmp_path: Path, why: str) -> None:
    """A state grew, or somebody emptied the folder, while the agent lives and has the arena before mapped."""
    storage = MemoryStorage()
    begin(storage)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    desk.persister.start()
    for number, step in enumerate((4, 8, 12)):
        if why == "it was removed":
            for path in tmp_path.glob("*.arena"):
                path.unlink()
        with make_arena(tmp_path) as arena:
            fill(arena, step)
            desk.settled.clear()
            desk.order(step, number)
            assert desk.settled.wait(PATIENCE_S)
    desk.persister.leave()
    assert desk.persister.join()
    assert desk.said() == [(4, ""), (8, ""), (12, "")] and committed(storage) == [4, 8, 12] and holds(storage, 12)


def test_memory_that_is_not_as_its_checksums_say_is_committed_by_none(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    desks, _ = ranks(storage, tmp_path, 2)
    for rank, desk in enumerate(desks):
        arena = make_arena(tmp_path, rank, 2)
        fill(arena, 4)
        take_checksums(tmp_path)
        if rank == 1:
            with arena.hold(step=4) as held:
                assert held is not None
                arena.memory[arena.layout.data_at(held.number)] ^= 1
        desk.order(4, 0)
        desk.persister.leave()
    finish(desks)
    assert committed(storage) == [] and [desk.said() for desk in desks] == [[(4, "save_failed")]] * 2
    assert all("leaf 0 of step 4 is not what was written" in desk.outcomes[0].text for desk in desks)


def ranks(
    storage: MemoryStorage, folder: Path, world_size: int, *, places: dict[int, Storage] | None = None
) -> tuple[list[Desk], EventWaiter]:
    waiter = EventWaiter(storage)
    every = [
        Desk((places or {}).get(rank, storage), folder, waiter, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return every, waiter


def finish(desks: list[Desk]) -> None:
    for desk in desks:
        desk.persister.start()
    for desk in desks:
        assert desk.persister.join(PATIENCE_S), f"rank {desk.persister.rank} does not end"


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_through_storage_and_each_content_is_written_once(tmp_path: Path, world_size: int) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=world_size)
    desks, _ = ranks(storage, tmp_path, world_size)
    arenas = [make_arena(tmp_path, rank, world_size) for rank in range(world_size)]
    for arena, desk in zip(arenas, desks, strict=True):
        fill(arena, 4)
        desk.order(4, 0)
        desk.persister.leave()
    finish(desks)
    assert committed(storage) == [4] and holds(storage, 4, world_size)
    assert [desk.said() for desk in desks] == [[(4, "")]] * world_size
    files = [data for path, data in storage.objects.items() if path.startswith("objects/")]
    assert sum(data.count(content(4)) for data in files) == 1


def test_a_cut_that_one_rank_has_lost_is_committed_by_none_and_the_reason_reaches_all(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    desks, _ = ranks(storage, tmp_path, 2)
    for rank, desk in enumerate(desks):
        fill(make_arena(tmp_path, rank, 2), 4 + rank)
        desk.order(4, 0)
        desk.persister.leave()
    finish(desks)
    assert committed(storage) == [] and [desk.said() for desk in desks] == [[(4, "save_skipped")]] * 2
    assert all("step 4 was skipped: rank 1 had not captured it" in desk.outcomes[0].text for desk in desks)


def test_a_store_that_fails_for_a_while_is_tried_until_it_works(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    faults = {("put", n): StoreFault.ERROR for n in range(1, 6)} | {
        ("list", 1): StoreFault.ERROR,
        ("put_new", 1): StoreFault.ERROR,
    }
    waiter = EventWaiter(storage)
    waiter.died()  # its clock jumps: nobody else acts
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk = Desk(FaultyStorage(storage, fail_at=faults), tmp_path, waiter)
        serve(desk, (5, 0))
    assert committed(storage) == [5] and desk.said() == [(5, "")]


def test_a_store_that_goes_on_failing_is_reported_when_the_time_is_over(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    waiter = EventWaiter(storage)
    waiter.died()
    faults = {("put", n): StoreFault.ERROR for n in range(1, 1000)}
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk = Desk(FaultyStorage(storage, fail_at=faults), tmp_path, waiter)
        serve(desk, (5, 0))
    assert desk.said() == [(5, "save_failed")] and committed(storage) == []
    assert waiter.time_s >= 20.0


def test_a_commit_behind_which_nothing_can_be_removed_says_so_and_its_log_too(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    waiter = EventWaiter(storage)
    waiter.died()
    faults = {("delete", n): StoreFault.ERROR for n in range(1, 1000)}
    settings = replace(SETTINGS, keep=Keep(last=1))
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk = Desk(FaultyStorage(storage, fail_at=faults), tmp_path, waiter, settings=settings)
        desk.order(5, 0)
        desk.persister.start()
        assert desk.settled.wait(PATIENCE_S)
        fill(arena, 6)
        desk.order(6, 1)
        desk.persister.leave()
        assert desk.persister.join(PATIENCE_S), "it does not end"
    assert desk.said() == [(5, ""), (6, "")] and committed(storage) == [5, 6]
    first, second = (one.remarks.unpruned for one in desk.outcomes)
    assert first == "" and "delete" in second
    assert f"checkpoints that are not to be kept could not be removed: {second}" in desk.log


def test_a_superseded_attempt_commits_nothing_and_says_so_for_every_order(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    begin(storage, slot=1)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk = Desk(storage, tmp_path, EventWaiter(storage))
        desk.order(5, 0)
        desk.persister.start()
        desk.order(5, 1)
        desk.persister.leave()
        assert desk.persister.join(PATIENCE_S)
    assert {kind for _, kind in desk.said()} <= {"attempt_superseded", "save_failed"}
    assert desk.said()[-1] == (5, "attempt_superseded") and committed(storage) == []


# --- trainers that die


def test_when_a_trainer_dies_its_newest_complete_cut_is_persisted(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        for step in (5, 6):
            fill(arena, step)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    desk.persister.die()
    run(desk)
    assert committed(storage) == [6] and holds(storage, 6) and desk.outcomes[0].number == FINAL
    assert storage.list(final_folder(0)) == []  # nobody else is to be told


def test_a_final_save_stands_for_orders_that_waited_and_they_do_not_keep_it_from_trying_again(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    faulty = FaultyStorage(storage, fail_at={("put", 1): StoreFault.ERROR})
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
    desk = Desk(faulty, tmp_path, EventWaiter(storage))
    for number in range(2):
        desk.order(3 + number, number)
    desk.persister.die()
    run(desk)
    assert committed(storage) == [5] and holds(storage, 5), desk.log
    assert [step for step, _ in desk.said()] == [5], "the final save stands for what was ordered"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_nothing_new_does_not_wait_for_a_final_save(tmp_path: Path, rank: int) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    waiter = SystemWaiter()
    desks = [Desk(storage, tmp_path, waiter, rank=one, world_size=2, linger_s=10**6) for one in range(2)]
    with make_arena(tmp_path, 1 - rank, 2) as arena:
        fill(arena, 5)
    for desk in (desks[rank], desks[1 - rank]):  # the other one waits for what it says
        desk.persister.start()
        desk.persister.die()
        assert desk.persister.join(PATIENCE_S), desk.log
    assert committed(storage) == [] and "no cut of all ranks" in desks[0].log[-1]


def test_a_cut_that_is_committed_already_is_no_final_save(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk = Desk(storage, tmp_path, EventWaiter(storage))
        serve(desk, (5, 0))
        again = Desk(storage, tmp_path, EventWaiter(storage))
        again.persister.die()
        run(again)
    assert committed(storage) == [5] and again.said() == []


def test_cuts_of_another_attempt_are_no_final_save(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5, attempt=9)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    desk.persister.die()
    run(desk)
    assert committed(storage) == []


def test_the_final_save_of_several_ranks_is_the_newest_cut_that_all_have(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=3)
    desks, _ = ranks(storage, tmp_path, 3)
    for rank, steps in enumerate([(4, 5), (5, 6), (4, 5, 6)]):
        arena = make_arena(tmp_path, rank, 3)
        for step in steps:
            fill(arena, step)
        arena.close()
        desks[rank].persister.die()
    finish(desks)
    assert committed(storage) == [5] and holds(storage, 5, 3)


@pytest.mark.parametrize("late", [0, 1])
def test_a_final_save_waits_for_ranks_that_notice_later_that_another_died(tmp_path: Path, late: int) -> None:
    """One that waits for a collective ends when its watchdog does, which is later than a save may take."""
    storage, waiter = MemoryStorage(), SystemWaiter()
    begin(storage, world_size=2)
    settings = replace(SETTINGS, timeout_s=1.0)
    desks = [
        Desk(storage, tmp_path, waiter, rank=rank, world_size=2, settings=settings, linger_s=PATIENCE_S)
        for rank in range(2)
    ]
    for rank, desk in enumerate(desks):
        with make_arena(tmp_path, rank, 2) as arena:
            fill(arena, 5)
        desk.persister.start()
    first, last = desks[1 - late].persister, desks[late].persister
    first.die()
    assert not first.join(2.5 * settings.timeout_s)
    last.die()
    assert first.join(PATIENCE_S) and last.join(PATIENCE_S)
    assert committed(storage) == [5] and holds(storage, 5, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_final_save_that_waits_for_others_ends_when_another_attempt_begins(tmp_path: Path, rank: int) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    desk = Desk(storage, tmp_path, SystemWaiter(), rank=rank, world_size=2, linger_s=10**6)
    with make_arena(tmp_path, rank, 2) as arena:
        fill(arena, 5)
    desk.persister.start()
    desk.persister.die()
    assert not desk.persister.join(0.2)
    begin(storage, slot=1, world_size=2)
    assert desk.persister.join(PATIENCE_S) and "superseded" in desk.log[-1]


@pytest.mark.parametrize("missing", [0, 1])
def test_an_order_that_only_some_trainers_gave_before_they_died_holds_nobody_up(tmp_path: Path, missing: int) -> None:
    storage, waits = MemoryStorage(), threading.Event()
    begin(storage, world_size=2)
    desks, waiter = ranks(storage, tmp_path, 2)
    wait = waiter.wait
    waiter.wait = lambda seconds: (waits.set(), wait(seconds))  # type: ignore[method-assign]
    for rank, desk in enumerate(desks):
        with make_arena(tmp_path, rank, 2) as arena:
            fill(arena, 4), fill(arena, 5)
        desk.persister.start()
    desks[1 - missing].order(5, 0)
    assert waits.wait(PATIENCE_S), "it does not wait for the other one"
    desks[1 - missing].persister.die()
    desks[missing].persister.die()
    for desk in desks:
        assert desk.persister.join(PATIENCE_S), f"rank {desk.persister.rank} does not end"
    assert committed(storage) == [5] and waiter.time_s < 20.0


def test_a_trainer_that_has_left_has_no_final_save(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5), fill(arena, 6)
    desk = Desk(storage, tmp_path, EventWaiter(storage))
    desk.order(5, 0)
    desk.persister.leave()
    desk.persister.die()
    run(desk)
    assert committed(storage) == [5] and desk.said() == [(5, "")]


def test_a_final_save_has_all_its_time_however_long_ago_the_last_order_was(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    waiter = EventWaiter(storage)
    waiter.died()
    store = Failing(storage)
    desk = Desk(store, tmp_path, waiter)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        desk.persister.start()
        desk.order(5, 0)
        assert desk.settled.wait(PATIENCE_S)
        fill(arena, 6)
    waiter.time_s += 1000.0
    store.reads = store.puts = 3
    desk.persister.die()
    assert desk.persister.join(PATIENCE_S) and (store.reads, store.puts) == (0, 0)
    assert committed(storage) == [5, 6]


def test_a_save_that_fails_is_dropped_for_a_newer_one(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    waiter = EventWaiter(storage)
    waiter.died()
    desk = Desk(Failing(storage, puts=2), tmp_path, waiter)

    def order(step: int) -> None:
        desk.persister.take(Order(step=step, number=step))

    wait, newer = waiter.wait, [6, 7]

    def wait_and_order(seconds: float) -> None:
        while newer:
            order(newer.pop(0))
        desk.persister.leave()
        wait(seconds)

    waiter.wait = wait_and_order  # type: ignore[method-assign]
    with make_arena(tmp_path) as arena:
        for step in (5, 6, 7):
            fill(arena, step)
        order(5)
        run(desk)
    assert desk.said() == [(5, "save_failed"), (6, "save_skipped"), (7, "")] and waiter.time_s < 1.0
    assert committed(storage) == [7]


@pytest.mark.parametrize(
    ("recorded", "differs", "expected"), [((3, 3), 0, 5), ((3, 4), 0, 5), ((3, 5), 0, None), ((3, 3), 5, 4)]
)
def test_no_cut_is_persisted_that_is_no_newer_than_what_any_rank_knows_committed_or_that_differs_on_ranks(
    recorded: tuple[int, int], differs: int, expected: int | None
) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def say(rank: int, exchange: object) -> int | None:
        return agree_on_final_save(
            storage,
            7,
            {
                CutId(attempt=7, step=step): bytes([rank if step == differs else 9]) * 16
                for step in [(4, 5), (4, 5, 6)][rank]
            },
            recorded[rank],
            rank=rank,
            world_size=2,
            waiter=waiter,
            timeout_s=20.0,
            linger_s=0.0,
            obstacles=lambda: None,
        )

    assert good(run_ranks(2, say)) == [expected] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ends", ["die", "leave"])
def test_an_order_of_a_trainer_that_is_gone_waits_for_nobody_when_another_attempt_begins(
    tmp_path: Path, rank: int, ends: str
) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    settings = replace(SETTINGS, timeout_s=10**6)
    desk = Desk(storage, tmp_path, SystemWaiter(), rank=rank, world_size=2, settings=settings)
    with make_arena(tmp_path, rank, 2) as arena:
        fill(arena, 5)
    desk.order(5, 0)
    desk.persister.start()
    assert not desk.persister.join(0.2)
    getattr(desk.persister, ends)()
    assert not desk.persister.join(0.2)
    begin(storage, slot=1, world_size=2)
    assert desk.persister.join(PATIENCE_S) and desk.said() == [(5, "attempt_superseded")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_an_agent_that_died_within_a_save_is_not_waited_for_when_another_attempt_begins(tmp_path: Path, n: int) -> None:
    storage, waiter = MemoryStorage(), SystemWaiter()
    begin(storage, world_size=2)
    settings = replace(SETTINGS, timeout_s=10**6)
    faulty = FaultyStorage(storage, fail_at={("put", n): StoreFault.KILL})
    desks = [
        Desk(storage if rank == 0 else faulty, tmp_path, waiter, rank=rank, world_size=2, settings=settings)
        for rank in range(2)
    ]
    for rank, desk in enumerate(desks):
        with make_arena(tmp_path, rank, 2) as arena:
            fill(arena, 5)
        desk.order(5, 0)
        desk.persister.start()
    assert desks[1].persister.join(PATIENCE_S) and faulty.dead
    desks[0].persister.die()
    begin(storage, slot=1, world_size=2)
    assert desks[0].persister.join(PATIENCE_S) and desks[0].said() == [(5, "attempt_superseded")]


def test_what_an_agent_committed_and_did_not_report_is_found_by_the_next(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage)
    with make_arena(tmp_path) as arena:
        fill(arena, 5)
        first = Desk(storage, tmp_path, EventWaiter(storage))
        serve(first, (5, 0))
        fill(arena, 6)
        second = Desk(storage, tmp_path, EventWaiter(storage))
        second.order(6, 1)
        second.persister.leave()
        run(second)
    assert second.said() == [(6, "")] and [one.info.slot for one in second.outcomes] == [2]
    assert committed(storage) == [5, 6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize(
    "kind", ["put", *(pytest.param(one, marks=pytest.mark.soak) for one in ("put_new", "list", "read"))]
)
def test_an_agent_of_several_ranks_killed_at_any_call_is_replaced_and_the_next_save_is_done(
    tmp_path: Path, kind: str, killed: int
) -> None:
    """Its trainer reports the save as failed, which ends the other rank's wait; the next save is done by all."""
    for n in range(1, 100):
        storage, folder = MemoryStorage(), tmp_path / str(n)
        begin(storage, world_size=2)
        faulty = FaultyStorage(storage, fail_at={(kind, n): StoreFault.KILL})
        desks, waiter = ranks(storage, folder, 2, places={killed: faulty})
        arenas = [make_arena(folder, rank, 2) for rank in range(2)]
        for arena, desk in zip(arenas, desks, strict=True):
            fill(arena, 5)
            desk.order(5, 0)
            desk.persister.start()
        desks[killed].persister.leave()
        assert desks[killed].persister.join(PATIENCE_S)
        failed = faulty.dead and not desks[killed].said()
        if failed:
            other = desks[1 - killed].persister
            other.take(Obstacle(kind=FAILED, rank=killed, error="save_failed: the agent was killed"))
            storage.put("anything", [b""])  # an `EventWaiter` looks again
        desks[killed] = Desk(storage, folder, waiter, rank=killed, world_size=2)
        desks[killed].persister.start()
        for arena, desk in zip(arenas, desks, strict=True):
            fill(arena, 6)
            desk.order(6, 1)
            desk.persister.leave()
        for desk in desks:
            assert desk.persister.join(PATIENCE_S), f"rank {desk.persister.rank} does not end: {n}"
            assert desk.said()[-1] == (6, ""), (n, desk.outcomes)
        assert committed(storage) in ([5, 6], [6] if failed else []) and holds(storage, 6, 2)
        if not faulty.dead:
            return
    raise AssertionError("the sweep did not come to its end")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["put", "put_new", "list", "read"])
def test_an_agent_killed_at_any_call_of_the_store_loses_no_commit_and_leaves_no_mixture(
    tmp_path: Path, kind: str
) -> None:
    """Two agents after one another, the first killed at its n-th call; the second finds what there is and goes on."""
    for n in range(1, 50):
        storage, folder = MemoryStorage(), tmp_path / f"{kind}-{n}"
        begin(storage)
        faulty = FaultyStorage(storage, fail_at={(kind, n): StoreFault.KILL})
        waiter = EventWaiter(storage)
        with make_arena(folder) as arena:
            fill(arena, 5)
            first = Desk(faulty, folder, waiter)
            serve(first, (5, 0))
            assert set(committed(storage)) <= {5}
            told = dict(first.said()).get(5) == ""
            assert not told or committed(storage) == [5]
            second = Desk(storage, folder, EventWaiter(storage))
            if n % 2:  # the trainer lives, and saves again; or it dies, too
                fill(arena, 6)
                second.order(6, 1)
                second.persister.leave()
            else:
                second.persister.die()
            run(second)
            newest = 6 if n % 2 else 5
            assert committed(storage)[-1] == newest and holds(storage, newest)
            assert n % 2 == 0 or second.said() == [(6, "")]
            assert not told or committed(storage)[0] == 5
        if not faulty.dead:
            return
    raise AssertionError("the sweep did not come to its end")


# --- saves that another rank gives up


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("early", [False, True])
def test_a_save_that_another_rank_gave_up_is_waited_for_by_nobody(tmp_path: Path, rank: int, early: bool) -> None:
    """The other rank's agent says nothing: its store takes no note either. The trainer has heard why."""
    storage = MemoryStorage()
    begin(storage, world_size=2)
    settings = replace(SETTINGS, timeout_s=10**6)
    desk = Desk(storage, tmp_path, SystemWaiter(), rank=rank, world_size=2, settings=settings)
    with make_arena(tmp_path, rank, 2) as arena:
        fill(arena, 5)
    save = Obstacle(kind=FAILED, rank=7, error="save_failed: rank 7 could not write its part: the disk is full")
    if early:
        desk.persister.take(save)
    desk.order(5, 0)
    desk.persister.start()
    if not early:
        assert not desk.settled.wait(0.2)
        desk.persister.take(save)
    assert desk.settled.wait(PATIENCE_S)
    desk.persister.leave()
    assert desk.persister.join(PATIENCE_S)
    assert [one.kind for one in desk.outcomes] == ["save_failed"] and "the disk is full" in desk.outcomes[0].text
    note = storage.objects[SaveId(attempt=0, step=5, number=0).failure_path(rank)]
    assert note == b"failed %d 0\nsave_failed: rank 7 could not write its part: the disk is full" % rank


def test_an_order_of_what_was_not_captured_says_why_to_the_other_ranks(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)
    desks, _ = ranks(storage, tmp_path, 2)
    for rank, desk in enumerate(desks):
        fill(make_arena(tmp_path, rank, 2), 4)
        desk.persister.take(Order(step=4, number=0, failure="unsupported_value: no" if rank == 1 else ""))
        desk.persister.leave()
    finish(desks)
    assert [desk.said() for desk in desks] == [[(4, "unsupported_value")]] * 2
    assert [desk.outcomes[0].text for desk in desks] == ["rank 1 dropped the save: no", "no"]
    assert committed(storage) == []


def test_an_agent_whose_store_is_full_says_so_at_once(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)

    def before(method: str, path: str) -> None:
        if method == "put":
            raise StorageError(errno.ENOSPC, "the disk is full")

    desks, waiter = ranks(storage, tmp_path, 2, places={1: FaultyStorage(storage, before=before)})
    fill(make_arena(tmp_path, 1, 2), 4)
    serve(desks[1], (4, 0))
    assert "the disk is full" in desks[1].outcomes[0].text and waiter.time_s < 1.0


def test_an_order_that_is_skipped_without_a_note_has_failed_and_the_trainers_tell_each_other(tmp_path: Path) -> None:
    storage = MemoryStorage()
    begin(storage, world_size=2)

    def before(method: str, path: str) -> None:
        if method == "put" and path.endswith(".failed"):
            raise StorageError(errno.ENOSPC, "the disk is full")

    desks, _ = ranks(storage, tmp_path, 2, places={0: FaultyStorage(storage, before=before)})
    for rank, desk in enumerate(desks):
        arena = make_arena(tmp_path, rank, 2)
        fill(arena, 4), fill(arena, 5)
        desk.order(4, 0), desk.order(5, 1)
    desks[1].persister.take(Obstacle(kind=FAILED, rank=0, error="save_failed: as the trainer of rank 0 says"))
    for desk in desks:
        desk.persister.leave()
    finish(desks)
    assert [desk.said() for desk in desks] == [[(4, "save_failed"), (5, "")]] * 2 and committed(storage) == [5]
    assert "skipped for a newer cut, and the store takes no note of it" in desks[0].outcomes[0].text
