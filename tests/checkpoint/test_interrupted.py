"""A save that was interrupted, or whose objects went missing, neither damages a checkpoint nor ends saving."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.errors import SaveFailed, StorageError
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks


class Alarm(Exception):
    pass


class Interrupting(MemoryStorage):
    """``error`` comes from a signal right after an entry of the log was put."""

    error: type[BaseException] | None = None

    def put_new(self, path: str, data: Any) -> Any:
        found = super().put_new(path, data)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return found


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
def test_a_commit_that_was_interrupted_is_there_and_the_next_save_knows(error: type[BaseException]) -> None:
    storage, counter = Interrupting(), Counter(torch.zeros(100))
    saver = manager(storage, {"n": counter}, keep=3)
    saver.restore()
    for value in (1.0, 2.0):
        counter.value = torch.full((100,), value)
        saver.step()
        if value == 2.0:
            storage.error = error
            with pytest.raises(error):
                saver.save()
        else:
            saver.save()
    assert [(one.step, one.status) for one in verify(storage).checkpoints] == [(1, "intact"), (2, "intact")]
    saver.save()
    found = verify(storage)
    assert {(one.step, one.status) for one in found.checkpoints} == {(1, "intact"), (2, "intact")}
    assert not found.every_damage


def test_an_object_that_went_missing_fails_one_save_and_is_written_anew() -> None:
    storage, counter = MemoryStorage(), Counter()
    saver = manager(storage, {"n": counter}, keep=2)
    counter.value = {"frozen": torch.full((4096,), 7.0), "live": torch.zeros(4096)}
    saver.restore()
    for step in range(1, 4):
        counter.value = {"frozen": torch.full((4096,), 7.0), "live": torch.full((4096,), float(step))}
        saver.step()
        saver.save()
    del storage.objects[min(path for path in storage.objects if path.startswith("objects/"))]
    saver.step()
    with pytest.raises(SaveFailed, match="lists"):
        saver.save()
    saver.step()
    assert saver.save().step == 5


class Flaky:
    """Refuses one look at the log."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage, self.refuses = storage, False
        self.name, self.list, self.put, self.put_new, self.delete = (
            storage.name,
            storage.list,
            storage.put,
            storage.put_new,
            storage.delete,
        )

    def read(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.refuses and path.startswith("log/"):
            self.refuses = False
            raise StorageError("503 slow down")
        return self._storage.read(path, *arguments, **options)


def test_a_rank_that_cannot_look_once_whether_rank_0_committed_looks_again() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> list[int]:
        place: Any = Flaky(storage) if rank else storage
        counter = Counter(torch.zeros(10))
        waiter = EventWaiter(storage)
        saver = manager(place, {"n": counter}, exchange=exchange, waiter=waiter, timeout_s=5, persist_every=1)
        saver.restore()
        found = []
        for step in (1, 2):
            counter.value = torch.full((10,), float(step))
            if rank and step == 2:
                place.refuses = True
            saver.step()
            info = saver.wait()
            assert info is not None
            found.append(info.step)
        return found

    assert good(run_ranks(2, body)) == [[1, 2], [1, 2]]
