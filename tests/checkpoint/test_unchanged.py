"""What did not change is written once: the next checkpoints refer to it, and it stays as long as one of them does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import FileRecord, PartRecord, SaveId
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist import persist
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.unchanged import Earlier
from lakeckpt.errors import DamageWarning, SaveFailed
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from tests.checkpoint.rig import Counter, EventWaiter, MemoryStorage, good, manager, record_of, run_ranks

BIG = 4096


def state(step: float, *, frozen: float = 7.0) -> dict[str, Any]:
    return {"frozen": torch.full((BIG,), frozen), "live": torch.full((BIG,), step)}


def files(storage: MemoryStorage) -> dict[str, int]:
    return {path: len(data) for path, data in storage.objects.items() if path.startswith("objects/")}


def written(storage: MemoryStorage, before: dict[str, int]) -> int:
    return sum(size for path, size in files(storage).items() if path not in before)


def run(storage: Any, steps: int, *, keep: int = 1, frozen: float = 7.0) -> list[int]:
    """Save so many steps, of which one tensor changes at each; the bytes of tensors that each save wrote."""
    counter = Counter()
    saver = manager(storage, {"n": counter}, keep=keep)
    counter.value = state(0.0)
    begin = saver.restore()
    sizes = []
    for step in range(begin + 1, begin + steps + 1):
        counter.value = state(float(step), frozen=frozen)
        saver.step()
        before = files(storage)
        saver.save()
        sizes.append(written(storage, before))
    return sizes


def restored(storage: Any) -> dict[str, Any]:
    counter = Counter(state(0.0, frozen=0.0))
    manager(storage, {"n": counter}).restore()
    return counter.value


def test_a_tensor_that_does_not_change_is_written_no_more_once_it_has_files_of_its_own() -> None:
    storage = MemoryStorage()
    first, second, *others = run(storage, 6)
    assert min(first, second) > 2 * 4 * BIG and all(4 * BIG < size < 1.2 * 4 * BIG for size in others)
    assert restored(storage)["frozen"].tolist() == [7.0] * BIG
    assert restored(storage)["live"].tolist() == [6.0] * BIG
    assert verify(storage).every_damage == ()


def test_what_changes_again_is_written_again_and_the_old_content_goes() -> None:
    storage = MemoryStorage()
    run(storage, 3)
    run(storage, 2, frozen=8.0)
    assert restored(storage)["frozen"].tolist() == [8.0] * BIG
    assert sum(files(storage).values()) < 2.2 * 4 * BIG


def test_a_new_attempt_refers_to_what_it_restored() -> None:
    storage = MemoryStorage()
    run(storage, 3)
    (size,) = run(storage, 1)
    assert 4 * BIG < size < 1.2 * 4 * BIG and restored(storage)["frozen"].tolist() == [7.0] * BIG


@pytest.mark.parametrize("keep", [1, 3])
def test_every_kept_checkpoint_is_whole_whatever_it_refers_to(keep: int) -> None:
    storage = MemoryStorage()
    for _ in range(3):
        run(storage, 3, keep=keep)
        statuses = [one.status for one in verify(storage).checkpoints]
        assert statuses[-keep:] == ["intact"] * keep and set(statuses[:-keep]) <= {"removed"}
    for _ in range(keep - 1):  # each of them alone: the newer ones are damaged
        newest = read_history(storage).tip
        storage.delete(newest.save.part_path(0))
        with pytest.warns(DamageWarning):
            assert restored(storage)["live"][0] == newest.step - 1
        break


def test_damage_in_a_file_that_is_referred_to_is_damage_of_all_that_need_it() -> None:
    storage = MemoryStorage()
    run(storage, 4, keep=2)
    old = min(files(storage))
    data = bytearray(storage.objects[old])
    data[-5] ^= 1
    storage.objects[old] = bytes(data)
    assert [one.status for one in verify(storage).checkpoints][-2:] == ["damaged"] * 2
    for end in (data[:-1], data + b"x"):
        data[-5] ^= 1
        storage.objects[old] = bytes(end)
        assert verify(storage).exit_status == 1


def test_after_a_failed_save_nothing_refers_to_what_was_never_committed() -> None:
    inner = MemoryStorage()
    counter = Counter(state(0.0))
    saver = manager(
        FaultyStorage(inner, fail_at={("put_new", n): StoreFault.ERROR for n in range(3, 6)}), {"n": counter}
    )
    saver.restore()
    for step in range(1, 5):
        counter.value = state(float(step))
        saver.step()
        if step == 2:
            with pytest.raises(SaveFailed):
                saver.save()
        else:
            saver.save()
    assert verify(inner).every_damage == () and restored(inner)["live"][0] == 4


def test_a_rank_that_did_not_hear_of_a_commit_refers_to_nothing_that_is_gone() -> None:
    storage = MemoryStorage()

    class Deaf:
        """The storage, without the log while ``deaf``."""

        deaf = False
        name, list, put, put_new, delete = storage.name, storage.list, storage.put, storage.put_new, storage.delete

        def read(self, path: str, *args: Any, **options: Any) -> bytes:
            return storage.read(f"{path}.unheard" if self.deaf and path.startswith("log/") else path, *args, **options)

    def body(rank: int, exchange: Any) -> None:
        place = Deaf() if rank else storage
        waiter = EventWaiter(storage)
        counter = Counter()
        saver = manager(place, {"n": counter}, keep=1, exchange=exchange, waiter=waiter, timeout_s=5)
        saver.restore()
        for step in range(1, 6):
            value = state(float(step))
            value["own"] = torch.full((4 * BIG,), float(rank))  # of this rank alone, and unchanged
            counter.value = value
            saver.step()
            if rank and step == 3:
                place.deaf = True
                waiter.died()
                with pytest.raises(SaveFailed):
                    saver.save()
                place.deaf, waiter.someone_died = False, False
            else:
                saver.save()

    good(run_ranks(2, body))
    assert verify(storage).every_damage == () and read_history(storage).tip.step == 5


def test_files_of_an_old_world_stay_while_a_new_one_refers_to_them_and_every_rank_gets_its_own() -> None:
    """4 ranks, then 2, 3 and 1: tensors of all ranks, of one rank alone, changed and unchanged."""
    storage, kept = MemoryStorage(), 2

    def body(rank: int, exchange: Any) -> list[str]:
        own, all_ = Counter(), Counter()
        objects = {"own": own, "all": all_}
        saver = manager(storage, objects, keep=kept, exchange=exchange, waiter=EventWaiter(storage), timeout_s=5)
        first = saver.restore()
        if first:
            old = rank % world_before
            assert own.value["born"].tolist() == born[old] and own.value["live"][0] == 100 * old + first
            assert all_.value["live"][0] == first and all_.value["still"].tolist() == [7.0] * BIG
        else:
            own.value = {"born": torch.full((BIG,), float(rank))}
        mine = own.value["born"]
        for step in range(first + 1, first + 4):
            own.value = {"born": mine, "live": torch.full((BIG,), 100.0 * rank + step)}
            all_.value = {"still": torch.full((BIG,), 7.0), "live": torch.full((BIG,), float(step))}
            saver.step()
            saver.save()
            exchange.everyone({})  # retention has run
            if rank == 0:
                statuses = [one.status for one in verify(storage).checkpoints]
                assert statuses[-kept:] == ["intact"] * min(kept, len(statuses))
                assert set(statuses[:-kept]) <= {"removed"}
            exchange.everyone({})
        return list(mine.tolist())

    world_before, born = 0, {}
    for world_size in (4, 2, 3, 1):
        found = good(run_ranks(world_size, body))
        world_before, born = world_size, dict(enumerate(found))
    assert sum(files(storage).values()) < 2 * 2 * 4 * 4 * BIG * 1.2


def part_of(*sizes: int) -> PartRecord:
    save = SaveId(attempt=0, step=1, number=0)
    digest = bytes(16)
    file = FileRecord(path=save.object_path(0, 0, digest), size_bytes=sum(sizes), head_bytes=8, head_digest=digest)
    tensors = tuple(
        record_of(TensorSpec(key=str(n), dtype="uint8", shape=(size,)), digest, ((0, 1),))
        for n, size in enumerate(sizes)
    )
    return PartRecord(run="r", save=save, rank=0, world_size=1, cut=b"c", files=(file,), tensors=tensors, trees=())


def test_a_file_is_referred_to_while_half_of_it_is_needed() -> None:
    part = part_of(50, 30, 20)
    wanted = [(one.spec, one.digest) for one in part.tensors]
    earlier = Earlier.of(part)
    assert set(earlier.found(wanted[:1])) == set(wanted[:1])
    assert set(earlier.found(wanted[1:])) == set(wanted[1:])
    assert earlier.found(wanted[1:2]) == {} == earlier.found([(wanted[0][0], b"x" * 16)])


def test_only_the_tensors_that_are_needed_of_an_earlier_file_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "FILE_BYTES", 10**9)
    storage = MemoryStorage()
    counter = Counter()
    saver = manager(storage, {"n": counter}, keep=5)
    saver.restore()
    for step in (1.0, 2.0):
        counter.value = {"a": torch.full((BIG,), step), "b": torch.full((2 * BIG,), 7.0)}
        saver.step()
        saver.save()
    (old,) = (path for path in files(storage) if "000000000001-" in path)
    reads: list[int] = []
    read = MemoryStorage.read

    def counted(self: MemoryStorage, path: str, start: int = 0, stop: int | None = None, **options: Any) -> bytes:
        data = read(self, path, start, stop, **options)
        reads.append(len(data) if path == old else 0)
        return data

    monkeypatch.setattr(MemoryStorage, "read", counted)
    other = Counter({"a": torch.zeros(BIG), "b": torch.zeros(2 * BIG)})
    manager(storage, {"n": other}).restore()
    assert other.value["a"][0] == 2.0 and other.value["b"].tolist() == [7.0] * 2 * BIG
    assert 8 * BIG <= sum(reads) < 10 * BIG
