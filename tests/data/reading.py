"""Short words for what tests of loaders do."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lakeckpt import LakeDataset, LakeLoader, Table, open_table

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


def loader_of(lake: Path, *, num_workers: int = 0, loader: dict[str, Any] | None = None, **dataset: Any) -> LakeLoader:
    """A loader of shuffled micro-batches of 4 rows, where nothing else is said."""
    made = LakeDataset(table_of(lake), **{"batch_size": 4, "shuffle": True, **dataset})
    return LakeLoader(made, num_workers=num_workers, **(loader or {}))


def as_json(state: Any) -> Any:
    """``state`` as a program of another language would give it back."""
    return json.loads(json.dumps(state, allow_nan=False))
