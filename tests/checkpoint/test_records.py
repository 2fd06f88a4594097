"""Ranks agree through records in storage as they would over a process group, and hear of whoever does not take part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lakeckpt.checkpoint.agreement import Agreement, Talk, Unit, agree
from lakeckpt.checkpoint.commit import publish_failure
from lakeckpt.checkpoint.parts import SaveId
from lakeckpt.checkpoint.records import RecordTalk
from lakeckpt.errors import CheckpointError, DisagreementError, MissingRanksError, SaveFailed
from tests.checkpoint.rig import EventWaiter, Gone, MemoryStorage, good, run_ranks

SAVE = SaveId(attempt=3, step=7, number=2)
FACTS = {"optimizer step": "7"}


def units(rank: int, *, differ: bool) -> list[Unit]:
    own = bytes([rank if differ else 0]) * 16
    return [Unit(name=f"tensor:{n}", digest=bytes([n]) * 16, size_bytes=100 + n) for n in range(5)] + [
        Unit(name="tensor:own", digest=own, size_bytes=64)
    ]


def over_storage(world_size: int, body: Callable[[int, Talk], Any], storage: MemoryStorage | None = None) -> list[Any]:
    storage = MemoryStorage() if storage is None else storage
    waiter = EventWaiter(storage)

    def one(rank: int, exchange: Any) -> Any:
        talk = RecordTalk(storage, SAVE, rank=rank, world_size=world_size, waiter=waiter, timeout_s=5.0)
        return body(rank, talk)

    return run_ranks(world_size, one, waiters=[waiter])


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_they_settle_on_what_a_process_group_settles_on(world_size: int, differ: bool) -> None:
    def body(rank: int, talk: Any) -> Agreement:
        tell = {"slot": "4"} if rank == 0 else {}
        return agree(talk, facts=FACTS, units=units(rank, differ=differ), tell=tell)

    through_storage = good(over_storage(world_size, body))
    assert through_storage == good(run_ranks(world_size, body))
    assert through_storage == [through_storage[0]] * world_size and through_storage[0].told == {"slot": "4"}


def test_replicas_that_agree_say_one_small_thing_each() -> None:
    storage = MemoryStorage()
    good(over_storage(4, lambda rank, talk: agree(talk, facts=FACTS, units=units(0, differ=False), tell={}), storage))
    assert len(storage.objects) == 4 and max(map(len, storage.objects.values())) < 400
    assert {path.rpartition("/")[0] for path in storage.objects} == {f"parts/{SAVE.folder}"}


def test_a_disagreement_is_raised_on_every_rank() -> None:
    def body(rank: int, talk: Talk) -> Agreement:
        return agree(talk, facts={"optimizer step": str(rank // 2)}, units=[], tell={})

    results = over_storage(3, body)
    assert all(isinstance(one, DisagreementError) for one in results)
    assert all("0 on ranks 0-1; 1 on rank 2" in str(one) for one in results)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_says_nothing_is_named_when_the_time_is_over(gone: int) -> None:
    def body(rank: int, talk: Talk) -> Agreement:
        if rank == gone:
            raise Gone
        return agree(talk, facts=FACTS, units=[], tell={})

    results = [one for rank, one in enumerate(over_storage(3, body)) if rank != gone]
    assert all(isinstance(one, MissingRanksError) for one in results)
    assert f"rank {gone} of 3" in str(results[0])


def test_a_rank_that_gives_up_is_seen_by_those_who_wait() -> None:
    storage = MemoryStorage()

    def body(rank: int, talk: Talk) -> Agreement | None:
        if rank == 1:
            publish_failure(storage, SAVE, 1, SaveFailed("the disk is full"))
            return None
        return agree(talk, facts=FACTS, units=[], tell={})

    results = over_storage(2, body, storage)
    assert isinstance(results[0], CheckpointError) and "rank 1 gave the checkpoint up: the disk is full" in str(
        results[0]
    )


def test_a_record_that_does_not_read_back_fails_the_save() -> None:
    storage = MemoryStorage()
    storage.put(f"parts/{SAVE.folder}/00001.says-0", [b"?"])
    waiter = EventWaiter(storage)
    talk = RecordTalk(storage, SAVE, rank=0, world_size=2, waiter=waiter, timeout_s=5.0)
    with pytest.raises(SaveFailed, match=r"00001\.says-0 does not read back"):
        talk.combine(b"x", lambda messages: messages[0])


def test_where_there_is_nobody_to_wait_for_any_more_it_ends_at_once() -> None:
    def over() -> None:
        raise SaveFailed("before their trainers died")

    storage = MemoryStorage()
    for rank in range(2):
        waiter = EventWaiter(storage)
        talk = RecordTalk(storage, SAVE, rank=rank, world_size=2, waiter=waiter, timeout_s=5.0, still=over)
        with pytest.raises(SaveFailed, match="before their trainers died"):
            talk.combine(b"x", lambda messages: messages[0])
        assert waiter.time_s == 0.0
        storage = MemoryStorage()
