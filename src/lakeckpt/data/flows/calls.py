"""This module calls a transform that yields any number of rows, and collates what it yields.

The transform is called with one row. Its random numbers come from the seed, the epoch and the row alone, so a restart
in the middle of its rows gets the same rows again. Collating stacks the values of a key; it never pads and never
guesses. The module keeps nothing between calls, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.data.base.transform import TransformContext
from lakeckpt.errors import ConfigError

__all__ = ["collate", "empty_of", "rows_of_row"]

_NUMBERS = (bool, int, float)


def rows_of_row(transform: Callable[[Any, Any], Any], row: dict[str, Any], span: Span, *, seed: int) -> list[Any]:
    """Return what ``transform`` yields of ``row``, which stands at the one position of ``span``.

    Its errors are raised with a note that names the position; `ConfigError` if it returns no rows, but a row.
    """
    where = f"in the transform of the row at position {span.start} of epoch {span.epoch}"
    try:
        found = transform(row, _context(span, seed) if getattr(transform, "way", "named") else None)
        if isinstance(found, (Mapping, str, bytes)) or not isinstance(found, Iterable):
            raise ConfigError(
                f'rows="many" needs a transform that returns or yields rows, each of them a dict, and it returned a '
                f"{type(found).__name__} {where}: yield the row, or return a list of rows"
            )
        return list(found)
    except Exception as error:
        if isinstance(error, StopIteration):  # it would end the loop as the end of the rows does
            raise RuntimeError(f"StopIteration was raised {where}: an iterator there has no more to give") from error
        error.add_note(where)
        raise


def _context(span: Span, seed: int) -> TransformContext:
    """Return the context of one row: its position stands for the number of a micro-batch, and nothing else is in it."""
    receipt = Receipt(
        epoch=span.epoch, micro_batch=span.start, lane=-1, step=0, rank=0, world_size=1, spans=(span,), step_rows=1
    )
    return TransformContext(seed=seed, receipt=receipt)


def collate(rows: Sequence[Any], *, output: str) -> dict[str, Any]:
    """Return ``rows``, at least one, as columns: numbers, arrays and tensors stacked, texts as a list.

    ``output``: "torch" makes tensors, "numpy" arrays. `ConfigError` names the key whose values do not fit together.
    """
    first = rows[0]
    for row in rows:
        if not (isinstance(row, Mapping) and isinstance(first, Mapping) and row.keys() == first.keys()):
            raise ConfigError(
                f"the transform yielded {_shown(row)} and {_shown(first)} in one micro-batch: each row that it yields "
                "is a dict, and all have the same keys"
            )
    return {name: _column(name, [row[name] for row in rows], output) for name in first}


def _shown(row: Any) -> str:
    return f"a row of {sorted(map(str, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"


def _column(name: str, values: list[Any], output: str) -> Any:
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return values
    try:
        if all(isinstance(value, torch.Tensor) for value in values):
            stacked = torch.stack(values)
            return stacked if output == "torch" else stacked.numpy()
        if all(issubclass(kind, (*_NUMBERS, np.ndarray, np.generic)) for kind in kinds) and len(kinds) == 1:
            array = np.stack(values) if issubclass(next(iter(kinds)), (np.ndarray, np.generic)) else np.array(values)
            return torch.from_numpy(array) if output == "torch" else array
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"values of {name!r} that the transform yielded cannot be stacked: {error}. {_ADVICE}"
        ) from error
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ConfigError(f"values of {name!r} that the transform yielded cannot be stacked: they are {found}. {_ADVICE}")


_ADVICE = (
    "A value is a number, a text, a tensor or an array, of one type and shape in all rows: cut or pad what it yields, "
    "and make tensors of lists"
)


def empty_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``columns`` without rows, in memory of their own."""
    made = {}
    for name, column in columns.items():
        made[name] = column[:0].clone() if isinstance(column, torch.Tensor) else column[:0]
        if isinstance(column, np.ndarray):
            made[name] = column[:0].copy()
    return made
