"""What accelerate, transformers' Trainer and Lightning do with a LakeLoader or LakeDataset, done here as they do it.

The doubles are cut down from accelerate 1.15, transformers 5.24 and Lightning 2.6, in modules of the same names: what
lakeckpt recognises is who calls. None of the frameworks is needed here; ``tests/frameworks`` asks accelerate and
transformers themselves.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lakeckpt import LakeDataset, LakeLoader, mix
from lakeckpt.data.base.batch import Batch
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.reading.columns.ragged import Ragged
from tests.data.reading import ROWS, dataset_of, flat, ids, loader_of, some, table_of
from tests.patience import PATIENCE_S

EVERY = list(range(ROWS))

ACCELERATE = """
from torch.utils.data import DataLoader, IterableDataset

class DataLoaderShard:
    def __init__(self, dataset, skip_batches=0, use_stateful_dataloader=False, **options):
        self.base_dataloader = DataLoader(dataset, **options)
        self.skip_batches, self.use_stateful_dataloader = skip_batches, use_stateful_dataloader

    def __iter__(self):
        ahead = None
        for index, batch in enumerate(self.base_dataloader):
            if index > self.skip_batches:
                yield ahead
            ahead = batch
        yield ahead

class DataLoaderDispatcher(DataLoaderShard):
    pass

class SkipDataLoader(DataLoaderShard):
    def __iter__(self):
        for index, batch in enumerate(self.base_dataloader):
            if index >= self.skip_batches:
                yield batch

class IterableDatasetShard(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        yield from (row for index, row in enumerate(self.dataset) if index % 2 == 0)
"""

LIGHTNING = """
def state_dicts(loaders):
    return [loader.state_dict() for loader in loaders]

def load_state_dicts(loaders, states):
    for loader, state in zip(loaders, states):
        loader.load_state_dict(state)
"""


PREPARE = """
def prepare(loader):
    assert getattr(loader, "_is_accelerate_prepared", False), "accelerate would make another loader of its dataset"
    return loader
"""


def module(monkeypatch: pytest.MonkeyPatch, name: str, source: str = "") -> Any:
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module(monkeypatch, "accelerate.data_loader", ACCELERATE)


class GradientState:
    loaders: list[Any] = []  # noqa: RUF012 - accelerate's is one for the process, too

    def _add_dataloader(self, loader: Any) -> None:
        self.loaders.append(loader)

    def _remove_dataloader(self, loader: Any) -> None:
        self.loaders.remove(loader)


def send_to_device(item: Any, device: Any) -> Any:
    if hasattr(item, "to"):
        return item.to(device)
    return type(item)({name: send_to_device(one, device) for name, one in item.items()})


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    state = module(monkeypatch, "accelerate.state")
    state.GradientState = GradientState
    state.PartialState = lambda: types.SimpleNamespace(device=torch.device("meta"))
    module(monkeypatch, "accelerate.utils.operations").send_to_device = send_to_device

    return module(monkeypatch, "accelerate.accelerator", PREPARE).prepare


def test_who_looks_at_a_loader_does_not_prepare_it(lake: Path) -> None:
    loader = loader_of(lake)
    assert dict(inspect.getmembers(loader))["_is_accelerate_prepared"] is False
    assert sum(len(batch["id"]) for batch in loader) == sum(len(batch["id"]) for batch in loader_of(lake))


# --- batches that are made anew


def remade(batch: Any) -> Any:
    """As transformers' Trainer, DataParallel and others do."""
    return type(batch)(dict(batch))


def test_a_batch_is_moved_with_its_receipt_and_all_that_it_holds(lake: Path) -> None:
    batch = next(iter(loader_of(lake)))
    offsets, values = torch.tensor([0, 1, 3]), torch.tensor([1, 2, 3])
    batch["more"] = {"ragged": Ragged(values=values, offsets=offsets), "pair": (values, "text"), "one": [values]}
    moved = batch.to("meta")
    assert type(moved) is Batch and moved.receipt is batch.receipt and moved["id"].device.type == "meta"
    more = moved["more"]
    assert more["ragged"].values.device.type == more["pair"][0].device.type == more["one"][0].device.type == "meta"
    assert more["pair"][1] == "text" and batch["id"].device.type == "cpu"


def test_a_batch_made_anew_says_where_its_receipt_is(lake: Path) -> None:
    loader = loader_of(lake)
    batch = remade(next(iter(loader)))
    assert batch["id"].tolist() and not hasattr(batch, "receipt")
    with pytest.raises(AttributeError, match=r"loader\.last_receipt"):
        _ = batch.receipt
    with pytest.raises(AttributeError, match="'Batch' object has no attribute 'rows'"):
        _ = batch.rows
    for again in (copy.copy(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert type(again) is Batch and not hasattr(again, "receipt")


@pytest.mark.parametrize(
    ("kind", "batch_size", "num_workers", "shape"),
    [
        (DataLoader, None, 0, (8,)),
        (DataLoader, None, 1, (8,)),
        (DataLoader, 4, 0, (8, 4)),
        (StatefulDataLoader, None, 0, (8,)),
        (StatefulDataLoader, 4, 0, (8, 4)),
    ],
)
def test_what_default_collate_makes_of_several_has_the_receipt_of_none(
    lake: Path, kind: Any, batch_size: int | None, num_workers: int, shape: tuple[int, ...]
) -> None:
    dataset = LakeDataset(table_of(lake), batch_size=batch_size, columns=["id"], transform=with_pair)
    both, number = next(iter(kind(dataset, batch_size=8, num_workers=num_workers)))
    assert type(both) is Batch and not hasattr(both, "receipt")
    assert both["id"].shape == shape and both["more"]["pair"][0].shape == (8,) and number.shape == (8,)
    assert both["id"].reshape(-1).tolist() == list(range(both["id"].numel()))


def test_one_row_that_default_collate_makes_a_batch_of_keeps_its_receipt(lake: Path) -> None:
    dataset = LakeDataset(table_of(lake), batch_size=None, columns=["id"])
    for number, row in enumerate(itertools.islice(DataLoader(dataset, batch_size=1), 3)):
        assert type(row) is Batch and row["id"].shape == (1,) and row.receipt.step == number


def with_pair(batch: Any) -> Any:
    batch["more"] = {"pair": (1.5, "text")}
    return batch, 7


def test_one_batch_that_torch_converts_keeps_its_receipt(lake: Path) -> None:
    dataset = LakeDataset(table_of(lake), batch_size=4, output="numpy")
    found = next(iter(DataLoader(dataset, batch_size=None)))
    assert type(found) is Batch and isinstance(found["id"], torch.Tensor) and found.receipt.rows == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_transform_makes_anew_has_its_receipt(lake: Path, num_workers: int) -> None:
    loader = loader_of(lake, num_workers=num_workers, transform=remade)
    assert [len(batch["id"]) == batch.receipt.rows for batch in loader] == [True] * 10


# --- loops that count steps


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_loop_that_counts_steps_goes_from_epoch_to_epoch(lake: Path, batch_size: int | None) -> None:
    expected = loader_of(lake, batch_size=batch_size)
    loader = loader_of(lake, batch_size=batch_size)
    dataset = LakeDataset(table_of(lake), batch_size=batch_size, shuffle=True)
    for _ in range(3):
        epoch = flat(expected)
        for one in (loader, dataset):
            assert flat(some(one, len(one))) == epoch


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_that_count_their_rows_go_from_epoch_to_epoch_together(lake: Path, world_size: int, loads: bool) -> None:
    """Of 37 rows, some ranks get one more than others, in a last step that has none for those."""
    epochs: list[list[int]] = [[], [], []]
    consumed = []
    for rank in range(world_size):
        case = {"num_lanes": 2 * world_size, "rank": rank, "world_size": world_size}
        loader = loader_of(lake, batch_size=None, **case)
        one = loader if loads else loader.dataset
        for number, epoch in enumerate(epochs):
            epoch += flat(some(one, len(one)))
            assert one.epoch == number
        some(one, 1)
        consumed.append(loader._reader.stretches())
    assert [sorted(epoch) for epoch in epochs] == [EVERY] * 3
    assert consumed == consumed[:1] * world_size


def test_ranks_say_the_same_until_one_gets_a_last_row_that_does_not_suffice_for_all(lake: Path) -> None:
    loaders = [loader_of(lake, batch_size=None, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(ROWS // 2):
        for iterator in iterators:
            next(iterator)
        state = loaders[0].state_dict()
        assert state == loaders[1].state_dict()
    for loader in loaders:
        loader.load_state_dict(state)
    assert [len(flat(loader)) for loader in loaders] == [1, 0]


def test_a_place_at_the_end_that_was_loaded_is_seen_once(lake: Path) -> None:
    loader = loader_of(lake)
    some(loader, len(loader))
    other = loader_of(lake)
    other.load_state_dict(loader.state_dict())
    assert other.epoch == 0 and flat(other) == [] and other.epoch == 1 and sorted(flat(other)) == EVERY


def test_a_sampler_tells_the_epoch_and_an_iterator_that_waits_goes_there(lake: Path) -> None:
    loader = loader_of(lake)
    orders = [flat(loader) for _ in range(3)]
    loader = loader_of(lake)
    waiting = iter(loader)
    loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert flat(waiting) == orders[2]
    loader = loader_of(lake)
    begun = iter(loader)
    next(begun)
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    next(begun)
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    with pytest.raises(StateUnavailable, match="out of date"):
        next(begun)
    assert flat(loader) == orders[1]


def test_an_iterator_that_waits_goes_nowhere_that_only_its_user_went(lake: Path) -> None:
    loader = loader_of(lake)
    waiting = iter(loader)
    loader.rewind()
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    with pytest.raises(StateUnavailable, match="out of date"):
        next(waiting)


def test_the_sampler_of_a_copy_tells_the_copy(lake: Path) -> None:
    loader = loader_of(lake)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        other.sampler.set_epoch(3)
        assert (other.epoch, loader.epoch) == (3, 0)


# --- accelerate


def test_a_prepared_loader_puts_batches_on_the_device_and_tells_the_last(lake: Path, prepare: Any) -> None:
    loader = prepare(loader_of(lake))
    told = []
    for batch in loader:
        assert GradientState.loaders == [loader] and batch["id"].device.type == "meta" and loader.remainder == -1
        assert batch.receipt == loader.last_receipt
        told.append(loader.end_of_dataloader)
    assert told == [False] * 9 + [True] and GradientState.loaders == []
    assert next(iter(loader_of(lake)))["id"].device.type == "cpu"


def test_a_prepared_loader_of_rows_tells_the_last_row(lake: Path, prepare: Any) -> None:
    loader = prepare(loader_of(lake, batch_size=None))
    assert [loader.end_of_dataloader for _ in loader] == [False] * (ROWS - 1) + [True]


def test_a_prepared_loader_is_not_ahead_of_its_loop_and_enters_its_checkpoints(lake: Path, prepare: Any) -> None:
    whole = ids(loader_of(lake))
    loader = prepare(loader_of(lake, num_workers=1))
    some(loader, 3)
    assert GradientState.loaders == [], "a loop that breaks leaves accelerate's list, too"
    assert loader.use_stateful_dataloader  # accelerate asks it before it calls state_dict and load_state_dict
    other = loader_of(lake)
    other.load_state_dict(loader.state_dict())
    assert ids(other) == whole[3:]


def test_a_mixture_is_prepared_and_stays_where_a_framework_counts_epochs(lake: Path, prepare: Any) -> None:
    sources = {name: (dataset_of(table_of(lake), batch_size=4, columns=["id"]), 1.0) for name in ("one", "other")}
    loader = prepare(LakeLoader(mix(sources, batch_size=4)))
    batches = iter(loader)
    first = next(batches)
    loader.set_epoch(0)
    assert first["id"].device.type == next(batches)["id"].device.type == "meta" and not loader.end_of_dataloader
    with pytest.raises(ConfigError, match="no epoch to go to"):
        loader.set_epoch(1)


def rows_of(lake: Path, **options: Any) -> LakeDataset:
    return dataset_of(table_of(lake), batch_size=None, columns=["id"], **options)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "multiprocessing_context": "spawn"}])
def test_rows_that_are_dealt_are_not_dealt_again_by_one_rank(lake: Path, accelerate: Any, options: Any) -> None:
    loader = accelerate.DataLoaderDispatcher(rows_of(lake, rank=0, world_size=2), batch_size=4, **options)
    with pytest.raises(ConfigError, match=r"rank 0 of 2.*DataLoaderDispatcher would deal.*LakeLoader"):
        next(iter(loader))
    del loader


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_that_are_dealt_are_not_dealt_again_by_each_rank(lake: Path, accelerate: Any, num_workers: int) -> None:
    shard = accelerate.IterableDatasetShard(rows_of(lake, rank=1, world_size=2))
    loader = accelerate.DataLoaderShard(shard, batch_size=4, num_workers=num_workers)
    with pytest.raises(ConfigError, match=r"rank 1 of 2.*IterableDatasetShard would deal"):
        next(iter(loader))


def test_accelerate_may_deal_the_rows_of_a_dataset_that_does_not(lake: Path, accelerate: Any) -> None:
    shard = accelerate.IterableDatasetShard(rows_of(lake, rank=0, world_size=1))
    assert flat(accelerate.DataLoaderShard(shard, batch_size=4)) == EVERY[::2]


def test_other_loaders_of_a_rank_are_left_alone(lake: Path, accelerate: Any) -> None:
    found = [flat(DataLoader(rows_of(lake, rank=rank, world_size=2), batch_size=4)) for rank in (0, 1)]
    assert sorted(found[0] + found[1]) == EVERY


def test_a_dataset_that_is_read_ahead_gives_no_state(lake: Path, accelerate: Any) -> None:
    dataset = rows_of(lake)
    before = dataset.state_dict()
    reading = iter(accelerate.DataLoaderShard(dataset, batch_size=4))
    next(reading)
    with pytest.raises(StateUnavailable, match=r"DataLoaderShard, which is a batch ahead"):
        dataset.state_dict()
    del reading
    dataset.load_state_dict(before)
    assert dataset.state_dict() == before
    reading = iter(accelerate.DataLoaderShard(dataset, batch_size=4, use_stateful_dataloader=True))
    next(reading)
    assert dataset.state_dict() != before  # torchdata's loader asks for it, and accelerate knows which one counts


def test_skipping_is_refused_where_it_would_skip_others(lake: Path, accelerate: Any) -> None:
    loader = loader_of(lake)
    some(loader, 3)
    for skipping in (accelerate.SkipDataLoader, accelerate.DataLoaderShard):
        with pytest.raises(StateUnavailable, match=r"drop them.*ignore_data_skip=True"):
            next(iter(skipping(loader.dataset, skip_batches=3, batch_size=None)))
    fresh = loader_of(lake).dataset
    with pytest.raises(StateUnavailable, match="drop them"):
        next(iter(accelerate.SkipDataLoader(fresh, skip_batches=3, batch_size=None)))
    whole = ids(loader_of(lake))
    assert ids(accelerate.DataLoaderShard(fresh, skip_batches=3, batch_size=None)) == whole[3:]


# --- Lightning


class Fit:
    """Lightning's loops, where they touch a loader: as FitLoop and its fetcher of batches do."""

    def __init__(self, combined: Any, loader: LakeLoader, resumed: Mapping[str, Any] | None = None) -> None:
        self.combined, self.loader = combined, loader
        self.epoch, self.step = (0, 0) if resumed is None else resumed["at"]
        length = len(loader)
        if resumed is not None and resumed["loaders"]:
            combined.load_state_dicts([loader], resumed["loaders"])
        self.iterator = iter(loader)
        self.length = min(length, len(loader))
        self.set_epoch()

    def set_epoch(self) -> None:
        self.loader.sampler.set_epoch(self.epoch)  # type: ignore[attr-defined]

    def take(self, count: int) -> list[list[int]]:
        """The ids of the next batches."""
        found: list[list[int]] = []
        while len(found) < count:
            if self.step == self.length:
                self.epoch, self.step = self.epoch + 1, 0
                self.set_epoch()
                self.iterator = iter(self.loader)
            found += ids([next(self.iterator)])
            self.step += 1
        return found

    def checkpoint(self) -> dict[str, Any]:
        at = (self.epoch + 1, 0) if self.step == self.length else (self.epoch, self.step)
        return {"at": at, "loaders": self.combined.state_dicts([self.loader])}


@pytest.fixture
def combined(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module(monkeypatch, "lightning.pytorch.utilities.combined_loader", LIGHTNING)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("done", [0, 4, 9, 10, 13, 20])
def test_lightning_reads_every_epoch_and_goes_on_from_any_step(
    lake: Path, combined: Any, done: int, num_workers: int
) -> None:
    loader = loader_of(lake)
    expected = [batch for _ in range(3) for batch in ids(loader)]
    first = Fit(combined, loader_of(lake, num_workers=num_workers))
    assert first.take(done) == expected[:done]
    again = Fit(combined, loader_of(lake, num_workers=num_workers), first.checkpoint())
    assert again.take(30 - done) == expected[done:]


def ranks_of(lake: Path, combined: Any, world_size: int, resumed: Any = None) -> list[Fit]:
    ranks = range(world_size)
    loaders = [loader_of(lake, rank=rank, world_size=world_size, num_lanes=2) for rank in ranks]
    return [Fit(combined, loader, resumed) for loader in loaders]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_lightning_goes_on_with_other_ranks_between_epochs_only(
    lake: Path, combined: Any, before: int, after: int
) -> None:
    jobs = ranks_of(lake, combined, before)
    for fit in jobs:
        fit.take(3)
    with pytest.raises(StateUnavailable, match=rf"step 3 of epoch 0 with {after} ranks, and was saved with {before}"):
        ranks_of(lake, combined, after, jobs[0].checkpoint())
    for fit in jobs:
        fit.take(fit.length - 3)
    with pytest.raises(StateUnavailable, match=rf"with {after} ranks, and was saved with {before}"):
        ranks_of(lake, combined, after, jobs[0].checkpoint())  # of the last step
    # Of a checkpoint that it made when the epoch was over, Lightning loads no loader's state.
    jobs = ranks_of(lake, combined, after, {**jobs[0].checkpoint(), "loaders": None})
    assert [fit.loader.epoch for fit in jobs] == [1] * after
    for _ in range(2):
        rows = [row for fit in jobs for batch in fit.take(fit.length) for row in batch]
        assert sorted(rows) == EVERY


def test_the_state_of_an_endless_loader_is_refused_to_lightning_which_has_fetched_ahead(
    lake: Path, combined: Any
) -> None:
    loader = loader_of(lake, endless=True)
    next(iter(loader))
    with pytest.raises(StateUnavailable, match="fetches a batch ahead of a loader without a length"):
        combined.state_dicts([loader])
    assert loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_read_when_the_interpreter_ends_says_nothing(lake: Path, workers: int) -> None:
    script = f"""
import torch, lakeckpt, lakeckpt.data.base.ahead, lakeckpt.data.workers.slots, lakeckpt.reading.windows.positions
# Emptied before torch is, which was loaded sooner:
torch.kept = [lakeckpt.data.base.ahead, lakeckpt.data.workers.slots, lakeckpt.reading.windows.positions]
loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset({str(lake)!r}, batch_size=4), num_workers={workers})
dataset = lakeckpt.LakeDataset({str(lake)!r}, batch_size=4)
torch.kept += [iter(loader), iter(dataset)]
torch.kept += [next(torch.kept[-1]), next(torch.kept[-2])]
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")
