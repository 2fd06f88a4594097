"""Short words for what tests of loaders do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lakeckpt import LakeDataset, LakeLoader, Ragged, ReadOptions, Table, open_table

ROWS = 37


def ids(items: Iterable[Any]) -> list[list[int]]:
    """The ``id`` of each row of each item."""
    return [item["id"].reshape(-1).tolist() for item in items]


def flat(items: Iterable[Any]) -> list[int]:
    """The ``id`` of each row, in order."""
    return list(itertools.chain.from_iterable(ids(items)))


def some(loader: Any, count: int) -> list[Any]:
    """The next ``count`` items; the iterator is let go of."""
    return list(itertools.islice(iter(loader), count))


def until_error(loader: Any) -> tuple[list[Any], Exception | None]:
    """What the loop gets before an error, and that error, which no longer holds the iterator (and its workers)."""
    found: list[Any] = []
    try:
        found.extend(iter(loader))
    except Exception as error:
        return found, error.with_traceback(None)
    return found, None


@functools.lru_cache(maxsize=32)
def table_of(folder: Path) -> Table:
    """The table in ``folder``, opened once."""
    return open_table(folder)


def dataset_of(table: Any, kind: type[LakeDataset] = LakeDataset, **arguments: Any) -> LakeDataset:
    """A dataset; arguments that are those of `ReadOptions` go there, and ``tail`` says what an identity has."""
    if "tail" in arguments:
        arguments["drop_last"] = arguments.pop("tail") == "drop"
    names = {one.name for one in dataclasses.fields(ReadOptions)} & arguments.keys()
    options = dataclasses.replace(arguments.pop("options", ReadOptions()), **{one: arguments.pop(one) for one in names})
    return kind(table, options=options, **arguments)


def loader_of(lake: Path, *, num_workers: int = 0, loader: dict[str, Any] | None = None, **dataset: Any) -> LakeLoader:
    """A loader of shuffled micro-batches of 4 rows, where nothing else is said."""
    made = dataset_of(table_of(lake), **{"batch_size": 4, "shuffle": True, **dataset})
    return LakeLoader(made, num_workers=num_workers, **(loader or {}))


def as_json(state: Any) -> Any:
    """``state`` as a program of another language would give it back."""
    return json.loads(json.dumps(state, allow_nan=False))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal: kinds, dtypes, strides and all that they hold."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.is_nested:
            return same(one.values(), other.values()) and same(one.offsets(), other.offsets())
        whole = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return whole and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Ragged):
        return one.kind == other.kind and same(one.tolist(), other.tolist()) and list(one.masks) == list(other.masks)
    return bool(one == other)
