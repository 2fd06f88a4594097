"""Objects that joined a run later keep the state that they have, and enter its next checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import CheckpointMismatch, ConfigError
from lakeckpt.lake.storage.open import open_storage
from tests.checkpoint.rig import Counter, HubExchange, MemoryStorage, Reader, good, manager, run_ranks
from tests.checkpoint.scripts import write_table
from tests.patience import PATIENCE_S


def begun(storage: MemoryStorage) -> None:
    """A run with one checkpoint, without ``ema`` and ``reader``."""
    saver = manager(storage, {"count": Counter(5), "model": torch.nn.Linear(2, 2)})
    saver.restore()
    saver.step()
    saver.save()


def grown() -> dict[str, Any]:
    return {"count": Counter(), "model": torch.nn.Linear(2, 2), "ema": torch.nn.Linear(2, 2), "more": Counter(3)}


def test_objects_that_joined_later_keep_their_state_and_are_saved_from_then_on() -> None:
    storage = MemoryStorage()
    begun(storage)
    objects = grown()
    before = objects["ema"].weight.detach().clone()
    saver = manager(storage, objects)
    assert saver.restore(allow_missing=("ema", "more")) == 1
    assert objects["count"].value == 5 and objects["more"].value == 3
    assert torch.equal(objects["ema"].weight, before)
    saver.step()
    saver.save()
    again = grown()
    assert manager(storage, again).restore(allow_missing=["ema", "more"]) == 2  # there by now: restored
    assert torch.equal(again["ema"].weight, before) and again["more"].value == 3


def test_what_is_missing_without_leave_is_refused_and_so_is_all_else_that_does_not_fit() -> None:
    storage = MemoryStorage()
    begun(storage)
    with pytest.raises(CheckpointMismatch, match="'more' is among the objects given and not in the checkpoint"):
        manager(storage, grown()).restore(allow_missing=("ema",))
    with pytest.raises(CheckpointMismatch, match="'count' is in the checkpoint and not among the objects given"):
        manager(storage, {"model": torch.nn.Linear(2, 2), "ema": Counter()}).restore(allow_missing=("ema",))
    with pytest.raises(CheckpointMismatch, match=r"weight is float32 \[2, 2\] in the checkpoint and float32 \[3, 3\]"):
        manager(storage, {"count": Counter(), "model": torch.nn.Linear(3, 3)}).restore(allow_missing=("model",))


@pytest.mark.parametrize("names", [("emma",), "emma"])
def test_a_name_that_is_none_of_the_objects_is_refused(names: Any) -> None:
    storage = MemoryStorage()
    begun(storage)
    before = dict(storage.objects)
    with pytest.raises(ConfigError, match=r"allow_missing names 'emma', and the manager's objects are \['count', 'ema"):
        manager(storage, grown()).restore(allow_missing=names)
    assert storage.objects == before


def test_a_single_name_is_a_name() -> None:
    storage = MemoryStorage()
    begun(storage)
    objects = grown()
    del objects["more"]
    assert manager(storage, objects).restore(allow_missing="ema") == 1


def test_a_reader_that_joined_later_counts_from_then_on_and_the_audit_proves_no_step_before(tmp_path: Path) -> None:
    write_table(tmp_path / "lake")
    run = tmp_path / "run"
    with lakeckpt.CheckpointManager(run, {"count": Counter()}) as saver:
        saver.restore()
        saver.step()
    for _ in range(2):
        loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(tmp_path / "lake", batch_size=40, columns=["id"]))
        with lakeckpt.CheckpointManager(run, {"count": Counter(), "reader": loader}, persist_every=2) as saver:
            saver.restore(allow_missing=("reader",))
            for number, batch in enumerate(loader):
                saver.step(batch.receipt)
                if number == 2:
                    break
    report = audit(open_storage(run))
    assert (report.verdict, report.from_step, report.step, report.exit_status) == ("from step", 1, 6, 3)
    assert report.headline == "PROVED FROM STEP 1" and "the rows of the first 1 steps were not" in report.words
    assert report.readers[0].epochs[0].once == 200


def test_a_mixture_that_joins_is_named_by_its_own_name(tmp_path: Path) -> None:
    datasets = {}
    for name in ("web", "code"):
        write_table(tmp_path / name)
        datasets[name] = (lakeckpt.LakeDataset(tmp_path / name, batch_size=10, columns=["id"]), 0.5)
    with lakeckpt.CheckpointManager(tmp_path / "run", {"count": Counter()}) as saver:
        saver.restore()
        saver.step()
    loader = lakeckpt.LakeLoader(lakeckpt.mix(datasets, seed=1, batch_size=10))
    with lakeckpt.CheckpointManager(tmp_path / "run", {"count": Counter(), "reader": loader}) as saver:
        assert saver.restore(allow_missing="reader") == 1
        saver.step(next(iter(loader)))
    assert {one.name for one in audit(open_storage(tmp_path / "run")).readers} == {"reader.web", "reader.code"}


def test_on_several_ranks() -> None:
    storage = MemoryStorage()

    def first(number: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"count": Counter(5)}, exchange=exchange)
        saver.restore()
        saver.step()
        saver.save()

    def second(number: int, exchange: HubExchange) -> Any:
        more, count = Counter(number), Counter()
        saver = manager(storage, {"count": count, "more": more}, exchange=exchange)
        saver.restore(allow_missing=("more",))
        return count.value, more.value

    good(run_ranks(2, first))
    assert good(run_ranks(2, second)) == [(5, 0), (5, 1)]


@pytest.mark.parametrize("readers_before", [True, False])
def test_a_cut_in_memory_lets_objects_join_too(readers_before: bool, tmp_path: Path) -> None:
    """What the reader that joined consumes is recorded, also where nothing was committed before it joined."""
    storage, dead = MemoryStorage(), []
    readers = {"reader": Reader()} if readers_before else {}
    options = {"capture_every": 1, "arenas": tmp_path, "timeout_s": PATIENCE_S}

    def attempt(objects: dict[str, Any], *missing: str, save: bool = False) -> int:
        saver = manager(storage, objects, **options)
        done = saver.restore(allow_missing=missing)
        report = saver.restore_report
        assert report is not None and report.captured == (done or None)
        assert saver._saves is not None
        batches = [iter(one) for name, one in objects.items() if name in ("reader", "late")]
        for _ in range(3):
            for one in batches:
                next(one)
            objects["count"].value += 1
            saver.step()
            newest = saver._saves._engine.wait()
        assert newest == done + 3
        if save:
            info = saver.save()
            assert info is not None and info.step == newest
        saver._saves._engine.close()  # as the kernel does
        dead.append(saver)
        return done

    assert attempt({"count": Counter(), **readers}) == 0
    ema = torch.nn.Linear(3, 3)
    with torch.no_grad():
        ema.weight.fill_(4.0)
    objects: dict[str, Any] = {
        "count": Counter(),
        **({"reader": Reader()} if readers_before else {}),
        "ema": ema,
        "late": Reader(seed=9),
    }
    assert attempt(objects, "ema", "late") == 3
    assert objects["count"].value == 6
    fresh = {
        name: Reader(seed=9 if name == "late" else 3) if isinstance(one, Reader) else one
        for name, one in objects.items()
    }
    fresh |= {"count": Counter(), "ema": torch.nn.Linear(3, 3)}
    assert attempt(fresh, "ema", "late", save=True) == 6
    assert fresh["count"].value == 9 and bool((fresh["ema"].weight == 4).all())
    (commit,) = read_history(storage).chain
    rows = {name: reader.consumed()[0].size for name, reader in commit.readers.items()}
    assert rows == {"late": 60, **({"reader": 90} if readers_before else {})}
