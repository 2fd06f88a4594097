"""Ranks agree through records in storage as they would over a process group, and hear of whoever does not take part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lakeckpt.checkpoint.agreement import Agreement, Talk, Unit, agree, digest_of
from lakeckpt.checkpoint.commit import publish_failure
from lakeckpt.checkpoint.digests import LEAF_BYTES, leaf_digests
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.parts import SHARING, SaveId
from lakeckpt.checkpoint.records import RecordTalk
from lakeckpt.checkpoint.sharing import Sharing, sharing_to_bytes
from lakeckpt.checkpoint.staged import Staged, StagedTensor, StagedTree
from lakeckpt.checkpoint.wholes import part_key
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


def own_units(rank: int, *, count: int = 500, other: int = 0) -> list[Unit]:
    """As many of each rank's own, under names that all of them have, and one that all hold alike."""
    mine = [Unit(name=f"tensor:{n}", digest=bytes([rank + other]) * 16, size_bytes=9, own=True) for n in range(count)]
    return [Unit(name="tree:model", digest=bytes(16), size_bytes=5), *mine]


def test_of_what_one_rank_alone_can_have_it_says_one_small_thing() -> None:
    storage = MemoryStorage()
    found = good(over_storage(4, lambda rank, talk: agree(talk, facts=FACTS, units=own_units(rank), tell={}), storage))
    assert len(storage.objects) == 4 and max(map(len, storage.objects.values())) < 600
    assert len({one.cut for one in found}) == 1
    for rank, one in enumerate(found):
        assert one.mine == {(f"tensor:{n}", bytes([rank]) * 16) for n in range(500)}
        assert one.owners == {("tree:model", bytes(16)): (0, ((0, 4),))}
        assert list(one.own) == [digest_of((unit.name, unit.digest) for unit in own_units(at)[1:]) for at in range(4)]
        outline = one.outline(rank)
        assert (outline.units, outline.different) == (501, ())
        assert outline.elsewhere == (() if rank == 0 else ((0, 1),))


def test_parts_of_what_a_whole_mesh_divides_are_each_ranks_own() -> None:
    def sharing(ranks: int, *dims: int) -> Sharing:
        return Sharing(ranks=((0, ranks),), dims=dims)

    shared = {"divided": sharing(4, 0), "twice": sharing(4, 0, 0), "copied": sharing(4, -1, 0), "alone": sharing(1, 0)}
    data = memoryview(bytes(8))
    keys = [part_key(name, (2,), (4,)) for name in (*shared, "unsaid")] + ["divided"]
    tensors = {
        key: StagedTensor(
            spec=TensorSpec(key=key, dtype="float32", shape=(2,)), data=data, leaves=leaf_digests(data, LEAF_BYTES)
        )
        for key in keys
    }
    trees = {SHARING: StagedTree(item=SHARING, document=sharing_to_bytes(shared), digest=bytes(16))}
    for said, expected in ((trees, keys[:2]), ({}, [])):
        units = Staged(tensors=tensors, trees=said).units()
        assert [unit.name.removeprefix("tensor:") for unit in units if unit.own] == expected


def test_the_cut_is_another_where_one_rank_has_other_parts() -> None:
    def cut(other: int) -> bytes:
        def body(rank: int, talk: Any) -> Agreement:
            return agree(talk, facts=FACTS, units=own_units(rank, count=3, other=other * (rank == 2)), tell={})

        return good(run_ranks(3, body))[0].cut

    assert cut(0) == cut(0) != cut(1)


def test_what_ranks_write_anyway_counts_where_the_rest_is_spread() -> None:
    def body(rank: int, talk: Any) -> Agreement:
        return agree(talk, facts=FACTS, units=own_units(rank, count=3 - rank), tell={})

    assert {owner for one in good(run_ranks(3, body)) for owner, _ in one.owners.values()} == {2}


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
