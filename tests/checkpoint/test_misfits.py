"""What cannot be right is refused before anything is done: wrong arguments, ties that would merge two values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader
from lakeckpt.checkpoint.ledger import index_path
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.errors import CheckpointMismatch, ConfigError, StorageError
from lakeckpt.lake.local import LocalStorage
from lakeckpt.testing import LakeSpec
from tests.checkpoint.rig import Counter, MemoryStorage, manager


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.nn.Linear(1, 1)], "mapping of names to objects, .* got list"),
        (None, "mapping of names to objects, .* got NoneType"),
        ({"n": 5}, "'n' is a int without state_dict"),
        ({"a/b": Counter()}, "without '/'"),
    ],
)
def test_a_state_that_is_no_mapping_of_objects_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(MemoryStorage(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep is"),
        ({"keep": True}, "keep is"),
        ({"verify": True}, "verify is"),
        ({"on_save_failure": "ignore"}, "on_save_failure is"),
        ({"timeout_s": 0}, "timeout_s is"),
        ({"timeout_s": "5"}, "timeout_s is"),
        ({"timeout_s": float("nan")}, "timeout_s is"),
        ({"persist_every": "5"}, "positive int"),
        ({"policy": 5}, "policy is an object with"),
        ({"policy": 5, "persist_every": 5}, "not two"),
    ],
)
def test_settings_that_cannot_be_are_refused_each_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(MemoryStorage(), {"n": Counter()}, **options)


@pytest.mark.parametrize("place", [None, 5, b"run"])
def test_a_place_that_is_none_is_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match="a run lies at a folder, a URL or in a Storage"):
        CheckpointManager(place, {"n": Counter()})


@pytest.fixture
def loader(tmp_path: Path) -> LakeLoader:
    return LakeLoader(LakeDataset(LakeSpec(files=((6,),)).write(tmp_path / "lake"), batch_size=2))


@pytest.mark.parametrize("consumed", [5, "reader", [1], {"reader": 5}])
def test_what_is_no_receipt_is_refused_at_the_cut(loader: LakeLoader, consumed: Any) -> None:
    saver = manager(MemoryStorage(), {"reader": loader})
    saver.restore()
    next(iter(loader))
    with pytest.raises(ConfigError, match="is a batch's receipt, or names readers"):
        saver.step(consumed=consumed)
    assert saver.steps_done == 0


class Pair(torch.nn.Module):
    def __init__(self, first: float, second: float | None) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((3,), first))
        self.second = self.first if second is None else torch.nn.Parameter(torch.full((3,), second))


def test_two_values_do_not_merge_into_weights_that_are_tied_now() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"model": Pair(1.0, 2.0)})
    saver.restore()
    saver.save()
    tied = Pair(0.0, None)
    with pytest.raises(CheckpointMismatch, match="first and second are one tensor in the module, and two different"):
        manager(storage, {"model": tied}).restore()
    assert torch.equal(tied.first, torch.zeros(3))


@pytest.mark.parametrize("second", [1.0, None])
def test_one_value_loads_into_weights_tied_or_not(second: float | None) -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"model": Pair(1.0, second)})
    saver.restore()
    saver.save()
    for live in (Pair(0.0, None), Pair(0.0, 5.0)):
        manager(storage, {"model": live}).restore()
        assert torch.equal(live.first, torch.ones(3)) and torch.equal(live.second, torch.ones(3))


def test_an_index_that_cannot_be_read_is_told_and_does_not_stop_one_rank_of_a_job(
    loader: LakeLoader, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path / "run", {"reader": loader}) as saver:
        saver.restore()
        next(iter(loader))
        saver.step()

    class Refusing(LocalStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            if path.startswith("index/"):
                raise StorageError(f"{path}: the store is busy")
            return super().read(path, start, stop)

        def put(self, path: str, chunks: Any) -> int:
            if path.startswith("index/"):
                raise StorageError(f"{path}: the store is full")
            return super().put(path, chunks)

    again = LakeLoader(loader.dataset)
    saver = CheckpointManager(Refusing(tmp_path / "run"), {"reader": again})
    with pytest.warns(DamageWarning, match="the store is busy"):
        assert saver.restore() == 1
    assert saver.restore_report is not None
    (damage,) = saver.restore_report.damaged
    assert damage.path == index_path(loader.table.index.digest)
    assert len(list(again)) == 2
