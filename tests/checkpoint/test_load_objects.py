"""`lakeckpt.load` reads a checkpoint into live objects, and neither the run nor its trainer notices it."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lakeckpt
from lakeckpt import Keep
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.core.consumption import consumed
from lakeckpt.core.state import State
from lakeckpt.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    DamageWarning,
    NewerFormat,
)
from lakeckpt.lake.storage.base import ObjectInfo
from lakeckpt.wire.envelope import dumps
from tests.checkpoint.rig import (
    Counter,
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
from tests.checkpoint.scripts import write_table
from tests.checkpoint.test_sharded import begin, by_columns, fsdp, states, trained, with_optimizer
from tests.checkpoint.test_sharded import built as sharded_model
from tests.tracking.processes import run_processes


def saved(storage: MemoryStorage, *, steps: int = 3, world_size: int = 1, **options: Any) -> list[dict[str, Any]]:
    """A run of ``steps`` checkpoints, step k with the metric (k - 2)²; the state dicts of the model after each."""

    def rank(number: int, exchange: HubExchange) -> list[dict[str, Any]]:
        objects: dict[str, Any] = training(seed=1)
        objects |= {"reader": Reader(rank=number, world_size=world_size), "count": Counter()}
        saver = manager(storage, objects, persist_every=1, exchange=exchange, **options)
        saver.restore()
        found, batches = [], iter(objects["reader"])
        for step in range(1, steps + 1):
            next(batches)
            train_step(objects, torch.full((16, 8), 0.1 * step) + torch.arange(16)[:, None])
            objects["count"].value = step
            saver.step(metric=(step - 2.0) ** 2)
            found.append({key: one.clone() for key, one in objects["model"].state_dict().items()})
        return found

    return good(run_ranks(world_size, rank))[0]


def same(model: torch.nn.Module, state: dict[str, Any]) -> bool:
    return all(torch.equal(one, state[key]) for key, one in model.state_dict().items())


def test_the_newest_checkpoint_is_loaded_and_nothing_is_written() -> None:
    storage = MemoryStorage()
    told = saved(storage)
    before = dict(storage.objects)
    objects: dict[str, Any] = training(seed=2) | {"reader": Reader(), "count": Counter()}
    info = lakeckpt.load(storage, objects)
    assert isinstance(info, CheckpointInfo)
    assert (info.step, info.metric, info.slot) == (3, 1.0, 3)
    assert same(objects["model"], told[2]) and objects["count"].value == 3
    assert objects["reader"].state_dict()["step"] == 3
    assert objects["optimizer"].state_dict()["state"][0]["step"] == 3
    assert storage.objects == before


def test_the_trainer_saves_on_afterwards() -> None:
    storage, model = MemoryStorage(), torch.nn.Linear(2, 2)
    trainer = manager(storage, {"model": model}, persist_every=1)
    trainer.restore()
    trainer.step()
    lakeckpt.load(storage, {"model": torch.nn.Linear(2, 2)})
    trainer.step()
    info = trainer.wait()
    assert info is not None and info.step == 2


def test_random_states_stay_as_they_are() -> None:
    storage = MemoryStorage()
    saved(storage)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    lakeckpt.load(storage, training())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


class Seen(MemoryStorage):
    """What another process sees of a storage: before each of its calls, ``happens(number of the call, path)``."""

    def __init__(self, inner: MemoryStorage, happens: Callable[[int, str], None]) -> None:
        super().__init__()
        self.inner, self.objects, self.changed = inner, inner.objects, inner.changed
        self.happens, self.number = happens, itertools.count(1)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self.happens(next(self.number), prefix)
        return super().list(prefix)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.happens(next(self.number), path)
        return super().read(path, start, stop)

    def put(self, path: str, chunks: Any) -> int:
        raise AssertionError("a load writes nothing")

    def put_new(self, path: str, data: bytes) -> None:
        raise AssertionError("a load writes nothing")

    def delete(self, path: str) -> None:
        raise AssertionError("a load removes nothing")


def test_objects_that_are_not_named_are_not_read() -> None:
    storage = MemoryStorage()
    trainer = manager(storage, {"one": Counter(torch.zeros(50_000)), "other": Counter(torch.ones(50_000))})
    trainer.restore()
    trainer.step()
    trainer.save()
    (path,) = [path for path in storage.objects if path.startswith("objects/")]
    data = storage.objects[path]
    at = data.index(torch.ones(1).numpy().tobytes() * 4)
    storage.objects[path] = data[:at] + b"!" + data[at + 1 :]
    one = Counter()
    assert lakeckpt.load(storage, {"one": one}).step == 1
    assert torch.equal(one.value, torch.zeros(50_000))
    with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged, match="no checkpoint that could be loaded"):
        lakeckpt.load(storage, {"other": Counter()})


def test_what_other_ranks_had_of_objects_that_are_not_named_is_not_read_either() -> None:
    storage = MemoryStorage()

    def rank(number: int, exchange: HubExchange) -> None:
        other = Counter(torch.full((50_000,), number + 1.0))
        trainer = manager(storage, {"one": Counter(7), "other": other}, exchange=exchange)
        trainer.restore()
        trainer.step()
        trainer.save()

    good(run_ranks(2, rank))
    two = torch.full((4,), 2.0).numpy().tobytes()
    path = next(path for path, data in storage.objects.items() if path.startswith("objects/") and two in data)
    storage.objects[path] = storage.objects[path].replace(two, b"?" + two[1:], 1)
    one = Counter()
    assert lakeckpt.load(storage, {"one": one}).step == 1 and one.value == 7


def test_a_reader_alone_may_be_loaded() -> None:
    storage, reader = MemoryStorage(), Reader()
    saved(storage)
    lakeckpt.load(storage, {"reader": reader}, step=2)
    assert reader.state_dict()["step"] == 2


@pytest.mark.parametrize("filters", [None, [("id", ">", 20)]])
def test_a_loader_goes_on_at_the_rows_of_the_checkpoint(filters: Any, tmp_path: Path) -> None:
    write_table(tmp_path / "lake")

    def loader() -> lakeckpt.LakeLoader:
        dataset = lakeckpt.LakeDataset(tmp_path / "lake", batch_size=7, columns=["id"], filters=filters)
        return lakeckpt.LakeLoader(dataset)

    trained_on = loader()
    with lakeckpt.CheckpointManager(tmp_path / "run", {"reader": trained_on}, persist_every=1) as trainer:
        trainer.restore()
        batches = iter(trained_on)
        next(batches)
        trainer.step()
    rest = [batch["id"].tolist() for batch in batches]
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    fresh = loader()
    lakeckpt.load(tmp_path / "run", {"reader": fresh})
    assert [batch["id"].tolist() for batch in fresh] == rest
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*")) == before


def test_a_reader_of_a_version_that_is_gone_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    write_table(tmp_path / "lake")

    def loader() -> lakeckpt.LakeLoader:
        dataset = lakeckpt.LakeDataset(
            tmp_path / "lake",
            batch_size=7,
            columns=["id"],
            options=lakeckpt.ReadOptions(on_version_gone="next_epoch", on_new_version="next_epoch"),
        )
        return lakeckpt.LakeLoader(dataset)

    trained_on = loader()
    with lakeckpt.CheckpointManager(tmp_path / "run", {"reader": trained_on}, persist_every=1) as trainer:
        trainer.restore()
        next(iter(trained_on))
        trainer.step()
    (tmp_path / "lake" / "part-0.parquet").unlink()
    fresh = loader()
    before = fresh.state_dict()
    with pytest.raises(CheckpointMismatch, match=r"'reader' cannot be loaded.*'part-0\.parquet' is gone"):
        lakeckpt.load(tmp_path / "run", {"reader": fresh})
    assert fresh.state_dict() == before


# --- which checkpoint


def test_a_step_or_the_best_may_be_asked_for() -> None:
    storage = MemoryStorage()
    told = saved(storage, steps=4, keep=Keep(last=4))
    model = training()["model"]
    for step, state in enumerate(told, 1):
        assert lakeckpt.load(storage, {"model": model}, step=step).step == step
        assert same(model, state)
    info = lakeckpt.load(storage, {"model": model}, step="best")
    assert (info.step, info.metric) == (2, 0.0) and same(model, told[1])


def test_the_best_is_the_highest_where_the_rule_of_the_run_says_so_and_of_equal_ones_the_newest() -> None:
    for best in (0, 1):
        storage = MemoryStorage()
        saved(storage, steps=3, keep=Keep(last=3, best=best, best_is="highest"))
        assert lakeckpt.load(storage, {"count": Counter()}, step="best").step == 3  # metrics 1, 0, 1


def test_the_best_of_a_run_without_metrics_is_refused() -> None:
    storage = MemoryStorage()
    trainer = manager(storage, {"count": Counter()})
    trainer.restore()
    for metric in (None, float("nan")):
        trainer.step(metric=metric)
        trainer.save()
    with pytest.raises(CheckpointNotFound, match=r"has a metric: give one to manager\.step\(\)"):
        lakeckpt.load(storage, {"count": Counter()}, step="best")


def test_a_pruned_step_is_named_with_those_that_can_be_loaded() -> None:
    storage = MemoryStorage()
    saved(storage, steps=5, keep=2)
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 1 that its rule \(keep=\).* are 4, 5;"):
        lakeckpt.load(storage, {"count": Counter()}, step=1)
    with pytest.raises(CheckpointNotFound, match=r"has no checkpoint of step 9 that .* The steps .* are 4, 5;"):
        lakeckpt.load(storage, {"count": Counter()}, step=9)


def test_a_place_without_a_run_and_a_run_without_a_checkpoint_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no run at"):
        lakeckpt.load(tmp_path / "nothing", {"count": Counter()})
    assert not (tmp_path / "nothing").exists()
    storage = MemoryStorage()
    manager(storage, {"count": Counter()}).restore()
    with pytest.raises(CheckpointNotFound, match="has no checkpoint yet"):
        lakeckpt.load(storage, {"count": Counter()})


def test_a_checkpoint_of_a_branch_that_was_rolled_back_is_none() -> None:
    storage, count = MemoryStorage(), Counter()
    saved(storage, steps=3)
    newest = [path for path in storage.objects if path.startswith("parts/")][-1]
    part = storage.objects.pop(newest)
    with pytest.warns(DamageWarning):
        manager(storage, training() | {"reader": Reader(), "count": count}).restore()
    storage.objects[newest] = part
    assert count.value == 2
    assert lakeckpt.load(storage, {"count": count}).step == 2


@pytest.mark.parametrize("step", [-1, True, 1.0, "worst"])
def test_a_step_that_cannot_be_is_refused(step: Any) -> None:
    with pytest.raises(ConfigError, match="step is a number of optimizer steps, 'best', or None"):
        lakeckpt.load(MemoryStorage(), {"count": Counter()}, step=step)


def test_a_log_of_a_newer_version_is_told() -> None:
    storage = MemoryStorage()
    saved(storage)
    storage.objects["log/0000000004.lkc"] = dumps({}, kind="log", version=(99, 0))
    with pytest.raises(NewerFormat):
        lakeckpt.load(storage, {"count": Counter()})


# --- what does not fit, and what is damaged


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed() -> None:
    storage = MemoryStorage()
    saved(storage)
    count, other, model = Counter(7), Counter(8), torch.nn.Sequential(torch.nn.Linear(8, 9))
    before = {key: one.clone() for key, one in model.state_dict().items()}
    with pytest.raises(CheckpointMismatch) as caught:
        lakeckpt.load(storage, {"count": count, "other": other, "model": model})
    text = str(caught.value)
    assert "'other' is among the objects given and not in the checkpoint" in text
    assert "0.weight is float32 [8, 8] in the checkpoint and float32 [9, 8]" in text and "1.bias is in the" in text
    assert "name fewer of them" in text and "'reader'" not in text
    assert (count.value, other.value) == (7, 8) and same(model, before)


@pytest.mark.parametrize("kind", ["parts/", "objects/", "log/"])
def test_where_the_newest_is_damaged_the_one_before_is_loaded_with_a_warning(kind: str) -> None:
    storage = MemoryStorage()
    told = saved(storage)
    path = [path for path in sorted(storage.objects) if path.startswith(kind)][-1]
    storage.objects[path] = changed(storage.objects[path])
    before, objects = dict(storage.objects), training()
    with pytest.warns(DamageWarning, match=r"damage in the run: log/0000000003\.lkc: ") as seen:
        assert lakeckpt.load(storage, objects).step == 2
    assert len(seen) == 1 and seen[0].filename == __file__
    assert same(objects["model"], told[1]) and storage.objects == before
    if kind != "log/":
        with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged, match="load another step"):
            lakeckpt.load(storage, objects, step=3)


def test_damage_that_is_found_late_and_everywhere_says_that_objects_hold_a_mixture() -> None:
    storage = MemoryStorage()
    (told,) = saved(storage, steps=1)
    path, weight = next(path for path in storage.objects if path.startswith("objects/")), told["2.weight"].numpy()
    storage.objects[path] = storage.objects[path].replace(weight.tobytes(), (weight + 1).tobytes())
    with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged) as caught:
        lakeckpt.load(storage, training())
    assert any("a mixture of states" in note for note in caught.value.__notes__)


# --- beside a trainer that prunes


def live(storage: MemoryStorage, keep: int | Keep = 1) -> tuple[Callable[..., None], list[int]]:
    """A trainer that keeps one checkpoint; a call lets it make two more. The steps that it has committed."""
    counter, done = Counter(), [0]
    trainer = manager(storage, {"n": counter, "m": torch.nn.Linear(30, 30, bias=False)}, keep=keep)
    trainer.restore()

    def go_on(steps: int = 2) -> None:
        for _ in range(steps):
            done[0] += 1
            counter.value = {name: torch.full((5000,), float(done[0])) for name in "abc"}
            with torch.no_grad():
                trainer._objects["m"].weight.fill_(done[0])
            trainer.step(metric=-float(done[0]))
            assert trainer.save() is not None

    go_on(1)
    return go_on, done


def objects_of_live() -> dict[str, Any]:
    return {"n": Counter({name: torch.zeros(5000) for name in "abc"}), "m": torch.nn.Linear(30, 30, bias=False)}


def values(objects: dict[str, Any]) -> set[float]:
    return {float(x) for one in (*objects["n"].value.values(), objects["m"].weight.detach()) for x in one.flatten()}


def at_call(number: int, work: Callable[[], None]) -> Callable[[int, str], None]:
    return lambda call, path: work() if call == number else None


def loaded_at_each_call(step: Any, keep: int | Keep) -> list[int]:
    """What is loaded where the trainer saves and prunes right before the n-th call of the storage, for every n."""
    found: list[int] = []
    for at in itertools.count(1):
        storage = MemoryStorage()
        go_on, _ = live(storage, keep)
        seen = Seen(storage, at_call(at, go_on))
        objects = objects_of_live()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a checkpoint that was pruned is no damage
            info = lakeckpt.load(seen, objects, step=step)
        assert values(objects) == {float(info.step)}
        assert info.step in (1, 3)
        go_on()  # the trainer was not disturbed
        found.append(info.step)
        if at > next(seen.number):
            break
    return found


@pytest.mark.parametrize(("step", "keep"), [(None, 1), ("best", 1), ("best", Keep(last=1, best=1))])
def test_beside_a_trainer_that_prunes_the_newest_or_the_best_of_that_time_is_loaded(step: Any, keep: Any) -> None:
    found = loaded_at_each_call(step, keep)
    assert len(found) > 8 and set(found) == {1, 3}


def test_a_step_that_is_pruned_while_it_is_read_is_named() -> None:
    calls, notes = Seen(MemoryStorage(), lambda call, path: None), set()
    live(calls.inner)
    lakeckpt.load(calls, objects_of_live(), step=1)
    for at in range(1, next(calls.number)):
        storage = MemoryStorage()
        go_on, _ = live(storage)
        seen = Seen(storage, at_call(at, go_on))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 1 that .* can be loaded are 3;") as e:
                lakeckpt.load(seen, objects_of_live(), step=1)
        notes.add(bool(getattr(e.value, "__notes__", [])))
    assert notes == {False, True}  # it says so where the model was half read already


def test_a_trainer_that_always_prunes_first_ends_in_an_error_that_says_what_to_do() -> None:
    storage = MemoryStorage()
    go_on, done = live(storage)
    seen = Seen(storage, lambda call, path: go_on(1) if path.startswith("parts/") else None)
    with pytest.raises(CheckpointNotFound, match=r"removed each of 16 checkpoints while it was read: keep more"):
        lakeckpt.load(seen, {"n": Counter()})
    assert done[0] > 16


def test_each_try_reads_only_what_is_new_of_the_log() -> None:
    storage = MemoryStorage()
    go_on, _ = live(storage)
    read: list[str] = []

    def happens(call: int, path: str) -> None:
        read.append(path)
        if path.startswith("parts/") and len([one for one in read if one.startswith("parts/")]) <= 5:
            go_on(1)

    assert lakeckpt.load(Seen(storage, happens), {"n": Counter()}).step == 6
    assert read.count("log") > 5 and read.count("log/0000000000.lkc") == 1
    assert max(read.count(f"log/{slot:010d}.lkc") for slot in range(1, 7)) == 2, "once to choose, once to load"


def test_of_a_long_log_only_the_newest_entries_are_read_and_more_where_these_are_damaged() -> None:
    storage = MemoryStorage()
    go_on, _ = live(storage, keep=200)
    go_on(79)
    read: list[str] = []
    seen = Seen(storage, lambda call, path: read.append(path))
    assert lakeckpt.load(seen, {"n": Counter()}).step == 80
    assert 0 < len({one for one in read if one.startswith("log/")}) <= 66
    for slot in range(11, 81):
        storage.objects[f"log/{slot:010d}.lkc"] = b"?"
    with pytest.warns(DamageWarning, match="damage in the run: log/"):
        assert lakeckpt.load(storage, {"n": Counter()}).step == 10


# --- several ranks


def test_all_ranks_load_the_same_checkpoint_whatever_is_saved_meanwhile() -> None:
    storage = MemoryStorage()
    go_on, _ = live(storage, keep=3)

    def rank(number: int, exchange: HubExchange) -> tuple[int, float]:
        count = Counter()
        seen = Seen(storage, at_call(1, go_on if number == 1 else lambda: None))
        return lakeckpt.load(seen, {"n": count}, exchange=exchange).step, float(count.value["a"][0])

    assert good(run_ranks(3, rank)) == [(1, 1.0)] * 3


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (1, 3), (3, 2), (2, 1)])
def test_what_some_ranks_saved_as_many_as_you_like_load(saving: int, loading: int) -> None:
    storage = MemoryStorage()
    told = saved(storage, world_size=saving)

    def rank(number: int, exchange: HubExchange) -> int:
        objects: dict[str, Any] = training(seed=3)
        reader = Reader(rank=number, world_size=loading)
        info = lakeckpt.load(storage, objects | {"reader": reader}, exchange=exchange)
        assert same(objects["model"], told[2])
        assert consumed(State.from_plain(reader.state_dict()))[0].size == 3 * saving * 10
        return info.step

    assert good(run_ranks(loading, rank)) == [3] * loading


def test_a_misfit_on_one_rank_is_raised_on_all_and_changes_none() -> None:
    storage = MemoryStorage()
    saved(storage, world_size=2)

    def rank(number: int, exchange: HubExchange) -> Any:
        count = Counter(7)
        more = {"other": Counter()} if number else {}
        with pytest.raises(CheckpointMismatch, match="'other' is among the objects given"):
            lakeckpt.load(storage, {"count": count, **more}, exchange=exchange)
        return count.value

    assert good(run_ranks(2, rank)) == [7, 7]


class Refusing(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("no")


def test_an_object_that_refuses_on_one_rank_lets_those_of_all_ranks_go_back() -> None:
    storage = MemoryStorage()
    saved(storage, world_size=2)

    def rank(number: int, exchange: HubExchange) -> Any:
        count, reader = (Refusing if number else Counter)(7), Reader(rank=number, world_size=2)
        before = reader.state_dict()
        with pytest.raises(CheckpointMismatch, match="'count' refused its state from the checkpoint: KeyError"):
            lakeckpt.load(storage, {"count": count, "reader": reader}, exchange=exchange)
        assert reader.state_dict() == before
        return count.value

    assert good(run_ranks(2, rank)) == [7, 7]


def test_damage_that_one_rank_finds_lets_all_load_the_one_before() -> None:
    storage = MemoryStorage()
    saved(storage, world_size=2)
    damaged = sorted(path for path in storage.objects if path.startswith("parts/"))[-2:]

    def rank(number: int, exchange: HubExchange) -> int:
        mine = MemoryStorage()
        mine.objects = {path: data for path, data in storage.objects.items() if not number or path not in damaged}
        return lakeckpt.load(mine, {"count": Counter()}, exchange=exchange).step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)  # other threads' warnings cannot be expected here
        assert good(run_ranks(2, rank)) == [2, 2]


def sharded_first(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    objects = fsdp(1, world_size)
    with lakeckpt.CheckpointManager(f"{folder}/run", objects, persist_every=1) as saver:
        saver.restore()
        trained(objects)
        saver.step()
        said = states(objects)
        fresh = fsdp(2, world_size)
        assert lakeckpt.load(f"{folder}/run", fresh).step == 1
        assert states(fresh) == said
        saver.step()  # not disturbed
    Path(folder, f"saved.{rank}").write_text(said)
    dist.destroy_process_group()


def sharded_second(rank: int, world_size: int, folder: str, sharding: Any) -> None:
    begin(rank, world_size, folder)
    objects = sharding(4, world_size)
    assert lakeckpt.load(f"{folder}/run", objects, step=1, rank=rank, world_size=world_size).step == 1
    assert states(objects) == Path(folder, "saved.0").read_text()
    model = sharding(5, world_size)["model"]
    lakeckpt.load(f"{folder}/run", {"model": model})
    assert states({"model": model}) == states({"model": objects["model"]})
    if rank == 1:  # alone, while the others do not
        alone = sharded_model(6)
        lakeckpt.load(f"{folder}/run", alone, world_size=1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.soak
def test_parts_of_tensors_are_loaded_on_as_many_ranks_on_others_otherwise_divided_and_on_one(tmp_path: Path) -> None:
    run_processes(2, sharded_first, 2, str(tmp_path))
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    run_processes(3, sharded_second, 3, str(tmp_path), by_columns)
    objects = with_optimizer(sharded_model(5))
    assert lakeckpt.load(tmp_path / "run", objects).step == 2
    assert states(objects) == (tmp_path / "saved.0").read_text()
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before


def test_a_process_of_several_without_torch_distributed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    saved(storage)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        lakeckpt.load(storage, {"count": Counter()})
    assert lakeckpt.load(storage, {"count": Counter()}, world_size=1).step == 3
    with pytest.raises(ConfigError, match="rank 1 of 1 was asked for"):
        lakeckpt.load(storage, {"count": Counter()}, rank=1, world_size=1)


def test_ranks_may_name_other_objects_than_one_another() -> None:
    storage = MemoryStorage()
    saved(storage, world_size=2)

    def rank(number: int, exchange: HubExchange) -> int:
        return lakeckpt.load(storage, {"count": Counter()} if number else training(), exchange=exchange).step

    assert good(run_ranks(2, rank)) == [3, 3]
