"""Transforms: run where rows are read, return anything, and get randomness that workers and restores do not change."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from lakeckpt import Batch, LakeDataset, LakeLoader, Ragged, TransformContext, prefetch
from lakeckpt.data.base.transform import bind_transform, leading_sizes
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import ROWS, as_json, loader_of, some


def noisy(batch: Batch, context: TransformContext) -> dict[str, Any]:
    noise = torch.rand(len(batch["id"]), generator=context.generator())
    other = torch.from_numpy(context.numpy_generator().random(len(batch["id"])))
    seeds = torch.from_numpy(context.row_seeds.astype(np.int64))
    return {"id": batch["id"], "noise": noise, "other": other, "seeds": seeds}


def noisy_row(row: Batch, context: TransformContext) -> tuple[int, float, int]:
    (seed,) = context.row_seeds.tolist()
    return int(row["id"]), float(torch.rand(1, generator=context.generator())), seed


def by_row(batches: Any, *names: str) -> dict[int, tuple[Any, ...]]:
    found: dict[int, tuple[Any, ...]] = {}
    for batch in batches:
        for row, *values in zip(*(batch[name].tolist() for name in ("id", *names)), strict=True):
            assert row not in found
            found[row] = tuple(values)
    return found


def test_randomness_is_the_same_over_workers_and_restores(lake: Path) -> None:
    whole = by_row(loader_of(lake, transform=noisy, num_lanes=4), "noise", "other", "seeds")
    assert len(whole) == ROWS and len({noise for noise, _, _ in whole.values()}) == ROWS
    for num_workers in (0, 2):
        loader = loader_of(lake, transform=noisy, num_lanes=4, num_workers=num_workers)
        before = some(loader, 3)
        resumed = loader_of(lake, transform=noisy)
        resumed.load_state_dict(as_json(loader.state_dict()))
        assert by_row([*before, *resumed], "noise", "other", "seeds") == whole


def test_row_seeds_survive_a_re_cut_and_differ_between_rows_epochs_and_seeds(lake: Path) -> None:
    whole = by_row(loader_of(lake, transform=noisy, num_lanes=4), "seeds")
    loader = loader_of(lake, transform=noisy, num_lanes=4)
    parts = some(loader, 3)
    state = as_json(loader.state_dict())
    for rank in range(3):
        other = loader_of(lake, transform=noisy, batch_size=5, rank=rank, world_size=3)
        other.load_state_dict(state)
        parts += list(other)
    assert by_row(parts, "seeds") == whole
    list(loader)
    later = by_row(loader, "seeds")
    reseeded = by_row(loader_of(lake, transform=noisy, num_lanes=4, seed=1), "seeds")
    assert len({seed for one in (whole, later, reseeded) for (seed,) in one.values()}) == 3 * ROWS


def test_rows_have_randomness_of_their_own_and_seeds_as_in_batches(lake: Path) -> None:
    batched = by_row(loader_of(lake, transform=noisy, num_lanes=2), "seeds")
    rows = list(loader_of(lake, transform=noisy_row, batch_size=None, num_lanes=2))
    assert {row: (np.uint64(seed).astype(np.int64).item(),) for row, _, seed in rows} == batched
    assert len({noise for _, noise, _ in rows}) == ROWS
    loader = loader_of(lake, transform=noisy_row, batch_size=None, num_lanes=2, num_workers=2)
    before = some(loader, 8)
    resumed = loader_of(lake, transform=noisy_row, batch_size=None)
    resumed.load_state_dict(as_json(loader.state_dict()))
    assert before + list(resumed) == rows


class Anything:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


def as_anything(batch: Batch) -> Anything:
    return Anything(batch["id"].tolist())


def rows_of(item: Anything) -> list[int]:
    return item.rows


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_may_return_anything_and_the_receipt_is_still_known(lake: Path, num_workers: int) -> None:
    loader = loader_of(lake, transform=as_anything, num_workers=num_workers)
    rows = []
    for item in loader:
        assert isinstance(item, Anything)
        assert loader.last_receipt is not None and loader.last_receipt.rows == len(item.rows)
        rows += item.rows
    assert sorted(rows) == list(range(ROWS))


def test_the_law_holds_for_anything_with_a_key(lake: Path) -> None:
    def make_loader(rank: int, world_size: int, num_workers: int) -> LakeLoader:
        dataset = LakeDataset(lake, batch_size=4, transform=as_anything, rank=rank, world_size=world_size)
        return LakeLoader(dataset, num_workers=num_workers)

    assert_exactly_once(make_loader, topologies=[(1, 0), (2, 0)], key=rows_of, expected=range(ROWS))


def test_a_dict_that_a_transform_returns_is_a_batch_with_its_receipt(lake: Path) -> None:
    for batch in loader_of(lake, transform=lambda batch: {"n": len(batch["id"])}):
        assert isinstance(batch, Batch) and batch.receipt.rows == batch["n"]


def test_outputs_of_every_kind_reach_the_transform(lake: Path) -> None:
    kinds = {"torch": Batch, "numpy": Batch, "arrow": pa.Table}
    for (output, kind), batch_size in itertools.product(kinds.items(), (4, None)):
        seen: list[Any] = []
        loader = loader_of(lake, batch_size=batch_size, output=output, transform=seen.append)
        assert all(item is None for item in loader)
        assert {type(item) for item in seen} == {kind}
        assert len(seen) == (ROWS if batch_size is None else 10), (output, batch_size)


def global_streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_and_resuming_draw_nothing_from_global_random_streams(lake: Path, num_workers: int) -> None:
    before = global_streams()
    loader = loader_of(lake, transform=noisy, num_workers=num_workers)
    some(loader, 2)
    resumed = loader_of(lake, transform=noisy, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    list(resumed)
    assert global_streams() == before


def global_draws(batch: Batch) -> dict[str, Any]:
    return {"torch": torch.rand(1).item(), "numpy": np.random.random(), "python": random.random()}


def test_global_streams_of_workers_depend_on_seed_and_place_alone(lake: Path) -> None:
    def epochs(count: int, **case: Any) -> list[list[dict[str, Any]]]:
        loader = loader_of(lake, transform=global_draws, num_workers=1, **case)
        return [list(map(dict, loader)) for _ in range(count)]

    two = epochs(2)
    later = loader_of(lake, transform=global_draws, num_workers=1)
    later.set_epoch(1)
    assert list(map(dict, later)) == two[1]
    drawn = [batch["torch"] for epoch in [*two, *epochs(1, seed=1)] for batch in epoch]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_of_the_users_own_is_drawn_from_where_there_are_workers(lake: Path, num_workers: int) -> None:
    theirs = torch.Generator().manual_seed(5)
    list(loader_of(lake, num_workers=num_workers, loader={"generator": theirs}))
    is_drawn_from = not torch.equal(theirs.get_state(), torch.Generator().manual_seed(5).get_state())
    assert is_drawn_from == bool(num_workers)


def takes_context(batch: Any, context: Any) -> Any:
    return context


def named_context(batch: Any, factor: int = 2, *, context: Any = None) -> Any:
    return context


def optional_context(batch: Any, context: Any = None) -> Any:
    return context


def third_context(batch: Any, factor: int = 2, context: Any = None) -> Any:
    assert factor == 2
    return context


def other_default(batch: Any, factor: int = 2) -> Any:
    return factor


class Callable_:
    def __call__(self, batch: Any, context: Any) -> Any:
        return context

    def method(self, batch: Any, context: Any) -> Any:
        return context


@pytest.mark.parametrize(
    ("transform", "gets_it"),
    [
        (takes_context, True),
        (optional_context, True),
        (named_context, True),
        (third_context, True),
        (other_default, False),
        (Callable_(), True),
        (Callable_().method, True),
        (functools.partial(takes_context), True),
        (lambda batch: None, False),
        (dict, False),
        (len, False),
        (lambda *batches: len(batches), False),
    ],
)
def test_a_transform_gets_its_context_where_it_asks_for_it(transform: Any, gets_it: bool) -> None:
    bound = bind_transform(transform)
    context = object()
    assert bound is not None
    found = bound({}, context)  # type: ignore[arg-type]
    assert (found is context) == gets_it


def _within(batch: Batch) -> dict[str, Batch]:
    return {"inner": Batch({"x": batch["id"]})}  # which has no receipt


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_a_transform_made_anew_comes_from_workers_too(lake: Path, num_workers: int) -> None:
    (found, *_) = LakeLoader(LakeDataset(lake, batch_size=10, transform=_within), num_workers=num_workers)
    assert len(found["inner"]["x"]) == 10


# --- transforms that raise


def fails_at_20(batch: Batch) -> Batch:
    if 20 in batch["id"].tolist():
        raise ZeroDivisionError("row 20")
    return batch


@pytest.mark.parametrize("kind", ["in process", "workers", "prefetch", "dataset", "rows", "another loader"])
def test_an_iterator_whose_transform_raised_raises_the_same_again_and_never_looks_ended(lake: Path, kind: str) -> None:
    dataset = LakeDataset(lake, batch_size=4, transform=fails_at_20, rank=0, world_size=1)
    readers = {
        "in process": lambda: LakeLoader(dataset),
        "workers": lambda: LakeLoader(dataset, num_workers=1),
        "prefetch": lambda: prefetch(LakeLoader(dataset)),
        "dataset": lambda: dataset,
        "rows": lambda: LakeLoader(LakeDataset(lake, batch_size=4, transform=fails_at_row_20, rows="many")),
        "another loader": lambda: torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1),
    }
    batches = iter(readers[kind]())
    with pytest.raises(ZeroDivisionError, match="row 20"):
        list(batches)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="row 20"):
            next(batches)


def fails_at_row_20(row: Batch) -> Any:
    if row["id"] == 20:
        raise ZeroDivisionError("row 20")
    yield dict(row)


def test_a_new_iterator_goes_on_at_the_batch_whose_transform_raised(lake: Path) -> None:
    loader = loader_of(lake, shuffle=False, transform=fails_at_20)
    batches = iter(loader)
    assert len(list(itertools.islice(batches, 5))) == 5
    errors = []
    for anew in (False, False, True):
        with pytest.raises(ZeroDivisionError) as caught:
            next(iter(loader) if anew else batches)
        errors.append(caught.value)
    assert errors[0] is errors[1] is not errors[2]


# --- rows that are held back


class Packer:
    """Gives sequences of three rows, and holds back the rows that do not fill one."""

    def __init__(self) -> None:
        self.held = torch.zeros(0, dtype=torch.int64)

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        rows = torch.cat([self.held, batch["id"]])
        whole = len(rows) // 3 * 3
        self.held = rows[whole:]
        return {"ids": rows[:whole].reshape(-1, 3)}


HELD_BACK = r"got 4 rows and returned 1 \(epoch 0, step 0 of rank 0\).* keep nothing between calls"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_that_holds_rows_back_is_warned_of_once_in_the_main_process(lake: Path, num_workers: int) -> None:
    loader = loader_of(lake, transform=Packer(), num_workers=num_workers)
    with pytest.warns(UserWarning, match=HELD_BACK) as warned:
        epochs = [list(loader), list(loader)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    assert len(warned) == 1 and warned[0].filename == __file__


def test_it_is_warned_of_where_the_dataset_is_read_without_a_lake_loader(lake: Path) -> None:
    with pytest.warns(UserWarning, match=HELD_BACK) as warned:
        list(loader_of(lake, transform=Packer()).dataset)
    assert len(warned) == 1


def test_it_is_warned_of_in_a_worker_of_another_loader(lake: Path) -> None:
    dataset = loader_of(lake, transform=Packer()).dataset
    with pytest.raises(UserWarning, match=HELD_BACK):  # warnings are errors here, in workers, too
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))


@pytest.mark.parametrize(
    ("returned", "sizes"),
    [
        ({"x": torch.zeros(4, 2), "y": np.zeros(4)}, {4}),
        ({"x": torch.zeros(5), "n": 7, "scale": torch.tensor(1.0), "name": "text"}, {5}),
        ({"x": torch.zeros(4), "weights": torch.zeros(9)}, {4, 9}),
        ({"x": {"inner": torch.zeros(2)}, "text": ["a", "b"]}, {2}),
        ((torch.zeros(4, 3), torch.zeros(4)), {4}),
        (torch.zeros(3, 2), {3}),
        (np.zeros(()), set()),
        (pa.table({"x": [1, 2, 3]}), {3}),
        ([{"x": 1}, {"x": 2}], {2}),
        ([torch.zeros(4), torch.zeros(4)], {2, 4}),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)], layout=torch.jagged), {2}),
        (Ragged(values=np.zeros(5), offsets=np.array([0, 2, 5]), kind="list"), {2}),
        ("text", set()),
        (None, set()),
        ({}, set()),
        (Anything([1]), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_number_of_rows_is_told_of_what_has_columns_and_of_nothing_else(returned: Any, sizes: set[int]) -> None:
    assert leading_sizes(returned) == sizes


@pytest.mark.parametrize(
    "transform",
    [
        lambda batch: {"id": batch["id"], "table": torch.zeros(9)},
        lambda batch: [torch.zeros(len(batch["id"])), torch.zeros(len(batch["id"]))],
        lambda batch: {"sum": batch["id"].sum()},
        lambda batch: None,
    ],
)
def test_a_transform_that_may_have_given_all_its_rows_is_not_warned_of(lake: Path, transform: Any) -> None:
    list(loader_of(lake, transform=transform))


def test_single_rows_are_not_counted(lake: Path) -> None:
    assert len(list(loader_of(lake, batch_size=None, transform=lambda row: [row["id"]] * 3))) == ROWS
