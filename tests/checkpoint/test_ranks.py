"""Several ranks, as threads: who writes what, who is named, and what each gets back on another number of ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from lakeckpt.checkpoint.format.parts import PartRecord
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import list_slots, put_entry, read_log
from lakeckpt.checkpoint.restore.from_storage import load
from lakeckpt.checkpoint.state.random_states import capture_random, derive_random, restore_random
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import (
    AttemptSuperseded,
    CheckpointMismatch,
    MissingRanksError,
    SaveFailed,
    StateUnavailable,
    StorageError,
    TrackingError,
    UnsupportedValue,
)
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from lakeckpt.tracking.rounds import facts_to_bytes
from lakeckpt.tracking.tally import Tally
from tests.checkpoint.rig import (
    Counter,
    EventWaiter,
    Gone,
    HubExchange,
    MemoryStorage,
    Reader,
    changed,
    good,
    manager,
    run_ranks,
    train_step,
    training,
)
from tests.patience import PATIENCE_S

DATA = torch.linspace(-1, 1, 128).reshape(16, 8)


def rank_state(rank: int, world_size: int, *, seed: int = 0) -> dict[str, Any]:
    """Replicas, but for a buffer and a note that each rank has of its own."""
    objects = training(seed=seed)
    objects["model"][1].running_mean.fill_(float(rank))
    return objects | {"own": Counter({"rank": rank}), "reader": Reader(rank=rank, world_size=world_size)}


def save_with(storage: MemoryStorage, world_size: int, *, steps: int = 2, **options: Any) -> list[Any]:
    """Restore, train and save on ``world_size`` ranks; the objects of each."""
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        objects = rank_state(rank, world_size)
        saver = manager(storage, objects, exchange=exchange, waiter=waiter, **options)
        saver.restore()
        batches = iter(objects["reader"])
        for _ in range(steps):
            next(batches)
            saver.step()
        saver.save()
        return objects

    return good(run_ranks(world_size, body, waiters=[waiter]))


def restore_with(storage: MemoryStorage, world_size: int) -> list[Any]:
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        objects = rank_state(99, 1, seed=5)
        objects["reader"] = Reader(rank=rank, world_size=world_size)
        saver = manager(storage, objects, exchange=exchange, waiter=waiter)
        return saver.restore(), objects, saver.restore_report

    return good(run_ranks(world_size, body, waiters=[waiter]))


def parts_of(storage: MemoryStorage) -> list[PartRecord]:
    parts = [name for name in sorted(storage.objects) if name.startswith("parts/") and "register" not in name]
    return [PartRecord.from_bytes(storage.objects[name]) for name in parts]


def test_replicas_are_written_once_and_spread_and_what_differs_is_written_by_each() -> None:
    storage = MemoryStorage()
    objects = save_with(storage, 4)
    parts = parts_of(storage)
    keys = [one.spec.key for part in parts for one in part.tensors]
    assert keys.count("model/1.running_mean") == 4
    assert all(keys.count(key) == 1 for key in set(keys) - {"model/1.running_mean"})
    sizes = [sum(one.spec.size_bytes for one in part.tensors) for part in parts]
    total = sum(value.nbytes for value in objects[0]["model"].state_dict().values())
    assert sum(sizes) == total + 3 * 32
    shared = [[len(tree.document) for tree in part.trees if tree.item != "lakeckpt.random"] for part in parts]
    loads = [size + sum(trees) for size, trees in zip(sizes, shared, strict=True)]
    assert max(loads) - min(loads) <= max(256, *(size for trees in shared for size in trees))
    notes = [tree for part in parts for tree in part.trees if tree.item == "own"]
    assert [tree.ranks for tree in notes] == [((rank, rank + 1),) for rank in range(4)]


def test_contents_that_some_ranks_share_are_written_once_for_these() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> None:
        objects = {"own": Counter(torch.full((3,), float(rank // 2))), "one": Counter(torch.ones(5))}
        saver = manager(storage, objects, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(4, body))
    tensors = [one for part in parts_of(storage) for one in part.tensors]
    assert sorted(one.ranks for one in tensors if one.spec.key.startswith("own")) == [((0, 2),), ((2, 4),)]
    assert [one.ranks for one in tensors if one.spec.key.startswith("one")] == [((0, 4),)]
    for rank, (steps, value) in enumerate(restored_values(storage, 4)):
        assert steps == 0 and value.tolist() == [float(rank // 2)] * 3


def restored_values(storage: MemoryStorage, world_size: int) -> list[Any]:
    def body(rank: int, exchange: HubExchange) -> Any:
        objects = {"own": Counter(), "one": Counter()}
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        return saver.restore(), objects["own"].value

    return good(run_ranks(world_size, body))


def test_every_rank_gets_back_what_was_its_own() -> None:
    storage = MemoryStorage()
    saved = save_with(storage, 3)
    for rank, (steps, objects, report) in enumerate(restore_with(storage, 3)):
        assert steps == 2 and objects["own"].value == {"rank": rank}
        assert objects["model"][1].running_mean.tolist() == [float(rank)] * 8
        assert torch.equal(objects["model"][0].weight, saved[0]["model"][0].weight)
        assert objects["reader"].state_dict()["step"] == 2
        assert report.per_rank == ("tensor:model/1.running_mean", "tree:own")


@pytest.mark.parametrize("sizes", [(2, 1, 3), (3, 2, 1), (1, 4, 2)])
def test_a_chain_of_world_sizes_keeps_the_model_and_consumes_every_row_once(sizes: tuple[int, ...]) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    weight = None
    for world_size in sizes:

        def body(rank: int, exchange: HubExchange, world_size: int = world_size) -> Any:
            objects = rank_state(rank, world_size, seed=rank + world_size)
            if rank:
                objects["model"].load_state_dict(training(seed=world_size)["model"].state_dict())
            reader = objects["reader"]
            saver = manager(storage, objects, exchange=exchange, waiter=waiter, persist_every=3)
            saver.restore()
            first = objects["model"][0].weight.detach().clone()
            for at, _ in enumerate(iter(reader)):
                saver.step()
                if at == 7:
                    break
            saver.save()
            return first, objects["model"][0].weight.detach().clone()

        found = good(run_ranks(world_size, body, waiters=[waiter]))
        assert weight is None or all(torch.equal(first, weight) for first, _ in found)
        weight = found[0][1]
    history = read_history(storage)
    rows = [one.readers["reader"].consumed().get(0, Intervals.empty()) for one in history.chain]
    union = Intervals.empty().union(*rows)
    assert union.size == sum(one.size for one in rows) == sum(80 * world_size for world_size in sizes)
    assert {one.step: one.world_size for one in history.chain if one.step % 8 == 0} == dict(
        zip((8, 16, 24), sizes, strict=True)
    )


def test_new_ranks_get_random_states_from_seed_step_and_rank() -> None:
    """Threads share their generators, so that each rank loads alone here."""
    storage = MemoryStorage()
    save_with(storage, 2)
    seed = read_history(storage).tip.seed

    def draws(rank: int) -> tuple[float, ...]:
        manifest = read_history(storage).tip
        loaded = load(storage, manifest, rank=rank, world_size=4)
        before = capture_random()
        try:
            if loaded.random is None:
                derive_random(seed, manifest.step, rank)
            else:
                restore_random(loaded.random)
            return random.random(), float(np.random.rand()), torch.rand(1).item()
        finally:
            restore_random(before)

    first, again = [draws(rank) for rank in range(4)], [draws(rank) for rank in range(4)]
    assert first == again and len(set(first[2:])) == 2 and first[2] != first[0]


def test_a_rank_whose_reader_disagrees_is_named_and_nothing_is_committed() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        objects = rank_state(rank, 3)
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        next(iter(objects["reader"]))
        objects["reader"].lie = 5 if rank == 1 else 0
        saver.step()
        saver.save()

    results = run_ranks(3, body)
    assert all(isinstance(result, TrackingError) for result in results)
    assert all("state of reader 'reader'" in str(result) and "on rank 1" in str(result) for result in results)
    assert not any(name.startswith("objects/") for name in storage.objects)


def test_what_differs_between_the_readers_of_ranks_is_named_with_both_values() -> None:
    """Rank 1 reads in another order, and rank 2 has read further: no digest tells a user which."""
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        reader = Reader(rank=rank, world_size=3, seed=4 if rank == 1 else 3)
        saver = manager(storage, {"reader": reader}, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        batches = iter(reader)
        for _ in range(2 if rank == 2 else 1):
            next(batches)
        saver.step()
        saver.save()

    for result in run_ranks(3, body):
        assert isinstance(result, TrackingError)
        assert "state of reader 'reader', 'identity'/'spec'/'seed': 3 on ranks 0, 2; 4 on rank 1" in str(result)
        assert "state of reader 'reader', 'step': 1 on ranks 0-1; 2 on rank 2" in str(result)


def test_a_rank_that_is_a_step_behind_is_named() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"n": Counter()}, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        for _ in range(3 - (rank == 2)):
            saver.step()
        saver.save()

    results = run_ranks(3, body)
    assert all("optimizer step: 3 on ranks 0-1; 2 on rank 2" in str(result) for result in results)


def test_a_rank_that_dies_before_the_cut_is_named_to_all() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"n": Counter()}, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        saver.step()
        if rank == 1:
            raise Gone
        saver.save()

    results = run_ranks(3, body)
    assert [type(one) for one in results] == [SaveFailed, type(None), SaveFailed]
    assert "[1] is gone" in str(results[0])


def test_a_rank_that_dies_while_it_writes_is_named_within_the_deadline() -> None:
    storage = MemoryStorage()
    waiters = [EventWaiter(storage) for _ in range(3)]  # a rank that waits moves no other's clock

    def body(rank: int, exchange: HubExchange) -> Any:
        def die(call: str, path: str) -> None:
            if rank == 2 and call == "put":
                with storage.changed:  # when the others have delivered
                    assert storage.changed.wait_for(lambda: len(parts_of(storage)) == 2, PATIENCE_S)
                raise Gone

        mine = FaultyStorage(storage, before=die)
        objects = {"own": Counter(torch.full((4,), float(rank)))}
        saver = manager(mine, objects, exchange=exchange, waiter=waiters[rank], timeout_s=30.0)
        saver.restore()
        saver.step()
        saver.save()

    results = run_ranks(3, body, waiters=waiters)
    assert all(isinstance(one, SaveFailed | SaveFailed) for one in results[:2])
    assert "rank 2 of 3 did not publish a part within 30 s" in str(results[0])
    assert 30 <= waiters[0].time_s < 130
    assert read_history(storage).tip is None


def test_a_committer_that_dies_is_noticed_by_the_others() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        def die(call: str, path: str) -> None:
            if rank == 0 and call == "put_new" and path.endswith("01.lkc"):
                raise Gone

        saver = manager(
            FaultyStorage(storage, before=die), {"n": Counter()}, exchange=exchange, waiter=waiter, timeout_s=30.0
        )
        saver.restore()
        saver.save()

    results = run_ranks(3, body, waiters=[waiter])
    assert all(isinstance(one, SaveFailed) and "rank 0 did not commit" in str(one) for one in results[1:])


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_the_next_one_succeeds() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        faults = {("put", 1): StoreFault.ERROR} if rank == 1 else {}
        mine = FaultyStorage(storage, fail_at=faults)
        saver = manager(mine, {"own": Counter(torch.full((4,), float(rank)))}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.step()
        failed = None
        try:
            saver.save()
        except SaveFailed as error:
            failed = str(error)
        saver.step()
        return failed, saver.save().step

    results = good(run_ranks(3, body, waiters=[waiter]))
    assert all("rank 1 " in failed and step == 2 for failed, step in results)


def test_a_committer_that_cannot_commit_fails_the_save_on_all() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        faults = {("put_new", n): StoreFault.ERROR for n in (2, 3, 4)} if rank == 0 else {}
        mine = FaultyStorage(storage, fail_at=faults)
        saver = manager(mine, {"n": Counter()}, exchange=exchange, waiter=waiter, persist_every=1)
        saver.restore()
        try:
            saver.save()
        except SaveFailed as error:
            return str(error), saver.save().step
        return None

    results = good(run_ranks(2, body, waiters=[waiter]))
    assert all("could not be put" in text and step == 0 for text, step in results)


def test_a_state_that_one_rank_cannot_write_fails_on_all_by_name() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> Any:
        objects = {"n": Counter(print if rank == 1 else 0)}
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        saver.save()

    results = run_ranks(2, body)
    assert isinstance(results[0], UnsupportedValue) and "failure of rank 1: n.value" in str(results[0])
    assert isinstance(results[1], UnsupportedValue)


def test_damage_that_one_rank_sees_is_agreed_on() -> None:
    """Only rank 1 reads the damaged file: all take the checkpoint before."""
    storage = MemoryStorage()
    save_with(storage, 2, steps=2)
    first = set(storage.objects)
    save_again(storage, 2)
    mine = [part for part in parts_of(storage) if part.rank == 1][-1]
    own = next(one for one in mine.tensors if one.spec.key == "model/1.running_mean")
    path = mine.files[own.slabs[0].file].path
    assert path not in first
    storage.objects[path] = storage.objects[path][:-1]
    with pytest.warns(UserWarning, match="on rank|not whole"):
        results = restore_with(storage, 2)
    assert [steps for steps, _, _ in results] == [2, 2]
    assert all(len(report.damaged) == 1 for _, _, report in results)


def save_again(storage: MemoryStorage, world_size: int) -> None:
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> None:
        objects = rank_state(rank, world_size)
        saver = manager(storage, objects, exchange=exchange, waiter=waiter)
        saver.restore()
        objects["model"][0].weight.data.add_(1)  # most of what a rank wrote: its new file refers to no earlier one
        objects["model"][1].running_mean.add_(1)
        saver.step()
        saver.save()

    good(run_ranks(world_size, body, waiters=[waiter]))


def test_damage_of_what_no_rank_needs_stops_no_restore_and_verify_names_it() -> None:
    """From 3 ranks to 1: the buffers of ranks 1 and 2 are read by nobody."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"own": Counter(torch.full((4,), float(rank)))}, exchange=exchange, waiter=waiter)
        saver.restore()
        for _ in range(2):
            saver.step()
            saver.save()

    good(run_ranks(3, body, waiters=[waiter]))
    last = sorted(name for name in storage.objects if name.startswith("objects/"))[-1]
    assert "/00002-" in last
    storage.objects[last] = changed(storage.objects[last])
    own = Counter()
    assert manager(storage, {"own": own}).restore() == 2
    assert own.value.tolist() == [0.0] * 4
    assert [one.path for one in verify(storage).every_damage] == [last]


def test_a_misfit_on_one_rank_stops_all_and_changes_none() -> None:
    storage = MemoryStorage()
    save_with(storage, 2)
    slots = len([name for name in storage.objects if name.startswith("log/")])
    before = [7.0, 7.0]

    def body(rank: int, exchange: HubExchange) -> Any:
        objects = rank_state(rank, 2, seed=5)
        if rank == 1:
            objects["model"][2] = torch.nn.Linear(8, 2)
        objects["own"].value = 7.0
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        try:
            saver.restore()
        except CheckpointMismatch as error:
            return objects["own"].value, str(error)

    results = good(run_ranks(2, body))
    assert [value for value, _ in results] == before
    assert all("2.weight is float32 [1, 8]" in text for _, text in results)
    assert len([name for name in storage.objects if name.startswith("log/")]) == slots


def test_an_object_that_refuses_on_one_rank_goes_back_on_the_others() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    class Stubborn(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    def save(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"n": Counter(1)}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(2, save, waiters=[waiter]))

    def body(rank: int, exchange: HubExchange) -> Any:
        one = (Stubborn if rank == 1 else Counter)(5)
        try:
            manager(storage, {"n": one}, exchange=exchange, waiter=waiter).restore()
        except CheckpointMismatch as error:
            return one.value, str(error)

    results = good(run_ranks(2, body))
    assert [value for value, _ in results] == [5, 5]
    assert "rank 1" in results[0][1] and "'n' refused" in results[1][1]


def test_a_state_divided_over_ranks_needs_as_many_ranks() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def save(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"n": Counter({f"shard{rank}": torch.ones(1)})}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(2, save, waiters=[waiter]))
    with pytest.raises(CheckpointMismatch, match="Restart with 2 ranks"):
        manager(storage, {"n": Counter()}).restore()

    def again(rank: int, exchange: HubExchange) -> Any:
        one = Counter()
        manager(storage, {"n": one}, exchange=exchange, waiter=waiter).restore()
        return list(one.value)

    assert good(run_ranks(2, again)) == [["shard0"], ["shard1"]]


def test_a_store_that_fails_on_one_rank_fails_the_restore_on_all_without_falling_back() -> None:
    storage = MemoryStorage()
    save_with(storage, 2)

    def body(rank: int, exchange: HubExchange) -> Any:
        def fail(method: str, path: str) -> None:
            if rank == 1 and method == "read" and path.startswith("parts/") and "register" not in path:
                raise StorageError(110, "timed out")

        objects = rank_state(rank, 2)
        manager(FaultyStorage(storage, before=fail), objects, exchange=exchange, waiter=EventWaiter(storage)).restore()

    results = run_ranks(2, body)
    assert all(isinstance(one, StorageError) and "timed out" in str(one) for one in results)


def test_a_zombie_of_several_ranks_is_stopped_on_every_rank() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        saver = manager(storage, {"n": Counter()}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()
        if rank == 0:
            take_over(storage)
        saver.step()
        saver.save()

    results = run_ranks(3, body, waiters=[waiter])
    assert all(isinstance(one, AttemptSuperseded) for one in results)


def take_over(storage: MemoryStorage) -> None:
    """Another job's attempt begins."""
    begin = read_log(storage).begins[0]
    put_entry(storage, replace(begin, slot=list_slots(storage)[-1] + 1, write_id="another"))


def test_saves_by_the_clock_fall_on_the_same_step_of_every_rank() -> None:
    storage = MemoryStorage()

    class Clock(EventWaiter):
        def now(self) -> float:
            if self.rank == 0:
                self.time_s += 1.0
            return self.time_s

    def body(rank: int, exchange: HubExchange) -> Any:
        waiter = Clock(storage)
        waiter.rank = rank
        saver = manager(storage, {"n": Counter()}, persist_every=timedelta(seconds=5), exchange=exchange, waiter=waiter)
        saver.restore()
        saved = []
        for step in range(1, 40):
            saver.step()
            info = saver.wait()
            saved += [step] if info is not None and info.step == step else []
        return saved

    results = good(run_ranks(3, body))
    assert results[0] == results[1] == results[2] and len(results[0]) > 3


def test_ranks_that_agree_exchange_one_small_message_per_save() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    messages: list[int] = []

    class Counting(HubExchange):
        def everyone(self, facts: Mapping[str, str]) -> Tally:
            messages.append(len(facts_to_bytes(facts)))
            return super().everyone(facts)

    def body(rank: int, exchange: HubExchange) -> None:
        exchange.__class__ = Counting
        saver = manager(storage, training() | {"n": Counter()}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.step()
        messages.clear() if rank == 0 else None
        exchange.everyone({})
        saver.save()

    good(run_ranks(2, body, waiters=[waiter]))
    assert max(messages) < 1000


def test_a_restore_that_misses_a_rank_says_so() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        if rank == 1:
            raise Gone
        manager(storage, {"n": Counter()}, exchange=exchange, waiter=EventWaiter(storage)).restore()

    assert isinstance(run_ranks(2, body)[0], MissingRanksError)


def test_training_on_the_restored_ranks_goes_on_bit_by_bit() -> None:
    storage = MemoryStorage()
    saved = save_with(storage, 2)
    found = restore_with(storage, 2)
    for rank in range(2):
        assert train_step(saved[rank], DATA) == train_step(found[rank][1], DATA)
        for one, other in zip(saved[rank]["model"].parameters(), found[rank][1]["model"].parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_reader_that_cannot_tell_its_place_on_one_rank_fails_the_save_on_all() -> None:
    storage = MemoryStorage()

    class Lost(Reader):
        def state_dict(self, at: Any = None) -> dict[str, Any]:
            if self.last_receipt is not None and self.rank == 1:
                raise StateUnavailable("forgotten")
            return super().state_dict(at)

    def body(rank: int, exchange: HubExchange) -> None:
        reader = Lost(rank=rank, world_size=2)
        saver = manager(storage, {"reader": reader}, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        next(iter(reader))
        saver.step()
        saver.save()

    results = run_ranks(2, body)
    assert isinstance(results[0], StateUnavailable) and "failure of rank 1: forgotten" in str(results[0])
    assert isinstance(results[1], StateUnavailable)


def test_ranks_that_track_other_readers_are_named_and_nothing_is_committed() -> None:
    """Such as a loader for validation, on rank 0 alone: what is saved of it could not be restored by the others."""
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        objects = rank_state(rank, 3) | ({} if rank else {"val": Reader()})
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        next(iter(objects["reader"]))
        saver.step()
        saver.save()

    for result in run_ranks(3, body):
        assert isinstance(result, TrackingError)
        assert "tracked readers: 'reader' on ranks 1-2; 'reader', 'val' on rank 0" in str(result)
    assert read_history(storage).chain == ()
