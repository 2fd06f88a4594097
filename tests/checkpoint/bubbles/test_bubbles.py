"""One object watches whatever it is given."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.bubbles import watch
from lakeckpt.checkpoint.bubbles.profile import BUBBLES, ProfileKeeper, read_profiles, shares
from lakeckpt.checkpoint.bubbles.watch import Bubbles
from lakeckpt.errors import ConfigError, SaveWarning, StorageError
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.tracking.exchange import Exchange
from tests.checkpoint.rig import MemoryStorage, manager, train_step, training
from tests.patience import PATIENCE_S


class Loader:
    """A loader with something of its own."""

    epoch = 3

    def __init__(self) -> None:
        self.batches = [1, 2]

    def __iter__(self) -> object:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_a_loader_that_is_watched_is_the_same_in_all_else() -> None:
    bubbles = Bubbles()
    loader = bubbles.watch(Loader())
    bubbles.gate.cut(0)
    assert (list(loader), list(loader), len(loader), loader.epoch) == ([1, 2], [1, 2], 2, 3)
    bubbles.gate.cut(1)
    assert len(bubbles.gate.records()[0].windows) == 6


def test_whatever_else_a_rank_waits_for_can_be_told() -> None:
    bubbles = Bubbles()
    bubbles.gate.cut(0)
    with bubbles.idle("a lock"):
        pass
    bubbles.gate.cut(1)
    assert [one.site for one in bubbles.gate.records()[0].windows] == ["a lock 0"]


@pytest.mark.parametrize("what", [7, nn.Linear(2, 2)])
def test_what_cannot_be_watched_is_refused(what: object) -> None:
    with pytest.raises(ConfigError, match=r"report its waits with idle\(\)|Report its waits with idle\(\)"):
        Bubbles().watch(what)


def test_the_last_iterations_are_saved_beside_a_run(tmp_path: Path) -> None:
    bubbles = Bubbles()
    for step in range(3):
        bubbles.gate.cut(step)
    storage = open_storage(tmp_path)
    bubbles.kept(storage, attempt=1, exchange=Exchange()).end()
    (profile,) = read_profiles(storage)
    assert [one.step for one in profile.records] == [0, 1]


def test_captures_of_a_manager_move_while_the_rank_is_idle(tmp_path: Path) -> None:
    bubbles, objects, storage = Bubbles(), training(), MemoryStorage()
    with manager(storage, objects, capture_every=1, arenas=tmp_path, bubbles=bubbles, timeout_s=PATIENCE_S) as saver:
        saver.restore()
        train_step(objects)
        saver.step()
        saver.save()  # the arena is made
        for _ in range(2):
            train_step(objects)
            saver.step()
            with bubbles.idle("the test"):
                saver._saves._engine._idle()  # type: ignore[union-attr]
        train_step(objects)
        saver.step()
        train_step(objects)  # nothing is idle: all moves at the fence
        saver.step()
    (profile,) = read_profiles(storage)
    moved = {one.step: one for one in profile.records}
    assert all(shares([moved[step]]).bubble_share == 1.0 for step in (2, 3))
    assert shares([moved[4]]).urgent_bytes == shares([moved[4]]).moved_bytes == shares([moved[3]]).moved_bytes > 0


def test_a_profile_that_cannot_be_written_does_not_end_a_job() -> None:
    class Full(MemoryStorage):
        def put(self, path: str, chunks: Any) -> int:
            if path.startswith(BUBBLES):
                raise StorageError("no more")
            return super().put(path, chunks)

    saver = manager(Full(), training(), bubbles=Bubbles())
    saver.restore()
    with pytest.warns(SaveWarning, match="no more"):
        saver.close()


def test_what_a_run_that_goes_on_was_like_is_written_again_and_again_until_it_ends() -> None:
    written: list[int] = []
    thrice = threading.Event()

    def write() -> None:
        written.append(threading.get_ident())
        if len(written) == 2:
            raise StorageError("this time it cannot be")
        if len(written) == 3:
            thrice.set()

    keeper = ProfileKeeper(write, "rank 0", every_s=0.0)
    keeper.begin()
    assert thrice.wait(PATIENCE_S)
    keeper.end()
    assert written[-1] == threading.get_ident() and written[0] != written[-1]
    assert not keeper._thread.is_alive()


def test_a_profile_of_a_run_that_was_not_closed_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ProfileKeeper", partial(ProfileKeeper, every_s=0.0))
    bubbles, storage = Bubbles(), MemoryStorage()
    saver = manager(storage, training(), bubbles=bubbles)
    saver.restore()
    with storage.changed:
        assert storage.changed.wait_for(lambda: any(path.startswith(BUBBLES) for path in storage.objects), PATIENCE_S)
    saver.close()


def test_a_cpu_is_what_is_watched_unless_a_gpu_is_named() -> None:
    assert Bubbles().gate.__class__.__name__ == "BubbleGate"
    assert Bubbles(torch.device("cuda", 0)).gate.__class__.__name__ == "DeviceGate"
