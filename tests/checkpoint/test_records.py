"""Ranks agree through records in storage as they would over a process group, and hear of whoever does not take part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import ranges
from lakeckpt.checkpoint.format.parts import SHARING, SaveId
from lakeckpt.checkpoint.format.sharing import Sharing, part_key, sharing_to_bytes
from lakeckpt.checkpoint.format.units import Unit, sum_of
from lakeckpt.checkpoint.persist.agreement import Agreed, agree
from lakeckpt.checkpoint.persist.failures import publish_failure, refuse_failed
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.checkpoint.state.staged import Staged, StagedTensor, StagedTree
from lakeckpt.errors import CheckpointError, MissingRanksError, SaveFailed, TrackingError
from lakeckpt.tracking.rounds import Rounds
from tests.checkpoint.rig import EventWaiter, Gone, MemoryStorage, good, run_ranks

SAVE = SaveId(attempt=3, step=7, number=2)
FACTS = {"optimizer step": "7"}


def units(rank: int, *, differ: bool) -> list[Unit]:
    own = bytes([rank if differ else 0]) * 16
    return [Unit(id=(f"tensor:{n}", bytes([n]) * 16), size_bytes=100 + n) for n in range(5)] + [
        Unit(id=("tensor:own", own), size_bytes=64)
    ]


def over_storage(
    world_size: int, body: Callable[[int, Rounds], Any], storage: MemoryStorage | None = None
) -> list[Any]:
    storage = MemoryStorage() if storage is None else storage
    waiter = EventWaiter(storage)

    def one(rank: int, exchange: Any) -> Any:
        obstacles = partial(refuse_failed, storage, SAVE, rank)
        options = {"waiter": waiter, "timeout_s": 5.0, "obstacles": obstacles}
        return body(rank, RecordTalk(storage, SAVE, rank=rank, world_size=world_size, **options))

    return run_ranks(world_size, one, waiters=[waiter])


class Pauses:
    """A clock that goes on while somebody waits; ``meanwhile``: what happens during the first wait."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.pauses: list[float] = []
        self.meanwhile = meanwhile

    def now(self) -> float:
        return sum(self.pauses)

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 1:
            self.meanwhile()


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_they_settle_on_what_a_process_group_settles_on(world_size: int, differ: bool) -> None:
    def body(rank: int, talk: Any) -> Agreed:
        announced = {"slot": "4"} if rank == 0 else {}
        return agree(talk, facts=FACTS, units=units(rank, differ=differ), announce=announced)

    through_storage = good(over_storage(world_size, body))
    assert through_storage == good(run_ranks(world_size, body))
    assert through_storage == [through_storage[0]] * world_size and through_storage[0].announced == {"slot": "4"}


def test_replicas_that_agree_say_one_small_thing_each() -> None:
    storage = MemoryStorage()
    good(
        over_storage(4, lambda rank, talk: agree(talk, facts=FACTS, units=units(0, differ=False), announce={}), storage)
    )
    assert len(storage.objects) == 4 and max(map(len, storage.objects.values())) < 400
    assert {path.rpartition("/")[0] for path in storage.objects} == {f"parts/{SAVE.folder}"}


def divided(rank: int, *, group: int = 1, count: int = 500, other: int = 0, kinds: int = 1) -> list[Unit]:
    """Parts, alike on every ``group`` ranks that follow each other, and one unit that
    all hold alike."""
    content = bytes([rank // group + other]) * 16
    parts = [
        Unit(id=(f"tensor:{rank // group + other}/{n:03}", content), size_bytes=9, bundle=n % kinds)
        for n in range(count)
    ]
    return [Unit(id=("tree:model", bytes(16)), size_bytes=5), *parts]


def agreed(world_size: int, units_of: Callable[[int], list[Unit]], storage: MemoryStorage | None = None) -> Any:
    return good(
        over_storage(
            world_size, lambda rank, talk: agree(talk, facts=FACTS, units=units_of(rank), announce={}), storage
        )
    )


@pytest.mark.parametrize("kinds", [1, 2])
def test_of_parts_that_no_other_rank_has_it_says_one_small_thing(kinds: int) -> None:
    storage = MemoryStorage()
    found = agreed(4, lambda rank: divided(rank, kinds=kinds), storage)
    assert len(storage.objects) == 4 and max(map(len, storage.objects.values())) < 700
    assert len({one.cut for one in found}) == 1
    for rank, one in enumerate(found):
        ranks = ((rank, rank + 1),)
        assert one.mine == {(f"tensor:{rank}/{n:03}", bytes([rank]) * 16): (rank, ranks) for n in range(500)}
        assert one.owners == {("tree:model", bytes(16)): (0, ((0, 4),))}
        assert one.bundles == {((at, at + 1),): sum_of(u.id for u in divided(at)[1:]) for at in range(4)}
        outline = one.outline(rank)
        assert (outline.units, outline.different) == (501, ())
        assert outline.elsewhere == (() if rank == 0 else ((0, 1),))


def test_ranks_that_hold_replicas_of_parts_share_them_out_without_a_further_word() -> None:
    storage = MemoryStorage()
    found = agreed(6, lambda rank: divided(rank, group=3), storage)
    assert len(storage.objects) == 6 and max(map(len, storage.objects.values())) < 600
    for first in (0, 3):
        alike = found[first : first + 3]
        assert all(one.mine == alike[0].mine for one in alike)
        units = {unit.id for unit in divided(first, group=3)[1:]}
        shares = [one.share(first + at) for at, one in enumerate(alike)]
        written = [what for share in shares for what in share if what in units]
        assert sorted(written) == sorted(units)  # each once, by one of those that hold it
        assert {ranks for share in shares for what, ranks in share.items() if what in units} == {((first, first + 3),)}
        assert max(map(len, shares)) - min(map(len, shares)) <= 2  # rank 0 has the tree, too
        for rank, one in enumerate(alike, first):
            outline = one.outline(rank)
            assert outline.elsewhere == ranges({0, first, first + 1, first + 2} - {rank}) and outline.units == 501


def test_a_rank_shares_each_bundle_with_those_that_have_it() -> None:
    """Of two kinds of parts, one is on all ranks of a half, the other on every second rank; sizes differ."""

    def units_of(rank: int) -> list[Unit]:
        return [
            Unit(id=(f"tensor:{kind} {group} {n}", bytes([group]) * 16), size_bytes=10 + 7 * n, bundle=kind)
            for kind, group in (("half", rank // 4), ("parity", rank % 2))
            for n in range(23)
        ]

    found = agreed(8, units_of)
    written = [(what, ranks) for rank, one in enumerate(found) for what, ranks in one.share(rank).items()]
    every = {unit.id for rank in range(8) for unit in units_of(rank)}
    held = {what: [rank for rank in range(8) if what in {unit.id for unit in units_of(rank)}] for what in every}
    assert sorted(written) == sorted((what, ranges(ranks)) for what, ranks in held.items())
    sums = {ranks: sum_of(what for what, at in written if at == ranks) for _, ranks in written}
    assert all(one.bundles == sums for one in found)


def test_equal_parts_of_several_meshes_are_written_once() -> None:
    """Tensor-parallel groups that are replicas of each other: their meshes know nothing of that."""
    found = agreed(2, lambda rank: [replace(unit, bundle=unit.bundle and f"mesh {rank}") for unit in divided(0)])
    assert found[0].bundles.keys() == {((0, 2),)}
    assert not found[0].share(0).keys() & found[1].share(1).keys()


def test_parts_are_said_together_by_item_and_mesh() -> None:
    def sharing(ranks: int, *dims: int) -> Sharing:
        return Sharing(ranks=((0, ranks),), dims=dims)

    shared = {"a/1": sharing(4, 0), "a/2": sharing(4, 0), "b/1": sharing(4, 0), "a/copied": sharing(4, -1, 0)}
    keys = [part_key(name, (2,), (4,)) for name in (*shared, "a/unsaid")] + ["a/1"]
    few = {"a/few": 2, "a/fewer": 1, "a/fewest": 1}  # of two rows, fewer ranks have none than of one
    shared |= dict.fromkeys(few, sharing(4, 0))
    keys += [part_key(name, (rows,), (rows,)) for name, rows in few.items()]
    tensors = {}
    for key in keys:
        data = memoryview(bytes(0 if "few" in key else 8))
        spec = TensorSpec(key=key, dtype="float32", shape=(len(data) // 4,))
        tensors[key] = StagedTensor(spec=spec, data=data, leaves=leaf_digests(data, LEAF_BYTES))
    trees = {SHARING: StagedTree(item=SHARING, document=sharing_to_bytes(shared), digest=bytes(16))}
    for said, expected in ((trees, [[0, 1], [2], [3], [6], [7, 8]]), ({}, [])):
        bundles: dict[object, list[int]] = {}
        for unit in Staged(tensors=tensors, trees=said).units():
            if unit.bundle is not None:
                bundles.setdefault(unit.bundle, []).append(keys.index(unit.id[0].removeprefix("tensor:")))
        assert list(bundles.values()) == expected


@pytest.mark.parametrize("group", [1, 3])
def test_the_cut_is_another_where_one_rank_has_other_parts(group: int) -> None:
    def cut(other: int) -> Any:
        return agreed(3, lambda rank: divided(rank, group=group, count=3, other=other * (rank == 2)))[0].cut

    assert cut(0) == cut(0) != cut(1)


@pytest.mark.parametrize(("parts", "owner"), [((3, 2, 1), 2), ((3, 3, 3, 2), 0), ((3, 3, 3, 0), 3)])
def test_what_ranks_write_anyway_counts_where_the_rest_is_spread(parts: tuple[int, ...], owner: int) -> None:
    """A rank's own bundle is all its load, one that three ranks hold a third of each one's."""

    def units_of(rank: int) -> list[Unit]:
        return divided(rank, count=parts[rank], group=1 if len(parts) == 3 else 3)

    assert {found for one in agreed(len(parts), units_of) for found, _ in one.owners.values()} == {owner}


def test_the_largest_are_given_out_first_each_to_the_least_loaded_of_those_that_hold_it() -> None:
    def units_of(rank: int) -> list[Unit]:
        sizes = {"a": 10, "b": 10, "c": 10, "d": 10, "e": 40} | ({"f": 90} if rank == 0 else {"g": 100, "h": 90})
        return [Unit(id=(f"tensor:{name}", bytes(16)), size_bytes=size) for name, size in sizes.items()]

    written = [
        sum(unit.size_bytes for unit in units_of(rank) if unit.id in one.share(rank))
        for rank, one in enumerate(agreed(3, units_of))
    ]
    assert written == [130, 120, 110]


def test_where_ranks_differ_in_one_unit_they_say_little_of_the_others() -> None:
    def units_of(rank: int) -> list[Unit]:
        same = [Unit(id=(f"tensor:{n:04}", bytes(16)), size_bytes=9) for n in range(5000)]
        return [*same, Unit(id=("tensor:own", bytes([rank]) * 16), size_bytes=9)]

    storage = MemoryStorage()
    for rank, one in enumerate(agreed(2, units_of, storage)):
        assert one.share(rank)["tensor:own", bytes([rank]) * 16] == ((rank, rank + 1),)
        assert one.outline(rank).different == ("tensor:own",) and one.outline(rank).units == 5001
    assert sum(len(data) for path, data in storage.objects.items() if path.endswith("-2")) < 10_000


def test_a_disagreement_is_raised_on_every_rank() -> None:
    def body(rank: int, talk: Rounds) -> Agreed:
        return agree(talk, facts={"optimizer step": str(rank // 2)}, units=[], announce={})

    results = over_storage(3, body)
    assert all(isinstance(one, TrackingError) for one in results)
    assert all("0 on ranks 0-1; 1 on rank 2" in str(one) for one in results)


def test_of_states_that_are_alike_a_digest_crosses_and_nothing_else() -> None:
    storage = MemoryStorage()
    states = {"state of reader 'a'": {f"field {n}": "x" * 50 for n in range(1000)}}
    good(over_storage(4, lambda rank, talk: agree(talk, facts=FACTS, units=[], announce={}, states=states), storage))
    assert len(storage.objects) == 4 and max(map(len, storage.objects.values())) < 500


@pytest.mark.parametrize("without", [None, 0, 2])
def test_the_fields_are_named_in_which_states_differ(without: int | None) -> None:
    """A rank that has no state, as its save has failed, takes part in the round, too."""

    def body(rank: int, talk: Rounds) -> Agreed:
        states = {"reader 'a'": {"'epoch'": "3", "'step'": "8" if rank == 3 else "7"}}
        return agree(talk, facts=FACTS, units=[], announce={}, states={} if rank == without else states)

    results = over_storage(4, body)
    assert all(isinstance(one, TrackingError) for one in results)
    assert all("reader 'a', 'step': 7 on ranks" in str(one) and "8 on rank 3" in str(one) for one in results)
    assert not any("epoch" in str(one) for one in results)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_says_nothing_is_named_when_the_time_is_over(gone: int) -> None:
    def body(rank: int, talk: Rounds) -> Agreed:
        if rank == gone:
            raise Gone
        return agree(talk, facts=FACTS, units=[], announce={})

    results = [one for rank, one in enumerate(over_storage(3, body)) if rank != gone]
    assert all(isinstance(one, MissingRanksError) for one in results)
    assert f"rank {gone} of 3" in str(results[0])


def test_what_keeps_rank_0_from_an_answer_is_raised_on_the_others_at_once() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    waiter.died()
    first, second = (
        RecordTalk(storage, SAVE, rank=rank, world_size=2, waiter=waiter, timeout_s=5.0) for rank in range(2)
    )
    with pytest.raises(MissingRanksError) as raised:
        first.everyone({"a": "x"})
    until_s = waiter.time_s
    with pytest.raises(MissingRanksError) as received:
        second.everyone({"a": "y"})
    assert str(received.value) == str(raised.value) and waiter.time_s == until_s


def test_others_have_as_long_as_rank_0_may_take() -> None:
    for rank, time in (
        (0, "rank 1 of 2 wrote nothing .* within 5 s"),
        (1, "rank 0 of 2 did not answer .* within 10 s"),
    ):
        storage, waiter = MemoryStorage(), Pauses()
        talk = RecordTalk(storage, SAVE, rank=rank, world_size=2, waiter=waiter, timeout_s=5.0, pause_s=0.25)
        with pytest.raises(MissingRanksError, match=time):
            talk.everyone({"a": "x"})
        assert max(waiter.pauses) == 0.25 and waiter.now() >= 5 + 5 * rank


def test_what_rank_0_states_alone_is_the_answer_and_a_note_of_ones_own_keeps_nobody() -> None:
    storage = MemoryStorage()
    publish_failure(storage, SAVE, 1, SaveFailed("at the first try"))
    waiter = Pauses(lambda: first.state_alone({"a": "z"}))
    first, second = (
        RecordTalk(
            storage,
            SAVE,
            rank=rank,
            world_size=2,
            waiter=waiter,
            timeout_s=5.0,
            obstacles=partial(refuse_failed, storage, SAVE, rank),
        )
        for rank in range(2)
    )
    assert second.everyone({"a": "y"}).value("a") == "z"


def test_what_another_rank_states_alone_counts_and_it_does_not_wait() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    first, second = (
        RecordTalk(storage, SAVE, rank=rank, world_size=2, waiter=waiter, timeout_s=5.0) for rank in range(2)
    )
    second.state_alone({"a": "y"})
    assert list(first.everyone({"a": "x"}).facts["a"]) == ["x", "y"]


def test_alone_a_rank_writes_nothing() -> None:
    storage = MemoryStorage()
    talk = RecordTalk(storage, SAVE, rank=0, world_size=1, waiter=EventWaiter(storage), timeout_s=5.0)
    talk.state_alone({"a": "x"})
    assert talk.everyone({"a": "x"}).value("a") == "x" and storage.objects == {}


def test_a_rank_that_gives_up_is_seen_by_those_who_wait() -> None:
    storage = MemoryStorage()

    def body(rank: int, talk: Rounds) -> Agreed | None:
        if rank == 1:
            publish_failure(storage, SAVE, 1, SaveFailed("the disk is full"))
            return None
        return agree(talk, facts=FACTS, units=[], announce={})

    for one in over_storage(3, body, storage)[::2]:
        assert isinstance(one, CheckpointError) and str(one) == "rank 1 dropped the save: the disk is full"


def test_a_record_that_does_not_read_back_fails_the_save() -> None:
    storage = MemoryStorage()
    storage.put(f"parts/{SAVE.folder}/00001.facts-0", [b"?"])
    waiter = EventWaiter(storage)
    talk = RecordTalk(storage, SAVE, rank=0, world_size=2, waiter=waiter, timeout_s=5.0)
    with pytest.raises(SaveFailed, match=r"00001\.facts-0 does not read back"):
        talk.everyone({"a": "x"})


def test_where_there_is_nobody_to_wait_for_any_more_it_ends_at_once() -> None:
    def over() -> None:
        raise SaveFailed("before their trainers died")

    storage = MemoryStorage()
    for rank in range(2):
        waiter = EventWaiter(storage)
        talk = RecordTalk(storage, SAVE, rank=rank, world_size=2, waiter=waiter, timeout_s=5.0, obstacles=over)
        with pytest.raises(SaveFailed, match="before their trainers died"):
            talk.everyone({"a": "x"})
        assert waiter.time_s == 0.0
        storage = MemoryStorage()
