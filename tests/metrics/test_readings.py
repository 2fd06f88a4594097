"""Metrics say what loaders and managers really did."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lakeckpt
from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table
from lakeckpt.bubbles import Bubbles
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.core.consumption import consumed
from lakeckpt.core.state import State
from lakeckpt.data.base.ahead import Ahead
from lakeckpt.errors import SaveFailed, StorageError
from lakeckpt.metrics import METRICS, Reading, read, readings
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.rig import manager, train_step, training
from tests.lakes import LakeSpec
from tests.patience import PATIENCE_S

LAKE = LakeSpec(files=((40, 24), (36,)), columns=("string",))
"""100 rows in three row groups."""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LAKE.write(tmp_path_factory.mktemp("metrics") / "lake")


def of(name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by its labels."""
    return {one.labels: one.value for one in readings() if one.metric.name == f"lakeckpt_{name}"}


def loader_of(lake: Path, *, num_workers: int = 0, restart: bool = False, **dataset: Any) -> LakeLoader:
    made = LakeDataset(lake, **{"batch_size": 8, "shuffle": True, **dataset})
    return LakeLoader(made, num_workers=num_workers, restart=restart)


# --- loaders


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_batches_and_waits_are_those_of_the_loop(lake: Path, num_workers: int) -> None:
    loader, rows, batches, waited_s = loader_of(lake, num_workers=num_workers), 0, 0, 0.0
    iterator = iter(loader)
    begin_s = time.perf_counter()
    for batch in iterator:
        waited_s += time.perf_counter() - begin_s
        rows, batches = rows + len(batch["id"]), batches + 1
        time.sleep(0.001)  # of the loop's own time nothing is counted
        begin_s = time.perf_counter()
    waited_s += time.perf_counter() - begin_s
    assert (of("rows_total"), of("batches_total")) == ({("loader",): rows}, {("loader",): batches})
    assert rows == LAKE.rows
    counted_s = of("wait_seconds_total")["loader",]
    assert 0 < counted_s <= waited_s


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bytes_of_stores_are_those_of_the_columns_that_are_read(tmp_path: Path, num_workers: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 62, (2, 100_000))
    pq.write_table(pa.table({"x": values[0], "y": values[1]}), tmp_path / "one.parquet", row_group_size=25_000)
    table = open_table(tmp_path)
    chunks = [table.footer(0).row_group(group).column(0) for group in range(4)]
    stored = sum(one.total_compressed_size for one in chunks)
    loader = LakeLoader(LakeDataset(table, batch_size=1000, columns=["x"], shuffle=True), num_workers=num_workers)
    opened = of("store_read_bytes_total")["local",]
    assert sum(1 for _ in loader) == 100
    footers = 3 * 2**16  # a footer is in the last 64 KiB, which each process reads
    assert 700_000 < stored <= of("store_read_bytes_total")["local",] - opened <= stored + footers


def test_the_wait_has_the_time_that_reading_takes(lake: Path) -> None:
    def slow(batch: Any, context: Any) -> Any:
        time.sleep(0.02)
        return batch

    for _ in loader_of(lake, transform=slow):
        pass
    assert of("wait_seconds_total")["loader",] >= 13 * 0.02


def test_batches_that_are_decoded_are_ready(lake: Path) -> None:
    loader = loader_of(lake)
    iterator = iter(loader)
    seen = []
    for _ in range(12):
        next(iterator)
        time.sleep(0.01)
        seen.append(of("batches_ready")["loader",])
    assert max(seen) >= 1
    assert list(iterator)
    assert of("batches_ready") in ({("loader",): 0}, {})


def test_rows_that_were_taken_or_are_not_decoded_are_not_ready() -> None:
    ahead = object.__new__(Ahead)
    ahead._reader, ahead._batch_rows = SimpleNamespace(windows=SimpleNamespace(rows_ready=11)), 4
    assert ahead.ready == 2
    ahead._reader = None
    assert ahead.ready == 0


def test_batches_that_came_from_workers_are_ready(lake: Path) -> None:
    loader = loader_of(lake, num_workers=1, batch_size=2)
    iterator = iter(loader)
    next(iterator)  # the first group has one
    until_s = time.monotonic() + PATIENCE_S
    while not of("batches_ready")["loader",] and time.monotonic() < until_s:
        time.sleep(0.01)
    assert of("batches_ready")["loader",] >= 1  # in torch's queue
    seen = {of("batches_ready")["loader",] for _ in iterator}
    assert max(seen) > 1


def test_epochs_are_exact_at_every_batch_and_on_other_ranks(lake: Path) -> None:
    loader = loader_of(lake, batch_size=7)
    rows = 0
    for batch in loader:
        rows += len(batch["id"])
        assert of("epochs")["loader",] == pytest.approx(rows / LAKE.rows)
        if rows > 30:
            break
    state = loader.state_dict()
    resumed = loader_of(lake, batch_size=3, rank=1, world_size=2)
    resumed.load_state_dict(state)
    used, own = rows, 0
    for batch in resumed:
        used += batch.receipt.step_rows
        own += len(batch["id"])
        assert of("epochs")["loader",] == pytest.approx(used / LAKE.rows)
        assert {one.rank for one in readings() if one.metric.name == "lakeckpt_rows_total"} == {0, 1}
    assert of("epochs")["loader",] == 1.0
    assert [one.value for one in readings() if one.metric.name == "lakeckpt_rows_total" and one.rank == 1] == [own]
    next(iter(resumed))
    assert of("epochs")["loader",] == pytest.approx(1 + 6 / LAKE.rows)


def test_epochs_of_each_source_of_a_mixture_are_those_of_its_state(lake: Path, tmp_path: Path) -> None:
    small = LakeSpec(files=((10,),), columns=("string",)).write(tmp_path / "small")
    sources = {name: LakeDataset(folder, batch_size=6) for name, folder in (("large", lake), ("small", small))}
    mixture = lakeckpt.mix({name: (one, 1.0) for name, one in sources.items()}, seed=3)
    loader = LakeLoader(mixture)
    for _ in itertools.islice(loader, 11):
        state = State.from_plain(loader.state_dict())
        for number, (name, rows) in enumerate((("large", LAKE.rows), ("small", 10))):
            exact = sum(one.size for one in consumed(state.of(number)).values()) / rows
            assert of("epochs")[f"loader.{name}",] == pytest.approx(exact)
    assert of("epochs")["loader.small",] > 3
    assert of("rows_total") == {("loader",): 66}


def test_names_are_those_of_the_manager(lake: Path, tmp_path: Path) -> None:
    sources = {name: LakeDataset(lake, batch_size=6) for name in ("a", "b")}
    mixed = LakeLoader(lakeckpt.mix({name: (one, 1.0) for name, one in sources.items()}))
    plain = loader_of(lake)
    validation = loader_of(lake, restart=True)
    with CheckpointManager(tmp_path / "run", {"mixed": mixed, "train": plain}, persist_every=10**9) as one:
        one.restore()
        batches = {mixed: next(iter(mixed)), plain: next(iter(plain))}
        next(iter(validation))
        assert set(of("rows_total")) == {("mixed",), ("train",), ("loader",)}
        assert set(of("epochs")) == {("mixed.a",), ("mixed.b",), ("train",), ("loader",)}
        one.step({"mixed": batches[mixed], "train": batches[plain]})


def test_loaders_of_one_name_add_up_and_a_loader_that_is_gone_still_counts(lake: Path) -> None:
    def once() -> weakref.ref[LakeLoader]:
        loader = loader_of(lake, restart=True)
        for _ in loader:
            pass
        return weakref.ref(loader)

    refs = [once() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert of("rows_total") == {("loader",): 3 * LAKE.rows}
    assert of("epochs") == {}


def test_a_copy_of_a_loader_counts_by_itself(lake: Path) -> None:
    import copy

    loader = loader_of(lake)
    next(iter(loader))
    other = copy.copy(loader)
    for _ in other:
        pass
    assert other._counting.counters is not loader._counting.counters
    assert of("batches_total")["loader",] == 1 + other._counting.counters.batches


def test_what_prefetch_holds_back_is_not_delivered(lake: Path) -> None:
    for number, _ in enumerate(lakeckpt.prefetch(loader_of(lake), depth=3), 1):
        assert of("batches_total") == {("loader",): number}
    assert of("rows_total") == {("loader",): LAKE.rows}


def test_rows_of_a_flow_are_those_that_the_transform_yields(lake: Path) -> None:
    def twice(row: Any, context: Any) -> Any:
        yield {"id": row["id"]}
        yield {"id": row["id"]}

    loader = LakeLoader(LakeDataset(lake, batch_size=8, transform=twice, rows="many", columns=["id"]))
    rows = sum(len(batch["id"]) for batch in loader)
    assert of("rows_total") == {("loader",): rows}
    assert of("epochs") == {("loader",): 1.0}


def test_rows_that_an_epoch_leaves_out_are_named_by_their_reason(lake: Path) -> None:
    name = sorted(one.name for one in lake.iterdir())[0]
    table = open_table(lake, exclude=[(name, 1)])
    loader = LakeLoader(LakeDataset(table, batch_size=8, filters=[("id", "<", 50)], drop_last=True))
    delivered = sum(len(batch["id"]) for batch in loader)
    skipped = of("skipped_rows")
    assert skipped == {
        ("loader", "excluded"): 24,
        ("loader", "filtered"): 36,
        ("loader", "dropped"): 40 - delivered,
    }
    assert delivered == 40 - 40 % 8 and LAKE.rows - sum(skipped.values()) == delivered


def test_looking_at_a_loader_changes_nothing_of_it_and_counts_no_filter(lake: Path) -> None:
    loader = loader_of(lake, filters=[("id", "<", 50)])
    loader._counting.begin(loader.dataset)
    readings()
    assert not loader._progress.begun
    assert loader.dataset._versions.at_hand.selecting._found is None  # type: ignore[union-attr]


# --- managers


class Failing:
    """A storage that fails to write while ``fails``."""

    def __init__(self, storage: Any) -> None:
        self._storage, self.fails = storage, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def list(self, prefix: str = "") -> Any:
        return self._storage.list(prefix)

    def read(self, *args: Any, **named: Any) -> Any:
        return self._storage.read(*args, **named)

    def put(self, path: str, chunks: Any) -> int:
        if self.fails:
            raise StorageError("the disk is full")
        return int(self._storage.put(path, chunks))

    def put_new(self, path: str, data: bytes) -> None:
        self._storage.put_new(path, data)

    def delete(self, path: str) -> None:
        self._storage.delete(path)


def test_commits_failures_steps_and_the_age_of_the_newest_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Failing(lakeckpt.lake.storage.local.LocalStorage(tmp_path / "run"))  # type: ignore[attr-defined]
    objects = training()  # the first optimizer of a process imports modules for seconds
    now_s = time.time() + 1000
    monkeypatch.setattr("lakeckpt.metrics.collect.time", SimpleNamespace(time=lambda: now_s))
    with manager(storage, objects) as one:
        assert of("step") == {}
        one.restore()
        run = (storage.name,)
        assert (of("step"), of("commit_age_steps")) == ({run: 0}, {run: 0})
        assert 500 < of("commit_age_seconds")[run] <= 1000.1
        for _ in range(3):
            train_step(objects)
            one.step()
        assert (of("step"), of("commit_age_steps"), of("commits_total")) == ({run: 3}, {run: 3}, {run: 0})
        info = one.save()
        assert (of("commit_age_steps"), of("commits_total")) == ({run: 0}, {run: 1})
        assert of("commit_age_seconds")[run] == pytest.approx(now_s - info.created_s)
        assert 0 < of("persist_seconds_total")[run] <= of("stall_seconds_total")[run]
        storage.fails = True
        train_step(objects)
        one.step()
        with pytest.raises(SaveFailed):
            one.save()
        assert (of("failed_saves_total"), of("commits_total"), of("commit_age_steps")) == ({run: 1}, {run: 1}, {run: 1})
        storage.fails = False
    assert of("commits_total") == {run: 2}
    assert (of("step"), of("commit_age_steps"), of("commit_age_seconds")) == ({}, {}, {})


def test_a_run_that_goes_on_has_the_age_of_the_commit_that_it_went_on_from(tmp_path: Path) -> None:
    objects = training()
    with manager(tmp_path / "run", objects) as one:
        one.restore()
        train_step(objects)
        one.step()
        info = one.save()
    with manager(tmp_path / "run", training()) as one:
        assert one.restore() == 1
        run = (str(tmp_path / "run"),)
        assert (of("step"), of("commit_age_steps"), of("commits_total")) == ({run: 1}, {run: 0}, {run: 1})
        assert of("commit_age_seconds")[run] == pytest.approx(time.time() - info.created_s, abs=5)


class HalfGate(Gate):
    """Lets the first slice of each capture move, and keeps the others until the fence has come."""

    paces = True

    def __init__(self) -> None:
        self.first = True

    def start(self, size_bytes: int, /) -> None:
        self.first = True

    def admit(self, size_bytes: int, urgent: Any, /) -> None:
        if not self.first:
            urgent.wait()
        self.first = False


class LateGate(Gate):
    """Admits each slice as if its fence had come."""

    paces = True

    def admit(self, size_bytes: int, urgent: Any, /) -> None:
        urgent.set()


@pytest.mark.parametrize("gate", [HalfGate(), LateGate(), Gate()], ids=lambda gate: type(gate).__name__)
def test_captures_their_time_and_where_their_bytes_moved(tmp_path: Path, gate: Gate) -> None:
    from lakeckpt.checkpoint.arena.folder import ArenaFolder
    from lakeckpt.checkpoint.capture.engine import CaptureEngine
    from lakeckpt.counters import RUNS, RunCounters
    from tests.checkpoint.capturing.test_engine import IDENTITY

    model = torch.nn.Linear(64, 64, bias=False)
    counters = RunCounters("run")
    engine = CaptureEngine(
        {"model": model},
        IDENTITY,
        folder=ArenaFolder(tmp_path / "arenas"),
        slice_bytes=4096,
        gate=gate,
        counters=counters,
    )
    RUNS.follow(engine, counters)
    try:
        for step in (1, 2):
            assert engine.cut(CutId(attempt=0, step=step), digest=b"0" * 16, must=True)
            while isinstance(gate, HalfGate) and not engine._current.slices.moved_bytes:  # type: ignore[union-attr]
                time.sleep(0.001)
            if not isinstance(gate, HalfGate):
                engine._idle()
            engine.fence()
            assert engine.wait() == step
        size = 64 * 64 * 4
        moved = {labels[1]: value for labels, value in of("capture_bytes_total").items()}
        if isinstance(gate, HalfGate):
            assert moved == {"bubble": 2 * 4096, "beside": 0, "fence": 2 * (size - 4096)}
            assert of("stall_seconds_total")["run",] > 0
        elif gate.paces:
            assert moved == {"bubble": 0, "beside": 0, "fence": 2 * size}
        else:
            assert moved == {"bubble": 0, "beside": 2 * size, "fence": 0}
        assert of("captures_total") == {("run",): 2}
        assert of("capture_seconds_total")["run",] > 0
    finally:
        engine.close()


def test_saves_beside_training_are_counted_with_the_time_that_the_agent_took(tmp_path: Path) -> None:
    objects = training()
    with CheckpointManager(
        tmp_path / "run", objects, persist_every=10**9, capture_every=1, arenas=tmp_path / "arenas"
    ) as one:
        one.restore()
        for _ in range(3):
            train_step(objects)
            one.step()
        one.save(sync=True)
        run = (str(tmp_path / "run"),)
        assert of("commits_total") == {run: 1}
        assert of("persist_seconds_total")[run] > 0
        assert of("captures_total")[run] >= 1


# --- how they are shown


def test_every_metric_is_read_of_a_job_that_does_everything(lake: Path, tmp_path: Path) -> None:
    loader, bubbles = loader_of(lake, drop_last=True), Bubbles()
    with CheckpointManager(tmp_path / "run", {"train": loader}, persist_every=10**9, bubbles=bubbles) as one:
        one.restore()
        iterator = iter(bubbles.watch(loader))
        for batch in itertools.islice(iterator, 3):
            one.step(batch)
        one._counters.copies = True  # as if nodes kept copies
        one._counters.spent = lambda: {"data": 1.0}  # as if it had a page
        assert {one.metric.name for one in readings()} == {one.name for one in METRICS}


def test_labels_and_values_of_counters_fit_their_metric(lake: Path, tmp_path: Path) -> None:
    next(iter(loader_of(lake)))
    for one in readings():
        assert isinstance(one, Reading) and len(one.labels) == len(one.metric.labels)
        assert one.value >= 0
    for one in METRICS:
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert not one.unit or f"_{one.unit}" in one.name
        assert not one.per or one.per in {other.name for other in METRICS}


def test_read_names_runs_only_where_there_are_several(tmp_path: Path) -> None:
    with manager(tmp_path / "one", training()) as first:
        first.restore()
        assert read()["lakeckpt/step"] == 0
        with manager(tmp_path / "two", training()) as second:
            second.restore()
            assert f"lakeckpt/step/{tmp_path / 'two'}" in read()
