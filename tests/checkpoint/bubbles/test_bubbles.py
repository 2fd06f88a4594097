"""One object watches whatever it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.bubbles.watch import Bubbles
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.cli.explore.facts import facts_of
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.metrics import read
from tests.checkpoint.bubbles.moved import bubble_share, moved_bytes, urgent_bytes
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
    moved = {one.step: [one] for one in bubbles.gate.records()}
    assert all(bubble_share(moved[step]) == 1.0 for step in (2, 3))
    assert urgent_bytes(moved[4]) == moved_bytes(moved[4]) == moved_bytes(moved[3]) > 0


def test_a_checkpoint_records_the_waits_and_metrics_and_the_page_of_the_run_have_them(tmp_path: Path) -> None:
    bubbles, objects, run = Bubbles(), training(), LocalStorage(tmp_path / "run")
    committed: list[CheckpointInfo] = []
    how = {"capture_every": 1, "arenas": tmp_path / "arenas", "timeout_s": PATIENCE_S, "on_save": committed.append}
    with manager(run, objects, bubbles=bubbles, **how) as saver:
        saver.restore()
        for _ in range(4):
            train_step(objects)
            saver.step()
            with bubbles.idle("the test"):
                saver._saves._engine._idle()  # type: ignore[union-attr]
        saver.save()
        (waits,) = committed[-1].waits
        assert (waits.site, waits.kind) == ("the test", "bubble") and waits.median_s > 0 and 0 < waits.share <= 1
        for metric in ("site_wait_seconds", "site_captured_ratio"):  # other runs of this process may have a name
            (found,) = (one for name, one in read().items() if metric in name and name.endswith("/the test"))
            assert found > 0
    assert facts_of(run, "run", newest_steps=0)["waits"][0]["site"] == "the test"
    assert CheckpointInfo.of(read_history(run).tip).waits == committed[-1].waits  # type: ignore[arg-type]


def test_without_bubbles_no_waits_are_recorded(tmp_path: Path) -> None:
    storage, objects = MemoryStorage(), training()
    with manager(storage, objects, capture_every=1, arenas=tmp_path, timeout_s=PATIENCE_S) as saver:
        saver.restore()
        train_step(objects)
        saver.step()
        assert saver.save().waits == ()


def test_a_cpu_is_what_is_watched_unless_a_gpu_is_named() -> None:
    assert Bubbles().gate.__class__.__name__ == "BubbleGate"
    assert Bubbles(torch.device("cuda", 0)).gate.__class__.__name__ == "DeviceGate"
