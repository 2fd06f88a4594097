"""Calls that cannot be meant are refused where they are made, by name, and change nothing; errors say where."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, open_table, prefetch
from lakeckpt.errors import ConfigError
from tests.data.reading import dataset_of, flat


def made(lake: Path, **options: Any) -> LakeDataset:
    return dataset_of(lake, **{"batch_size": 4, **options})


@pytest.mark.parametrize("epoch", ["1", None, 1.5, True, -1, 2**31 + 1, 2**70])
def test_an_epoch_that_is_none_is_refused_and_the_place_kept(lake: Path, epoch: Any) -> None:
    loader = LakeLoader(made(lake))
    next(iter(loader))
    before = loader.state_dict()
    for one in (loader, loader.dataset):
        with pytest.raises(ConfigError, match="epoch"):
            one.set_epoch(epoch)
    assert loader.state_dict() == before


@pytest.mark.parametrize("epoch", [np.int64(3), torch.tensor(3)])
def test_an_epoch_of_numpy_or_torch_gives_a_state_of_plain_types(lake: Path, epoch: Any) -> None:
    for one in (LakeLoader(made(lake, shuffle=True)), made(lake, shuffle=True)):
        one.set_epoch(epoch)
        state = one.state_dict()
        assert json.loads(json.dumps(state)) == state and state["epoch"] == 3
        assert type(one.epoch) is int
        same = made(lake, shuffle=True)
        same.set_epoch(3)
        assert flat(one) == flat(same)


@pytest.mark.parametrize("columns", [5, {"id"}, frozenset(["id"]), b"id", [5]])
def test_columns_without_an_order_or_names_are_refused(lake: Path, columns: Any) -> None:
    with pytest.raises(ConfigError, match="columns must be a list of names"):
        made(lake, columns=columns)


def test_a_dataset_has_no_items(lake: Path) -> None:
    with pytest.raises(TypeError, match=r"no item 0.*LakeLoader\(dataset\)"):
        made(lake)[0]


@pytest.mark.parametrize("kind", [DistributedSampler, RandomSampler])
def test_a_sampler_of_a_dataset_that_has_the_order_is_refused(lake: Path, kind: Any) -> None:
    options = {"num_replicas": 2, "rank": 0} if kind is DistributedSampler else {}
    with pytest.raises(ConfigError, match=r"takes no sampler.*training_data="):
        kind(made(lake), **options)
    assert len(DataLoader(made(lake), batch_size=None)) == len(made(lake))


def test_a_name_alone_is_no_list_of_changes_to_accept(lake: Path) -> None:
    with pytest.raises(ConfigError, match=r"write \['table'\]"):
        made(lake, accept_changes="table")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"batch_size": 32}, r"LakeDataset\(…, batch_size=…\)"),
        ({"shuffle": True}, r"LakeDataset\(…, shuffle=True\)"),
        ({"drop_last": True}, "drop_last=True"),
        ({"collate_fn": list}, "transform"),
    ],
)
def test_an_argument_of_a_dataloader_that_the_dataset_has_is_refused_with_its_place(
    lake: Path, argument: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LakeLoader(made(lake), **argument)
    with pytest.raises(TypeError, match="no argument 'num_worker'"):
        LakeLoader(made(lake), num_worker=2)  # type: ignore[arg-type]
    assert not set(argument) & set(inspect.signature(LakeLoader).parameters), "who asks what it takes is not told so"


def test_no_micro_batch_ahead_is_refused(lake: Path) -> None:
    with pytest.raises(ConfigError, match="prefetch_factor must be a positive integer"):
        LakeLoader(LakeDataset(lake, batch_size=4), num_workers=1, prefetch_factor=0)


def test_a_dataset_is_no_loader_to_prefetch(lake: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefetch takes a lakeckpt\.LakeLoader, got LakeDataset"):
        prefetch(LakeDataset(lake, batch_size=4))  # type: ignore[arg-type]


def test_a_memory_limit_may_be_as_large_as_machines_are() -> None:
    assert ReadOptions(memory_limit_bytes=64 << 30).memory_limit_bytes == 64 << 30


def test_a_group_without_torch_distributed_is_refused(lake: Path) -> None:
    with pytest.raises(ConfigError, match=r"dp_group= was given and torch\.distributed is not initialized"):
        iter(LakeLoader(made(lake, dp_group=object())))


@pytest.mark.parametrize("at", [5, "last", {}])
def test_a_state_as_of_what_is_no_receipt_is_refused(lake: Path, at: Any) -> None:
    loader = LakeLoader(made(lake))
    next(iter(loader))
    for call in (loader.state_dict, loader._reader.mark, loader._reader.stretches):
        with pytest.raises(ConfigError, match="the receipt of a batch"):
            call(at)


def fail_at_id_9(item: Any) -> Any:
    if 9 in item["id"].reshape(-1).tolist():
        raise KeyError("no such word")
    return item


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("batch_size", "where"), [(4, "transform of micro-batch 2 "), (None, "micro-batch 9")])
def test_a_transform_that_fails_says_at_which_micro_batch(
    lake: Path, workers: int, batch_size: int | None, where: str
) -> None:
    loader = LakeLoader(made(lake, batch_size=batch_size, transform=fail_at_id_9), num_workers=workers)
    with pytest.raises(KeyError) as caught:
        list(loader)
    # From a worker, torch brings the text of the whole traceback.
    assert where in "\n".join([str(caught.value.args[0]), *getattr(caught.value, "__notes__", [])])


def test_a_filesystem_of_fsspec_is_read_and_belongs_to_what_opens_the_table(lake: Path) -> None:
    files = fsspec.filesystem("file")
    assert flat(LakeLoader(LakeDataset(str(lake), batch_size=4, filesystem=files))) == flat(LakeLoader(made(lake)))
    with pytest.raises(ConfigError, match="go to open_table"):
        LakeDataset(open_table(lake), batch_size=4, filesystem=files)
