"""Mixtures of datasets: rows and sequences of several tables, exactly, in process and in workers; refusals by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lakeckpt
from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, ReadOptions, errors, mix, pack
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.consumption import consumed
from lakeckpt.core.state import State
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.reading.windows.cache import window_parts
from lakeckpt.testing import assert_exactly_once

ROWS = {"web": 300, "code": 200, "rare": 30}
WEIGHTS = {"web": 9.0, "code": 6.0, "rare": 1.0}
FIRST = {"web": 0, "code": 1000, "rare": 2000}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tables of unique ids, texts, and documents whose tokens are unique."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, rows in ROWS.items():
        tokens = itertools.count(10 * FIRST[name])
        ids = np.arange(FIRST[name], FIRST[name] + rows)
        columns = {
            "id": ids,
            "text": [f"row {one}" for one in ids],
            "tokens": pa.array([list(itertools.islice(tokens, int(one) * 7 % 9)) for one in ids], pa.list_(pa.int32())),
        }
        (folder / name).mkdir()
        pq.write_table(pa.table(columns), folder / name / "a.parquet", row_group_size=40)
    return folder


def sources_of(lake: Path, rank: int = 0, world_size: int = 1, **given: Any) -> dict[str, LakeDataset]:
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "shuffle_window": 2, **given}
    return {name: LakeDataset(lake / name, rank=rank, world_size=world_size, **options) for name in ROWS}


def mixed(sources: dict[str, LakeDataset], weights: dict[str, float] = WEIGHTS, **given: Any) -> Any:
    return mix({name: (one, weights[name]) for name, one in sources.items()}, **{"seed": 1, **given})


def loader_of(lake: Path, rank: int = 0, world_size: int = 1, *, workers: int = 0, **given: Any) -> LakeLoader:
    columns = given.pop("columns", None)
    sources = sources_of(lake, rank, world_size, columns=columns)
    return LakeLoader(mixed(sources, **{"num_lanes": 12, **given}), num_workers=workers)


def take(loader: LakeLoader, count: int) -> list[Any]:
    return list(itertools.islice(iter(loader), count))


def ids_of(batches: list[Any]) -> list[int]:
    return [one for batch in batches for one in batch["id"].tolist()]


def source_of(state: dict[str, Any], name: str) -> State:
    """The state as a source of the mixture sees it."""
    found = State.from_plain(state)
    assert found.mixing is not None
    return found.of(found.mixing.names.index(name))


def check_consumed(state: dict[str, Any], ids: list[int]) -> None:
    """Every row of every source was delivered as often as its state says."""
    counts = Counter(ids)
    for name, rows in ROWS.items():
        epochs = consumed(source_of(state, name))
        mine = [counts[one] for one in range(FIRST[name], FIRST[name] + rows)]
        whole = sum(part.size == rows for part in epochs.values())
        assert sum(part.size for part in epochs.values()) == sum(mine)
        assert set(mine) <= set(range(whole, len(epochs) + 1))


def test_every_row_counts_once_in_each_epoch_of_its_source_on_any_chain_of_topologies(lake: Path) -> None:
    state, found = None, list[int]()
    for world_size, workers, steps in ((2, 0, 9), (1, 2, 7), (4, 0, 9), (3, 1, 5), (5, 0, 4), (1, 0, 40)):
        states = []
        for rank in range(world_size):
            loader = loader_of(lake, rank, world_size, workers=workers)
            if state is not None:
                loader.load_state_dict(state)
            found += ids_of(take(loader, steps))
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
    assert state is not None
    check_consumed(state, found)
    for name, weight in WEIGHTS.items():
        part = sum(FIRST[name] <= one < FIRST[name] + 1000 for one in found)
        assert abs(part - len(found) * weight / 16) <= 15


@pytest.mark.parametrize("packed", [False, True])
def test_rows_do_not_depend_on_how_much_of_a_window_a_source_holds(
    lake: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> LakeLoader:
        if not packed:
            return loader_of(lake, num_lanes=2)
        sources = {name: pack(one, length=8) for name, one in sources_of(lake, columns=["tokens"]).items()}
        return LakeLoader(mixed(sources, num_lanes=2))

    whole = [rows_of(batch) for batch in take(made(), 60)]
    monkeypatch.setattr("lakeckpt.reading.windows.cache._WINDOWS", 0.5)
    assert [window_parts(weight / 16) for weight in WEIGHTS.values()] == [3, 5, 32]
    loader = made()
    found = [rows_of(batch) for batch in take(loader, 25)]
    resumed = made()
    resumed.load_state_dict(loader.state_dict())
    assert found + [rows_of(batch) for batch in take(resumed, 35)] == whole


def rows_of(batch: Any) -> dict[str, Any]:
    return {name: one.tolist() if hasattr(one, "tolist") else one for name, one in batch.items()}


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_deliver_what_one_process_delivers(lake: Path, workers: int) -> None:
    alone, helped = take(loader_of(lake), 30), take(loader_of(lake, workers=workers), 30)
    assert [rows_of(one) for one in alone] == [rows_of(one) for one in helped]
    assert [one.receipt for one in alone] == [one.receipt for one in helped]


def test_batches_are_equal_on_topologies_that_divide_the_lanes(lake: Path) -> None:
    whole = take(loader_of(lake), 24)
    for world_size in (2, 3):
        parts = [take(loader_of(lake, rank, world_size), 24 // world_size) for rank in range(world_size)]
        dealt = [rows_of(one) for step in zip(*parts, strict=True) for one in step]
        assert dealt == [rows_of(one) for one in whole]


@pytest.mark.parametrize("lanes", [1, 12])
def test_a_batch_alternates_and_its_receipt_names_the_positions(lake: Path, lanes: int) -> None:
    for batch in take(loader_of(lake, source_column="source", num_lanes=lanes), 40):
        ids, source = batch["id"], batch["source"]
        assert batch["text"] == [f"row {one}" for one in ids.tolist()]
        assert (ids // 1000 == source).all() and ids.dtype == source.dtype == torch.int64
        rows = {name: sum(span.rows for span in spans) for name, spans in batch.receipt.spans}
        assert rows == {name: count for number, name in enumerate(ROWS) if (count := int((source == number).sum()))}
        assert (batch.receipt.rows, batch.receipt.step_rows, batch.receipt.weight) == (8, 8, 1.0)
        assert len(batch["tokens"]) == 8
        assert [len(one) for one in batch["tokens"].tolist()] == [one * 7 % 9 for one in ids.tolist()]


def test_whole_micro_batches_are_mixed_where_that_is_asked_for(lake: Path) -> None:
    loader = loader_of(lake, granularity="batch", source_column="source", num_lanes=1)
    batches = take(loader, 160)
    assert all(len(set(batch["source"].tolist())) == 1 for batch in batches)
    assert Counter(int(batch["source"][0]) for batch in batches) == {0: 90, 1: 60, 2: 10}
    check_consumed(loader.state_dict(), ids_of(batches))


def test_weights_change_in_mid_iteration_and_nothing_is_lost(lake: Path) -> None:
    for workers in (0, 2):
        loader = loader_of(lake, workers=workers)
        found, parts = [], []
        for step, batch in enumerate(loader):
            found += batch["id"].tolist()
            parts.append(Counter(one // 1000 for one in batch["id"].tolist()))
            if step == 9:
                loader.set_weights({"web": 0, "code": 1, "rare": 1})
            if step == 29:
                break
        assert all(not one[0] for one in parts[10:]) and all(one[0] for one in parts[:10])
        check_consumed(loader.state_dict(), found)
        again = loader_of(lake)
        again.load_state_dict(loader.state_dict())
        assert rows_of(take(again, 1)[0]) == rows_of(take(loader, 1)[0])  # its weights go on


def test_a_schedule_is_the_same_in_workers_and_after_a_resume(lake: Path) -> None:
    given = {"schedule": [(5, {"web": 1, "code": 0, "rare": 0}), (9, {"web": 0, "code": 1, "rare": 0})]}
    whole = [rows_of(one) for one in take(loader_of(lake, **given), 14)]
    assert [rows_of(one) for one in take(loader_of(lake, workers=2, **given), 14)] == whole
    for stop in (3, 5, 7, 9, 12):
        first, second = loader_of(lake, **given), loader_of(lake, **given)
        before = take(first, stop)
        second.load_state_dict(first.state_dict(at=before[-1].receipt))
        every = before + take(second, 14 - stop)
        assert [rows_of(one) for one in every] == whole
        check_consumed(second.state_dict(), ids_of(every))
    first, other = loader_of(lake, **given), loader_of(lake, **given | {"num_lanes": 5})
    before = take(first, 5)
    other.load_state_dict(first.state_dict(at=before[-1].receipt))
    every = before + take(other, 9)
    assert [{one // 1000 for one in batch["id"].tolist()} for batch in every[5:]] == [{0}] * 4 + [{1}] * 5
    check_consumed(other.state_dict(), ids_of(every))
    assert {one // 1000 for batch in whole[9:] for one in batch["id"]} == {1}


def test_pieces_of_a_schedule_that_repeat_the_weights_at_hand_change_nothing(lake: Path) -> None:
    other = {"web": 1, "code": 1, "rare": 0}
    repeating = [(3, WEIGHTS), (5, other), (7, other), (9, WEIGHTS), (11, WEIGHTS)]
    whole = [rows_of(one) for one in take(loader_of(lake, schedule=[(5, other), (9, WEIGHTS)]), 14)]
    for workers in (0, 2):
        assert [rows_of(one) for one in take(loader_of(lake, workers=workers, schedule=repeating), 14)] == whole
    for stop in (4, 8, 12):
        first, second = (loader_of(lake, schedule=repeating) for _ in range(2))
        take(first, stop)
        second.load_state_dict(first.state_dict())
        assert [rows_of(one) for one in take(second, 14 - stop)] == whole[stop:]
    loader = loader_of(lake, schedule=[(8, other)])
    take(loader, 4)
    loader.set_weights(other)
    assert len(take(loader, 6)) == 6


def test_a_source_that_is_too_small_for_its_lanes_is_through_at_once(lake: Path) -> None:
    given = {"granularity": "batch", "weights": {"web": 6, "code": 1, "rare": 9}}
    with pytest.raises(errors.ConfigError, match="ends before its first step"):
        take(loader_of(lake, exhausted="continue", num_lanes=48, **given), 1)
    loader = loader_of(lake, exhausted="continue", num_lanes=24, **given)
    found = ids_of(take(loader, 5))
    check_consumed(loader.state_dict(), found)
    found += ids_of(list(loader))
    assert found and not {one for one in found if one >= 2000}
    check_consumed(loader.state_dict(), found)
    loader.set_weights({"web": 0, "code": 0, "rare": 1})
    assert list(loader) == []


@pytest.mark.parametrize("exhausted", ["stop", "continue"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_of_one_epoch_ends(lake: Path, exhausted: str, workers: int) -> None:
    loader = loader_of(lake, exhausted=exhausted, workers=workers, num_lanes=2)
    found = ids_of(list(loader))
    assert max(Counter(found).values()) == 1
    assert list(loader) == []
    left = sum(ROWS.values()) - len(found)
    assert left <= 3 * 2 * 9 if exhausted == "continue" else found and left > 0
    check_consumed(loader.state_dict(), found)


def test_packed_sources_deliver_every_token_once(lake: Path) -> None:
    def loader_of_sequences(rank: int, world_size: int) -> LakeLoader:
        sources = {name: pack(one, length=16) for name, one in sources_of(lake, rank, world_size, batch_size=4).items()}
        return LakeLoader(mixed(sources, num_lanes=4))

    state, found = None, Counter[int]()
    for world_size, steps in ((2, 8), (1, 9), (3, 7), (1, 60)):
        for rank in range(world_size):
            loader = loader_of_sequences(rank, world_size)
            if state is not None:
                loader.load_state_dict(state)
            for batch in itertools.islice(iter(loader), steps):
                assert batch["tokens"].shape == (4, 16)
                found.update(batch["tokens"].reshape(-1).tolist())
            after = loader.state_dict()
        state = after
    assert state is not None
    for name, rows in ROWS.items():
        tokens = sum((FIRST[name] + one) * 7 % 9 for one in range(rows))
        counts = [found[10 * FIRST[name] + one] for one in range(tokens)]
        identity = source_of(state, name).identity
        epochs = consumed(source_of(state, name))
        whole = sum(part.size == identity.rows_of(epoch) for epoch, part in epochs.items())
        assert sum(counts) == 16 * sum(part.size for part in epochs.values())
        assert whole - 1 <= min(counts) <= max(counts) <= len(epochs) + 1  # a sequence may reach into the next epoch


# --- with a manager


def test_a_run_is_saved_restored_and_proved_source_by_source(lake: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    history: dict[int, list[int]] = {}
    for workers, lanes, steps, is_killed in ((0, 4, 7, True), (2, 4, 9, True), (0, 6, 8, False)):
        loader = loader_of(lake, workers=workers, num_lanes=lanes)
        manager = CheckpointManager(tmp_path / "run", {"model": model, "reader": loader})
        done = manager.restore()
        for step, batch in enumerate(itertools.islice(iter(loader), steps), start=done + 1):
            manager.step(batch)
            history[step] = batch["id"].tolist()
            if step % 5 == 0:
                manager.save()
                loader.set_weights({"web": step, "code": 3, "rare": 1})
        if not is_killed:
            manager.save()
            manager.close()
    records = [one.readers for one in read_history(LocalStorage(tmp_path / "run")).chain]
    assert all(set(one) == {"reader"} and not one["reader"].consumed() for one in records), (
        "one record, of states alone"
    )
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.verdict == "proved", report
    assert sorted(one.name for one in report.readers) == ["reader.code", "reader.rare", "reader.web"]
    last = max(history)
    check_consumed(loader.state_dict(), [one for step in range(1, last + 1) for one in history[step]])
    explained = explain(LocalStorage(tmp_path / "run"), 6)
    rows = {one.reader: one.ranks[0].table_rows.tolist() for one in explained.readers}
    expected = {name: [one - FIRST[name] for one in history[6] if one // 1000 * 1000 == FIRST[name]] for name in ROWS}
    assert rows == {f"reader.{name}": found for name, found in expected.items()}


def test_a_source_is_added_to_a_run(lake: Path, tmp_path: Path) -> None:
    def attempt(names: list[str], steps: int) -> list[int]:
        sources = {name: one for name, one in sources_of(lake).items() if name in names}
        loader = LakeLoader(mixed(sources, num_lanes=4))
        with CheckpointManager(tmp_path / "run", {"reader": loader}) as manager:
            manager.restore()
            found = []
            for batch in itertools.islice(iter(loader), steps):
                manager.step(batch)
                found += batch["id"].tolist()
        return found

    first = attempt(["web", "code"], 6)
    second = attempt(["web", "code", "rare"], 8)
    assert any(one >= 2000 for one in second) and max(Counter(first + second).values()) == 1
    assert audit(LocalStorage(tmp_path / "run")).verdict == "proved"


# --- refusals


def refused(lake: Path, kind: type[Exception], match: str, **given: Any) -> None:
    with pytest.raises(kind, match=match):
        mixed(sources_of(lake), **given)


def encoded(text: str) -> list[int]:
    return list(text.encode())


def test_bad_arguments_are_refused_by_name(lake: Path, tmp_path: Path) -> None:
    refused(lake, errors.ConfigError, "weights are numbers from 0 on", weights={**WEIGHTS, "web": -1})
    refused(lake, errors.ConfigError, "weights are numbers from 0 on", weights=dict.fromkeys(WEIGHTS, 0))
    refused(lake, errors.ConfigError, "granularity must be one of row, batch|granularity", granularity="token")
    refused(lake, errors.ConfigError, "schedule has at most 1000 pieces, at ascending", schedule=[(0, WEIGHTS)])
    refused(lake, errors.ConfigError, "weights name each source", schedule=[(5, {"web": 1})])
    with pytest.raises(errors.ConfigError, match="mix takes 1 to 1024 sources"):
        mix({})
    texts = LakeDataset(lake / "web", batch_size=8, columns=["text"])
    for exhausted in ("stop", "continue"):
        with pytest.raises(errors.ConfigError, match=rf"source 'web' .* only reading tells .*exhausted='{exhausted}'"):
            mix({"web": (pack(texts, column="text", length=8, tokenizer=encoded), 1)}, exhausted=exhausted)
    sources = sources_of(lake)
    with pytest.raises(errors.ConfigError, match=r"source 'web' must be \(LakeDataset, weight\)"):
        mix({"web": sources["web"]})  # type: ignore[dict-item]
    limited = LakeDataset(lake / "web", batch_size=8, options=ReadOptions(memory_limit_bytes=10**6))
    with pytest.raises(errors.ConfigError, match="source 'web' has a memory limit of its own"):
        mix({"web": (limited, 1)})
    read = LakeDataset(lake / "web", batch_size=8, rank=0, world_size=1)
    next(iter(read))
    with pytest.raises(errors.ConfigError, match="source 'web' has a place of its own: it was read"):
        mix({"web": (read, 1)})
    with pytest.raises(errors.ConfigError, match="source 'all' is a mixture"):
        mix({"all": (mixed(sources), 1)})
    with pytest.raises(errors.ConfigError, match="sources have the batch sizes"):
        mix({"a": (sources["web"], 1), "b": (LakeDataset(lake / "code", batch_size=4, rank=0, world_size=1), 1)})
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "empty" / "a.parquet")
    with pytest.raises(errors.ConfigError, match="source 'none' has no rows"):
        mix({"none": (LakeDataset(tmp_path / "empty", batch_size=8), 1)})


def test_columns_that_differ_are_refused_by_name(lake: Path) -> None:
    web, code = (LakeDataset(lake / name, batch_size=8, columns=["id"]) for name in ("web", "code"))
    other = LakeDataset(lake / "code", batch_size=8, columns=["id", "text"])
    with pytest.raises(errors.SchemaError, match="sources 'web' and 'code' have the columns"):
        mix({"web": (web, 1), "code": (other, 1)})
    with pytest.raises(errors.SchemaError, match="sources 'web' and 'code' have the columns"):
        mix({"web": (web, 1), "code": (pack(code, length=8), 1)})

    def narrow(batch: Any) -> Any:
        return {"id": batch["id"].to(torch.int32)}

    other = LakeDataset(lake / "code", batch_size=8, columns=["id"], transform=narrow)
    with pytest.raises(errors.SchemaError, match=r"column .id. of the sources .*int64.*int32"):
        take(LakeLoader(mix({"web": (web, 1), "code": (other, 1)})), 3)


def test_states_of_others_are_refused(lake: Path) -> None:
    loader = loader_of(lake)
    state = loader.state_dict()
    single = LakeLoader(sources_of(lake)["web"])
    with pytest.raises(errors.StateError, match="the state of one dataset, and this loader reads a mixture"):
        loader.load_state_dict(single.state_dict())
    with pytest.raises(errors.StateError, match="the state of a mixture, and this loader reads one dataset"):
        single.load_state_dict(state)
    fewer = LakeLoader(mixed({name: one for name, one in sources_of(lake).items() if name != "rare"}, num_lanes=12))
    with pytest.raises(errors.StateMismatch, match=r"a mixture of \['web', 'code', 'rare'\].* no source 'rare'"):
        fewer.load_state_dict(state)
    other = LakeLoader(mixed(sources_of(lake, seed=4), num_lanes=12))
    with pytest.raises(errors.StateMismatch, match=r"source 'web' of the mixture: .*seed"):
        other.load_state_dict(state)
    assert other.state_dict()["step"] == 0
    with pytest.raises(errors.ConfigError, match="this loader reads one dataset"):
        LakeLoader(sources_of(lake)["web"]).set_weights({"web": 1})


@pytest.mark.parametrize(
    ("names", "given", "differs"),
    [
        (["web", "rare", "code"], {}, "the number of source '(code|rare)': [12] in this mixture, [12] in the state"),
        (list(ROWS), {"seed": 2}, "seed: 2 in this mixture, 1 in the state"),
        (list(ROWS), {"granularity": "batch"}, "granularity: 'batch' in this mixture, 'row' in the state"),
    ],
)
def test_a_run_goes_on_with_the_mixture_that_it_began_with(
    lake: Path, tmp_path: Path, names: list[str], given: dict[str, Any], differs: str
) -> None:
    loader = loader_of(lake)
    with CheckpointManager(tmp_path / "run", {"reader": loader}) as manager:
        manager.restore()
        for batch in take(loader, 3):
            manager.step(batch)
    sources = sources_of(lake)
    other = LakeLoader(mixed({name: sources[name] for name in names}, num_lanes=12, **given))
    with pytest.raises(errors.StateMismatch, match=differs):
        other.load_state_dict(loader.state_dict())
    manager = CheckpointManager(tmp_path / "run", {"reader": other})
    with pytest.raises(errors.LakeckptError, match=differs):
        manager.restore()
    manager.close()


def test_what_transforms_return_is_refused_where_it_makes_no_rows_of_one_batch(lake: Path) -> None:
    def refused_of(transform: Any, match: str, columns: tuple[str, ...] = ("id",), **given: Any) -> None:
        code = LakeDataset(lake / "code", batch_size=8, columns=columns)
        web = LakeDataset(lake / "web", batch_size=8, columns=columns, transform=transform)
        with pytest.raises(errors.SchemaError, match=match):
            take(LakeLoader(mix({"web": (web, 1), "code": (code, 1)}, **given)), 2)

    for columns in (("id",), ("text",), ("tokens",)):
        refused_of(lambda batch: {name: one[:1] for name, one in batch.items()}, r"are of \[1, 4\] rows", columns)
    refused_of(lambda batch: {"id": 7}, "column 'id' of the sources")
    refused_of(lambda batch: [batch["id"]], "transform of source 'web' returned a list")
    refused_of(lambda batch: dict(batch), "source_column='id' adds a column", source_column="id")


def test_transforms_may_give_dicts_and_types_that_numpy_does_not_have(lake: Path) -> None:
    def halved(batch: Any) -> Any:
        return {"x": {"half": batch["id"].to(torch.bfloat16) / 2}, "id": batch["id"]}

    def other(batch: Any) -> Any:
        return {"x": {"full": batch["id"].to(torch.bfloat16)}, "id": batch["id"]}

    web, code, unlike = (
        LakeDataset(lake / name, batch_size=8, columns=["id"], transform=transform)
        for name, transform in (("web", halved), ("code", halved), ("code", other))
    )
    for batch in take(LakeLoader(mix({"web": (web, 1), "code": (code, 1)})), 4):
        assert torch.equal(batch["x"]["half"], batch["id"].to(torch.bfloat16) / 2)
    with pytest.raises(errors.SchemaError, match="column 'x' of the sources 'web', 'code' are dict"):
        take(LakeLoader(mix({"web": (web, 1), "code": (unlike, 1)})), 1)


def test_the_law_as_a_call_is_of_one_dataset(lake: Path) -> None:
    with pytest.raises(errors.ConfigError, match="got one of a mixture: check each source by itself"):
        assert_exactly_once(lambda rank, world_size, workers: loader_of(lake, rank, world_size, workers=workers))


def test_other_loaders_workers_are_refused(lake: Path) -> None:
    with pytest.raises(errors.ConfigError, match="LakeLoader"):
        next(iter(torch.utils.data.DataLoader(mixed(sources_of(lake)), batch_size=None, num_workers=1)))


def test_a_mixture_is_read_in_this_process_without_a_loader(lake: Path) -> None:
    dataset = mixed(sources_of(lake), num_lanes=12)

    def batches() -> Iterator[Any]:
        yield from itertools.islice(iter(dataset), 5)

    assert [rows_of(one) for one in batches()] == [rows_of(one) for one in take(loader_of(lake), 5)]
    again = mixed(sources_of(lake), num_lanes=12)
    again.load_state_dict(dataset.state_dict())
    assert rows_of(next(iter(again))) == rows_of(take(loader_of(lake), 6)[5])


def test_the_public_names() -> None:
    assert {"mix", "MixedReceipt"} <= set(lakeckpt.__all__)


def test_a_batch_of_a_mixture_holds_no_memory_of_other_batches(lake: Path) -> None:
    for batch in take(LakeLoader(mixed(sources_of(lake))), 20):
        for column in batch.values():
            if isinstance(column, torch.Tensor):
                assert column.untyped_storage().nbytes() == column.nbytes


@pytest.mark.parametrize("granularity", ["row", "batch"])
def test_packed_sources_of_other_types_of_tokens_are_refused_when_they_are_mixed(
    tmp_path: Path, granularity: Any
) -> None:
    sources = {}
    for name, kind in (("a", pa.int32()), ("b", pa.int64())):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"tokens": pa.array([[1, 2, 3]] * 9, pa.list_(kind))}), tmp_path / name / "0.parquet")
        sources[name] = (pack(LakeDataset(tmp_path / name, batch_size=2), length=4), 1.0)
    with pytest.raises(errors.SchemaError, match=r"'tokens' of the sources 'a' and 'b' is int32 .* and int64 seq"):
        mix(sources, granularity=granularity)


def test_a_source_of_which_nothing_is_read_is_named(lake: Path) -> None:
    web, code = (LakeDataset(lake / name, batch_size=8, rank=0, world_size=1) for name in ("web", "code"))
    none = LakeDataset(lake / "code", batch_size=8, filters=[("id", "<", -5)], rank=0, world_size=1)
    for sources in ({"web": (web, 1.0), "none": (none, 1.0)}, {"none": (none, 1.0), "code": (code, 1.0)}):
        with pytest.raises(errors.ConfigError, match=r"source 'none' of the mixture cannot be read: .* keeps none"):
            next(iter(LakeLoader(mix(sources))))
