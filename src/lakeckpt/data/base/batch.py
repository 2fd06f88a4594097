"""This module defines what the training loop gets: `Batch`, a dict of columns with a receipt.

It also makes lists of str of columns of text, and moves or pins the tensors of a batch. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lakeckpt.core.receipts import Receipt
from lakeckpt.data.base.torch_private import collate, default_collate_fn_map, pin_memory
from lakeckpt.errors import ConfigError
from lakeckpt.reading.columns.ragged import Ragged

__all__ = [
    "Batch",
    "Received",
    "Stage",
    "checked_number_column",
    "is_text",
    "moved",
    "numbered",
    "pinned",
    "texts",
]

Received = tuple[Receipt, Any]
"""The receipt of a batch, and the batch."""
Stage = Callable[[Iterator[Received]], Iterator[Received]]
"""Passes batches on to the training loop, in order; it may hold some back."""


class Batch(dict[str, Any]):
    """A micro-batch: column name to tensor (or array), with the ``receipt`` of its rows.

    Being a dict, it goes through torch's collate, pinning and device-moving helpers. In row-wise use it is one row.

    ``to`` keeps the receipt, and accelerate and Lightning move batches by it. A batch that is made anew from its
    columns alone, as transformers' Trainer and DistributedDataParallel on GPUs do, has no receipt; nor has one that
    torch's default collate makes of several.
    """

    receipt: Receipt

    def __init__(
        self, columns: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), receipt: Receipt | None = None
    ) -> None:
        super().__init__(columns)
        if receipt is not None:
            self.receipt = receipt

    def __getattr__(self, name: str) -> Any:
        if name == "receipt":
            raise AttributeError(
                "this batch was made anew from its columns by a framework, which left its receipt behind: the loader "
                "has it, loader.last_receipt"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to(self, *args: Any, **options: Any) -> Batch:
        """Return the batch with its tensors moved by ``tensor.to(…)``, and its receipt; other columns as they are."""
        return Batch(moved(dict(self), args, options), self.__dict__.get("receipt"))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Batch, (dict(self), self.__dict__.get("receipt")))


def _collated(batches: list[Batch], *, collate_fn_map: Any = None) -> Batch:
    """Collate batches for torch's default collate, which would fill a copy of the first batch, receipt and all."""
    made = collate([dict(batch) for batch in batches], collate_fn_map=collate_fn_map)
    return Batch(made, batches[0].__dict__.get("receipt") if len(batches) == 1 else None)


default_collate_fn_map[Batch] = _collated


def moved(value: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return ``value.to(*args, **options)``, or a dict, list or tuple of what it holds so. Others as they are."""
    if hasattr(value, "to"):
        return value.to(*args, **options)
    if is_text(value):
        return value
    if type(value) is dict:
        return {name: moved(one, args, options) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(one, args, options) for one in value)
    return value


def pinned(value: Any) -> Any:
    """Return ``value`` with its tensors in pinned memory, as torch does it, but with no look at each text."""
    if type(value) is not Batch:
        return pin_memory(value)  # type: ignore[no-untyped-call]
    columns = {name: one if is_text(one) else pin_memory(one) for name, one in value.items()}  # type: ignore[no-untyped-call]
    return Batch(columns, value.__dict__.get("receipt"))


def checked_number_column(name: Any, *, row_wise: bool) -> str | None:
    """Return ``name``, under which `numbered` puts numbers into batches, or None; ConfigError if it cannot be."""
    if name is not None and (not isinstance(name, str) or row_wise):
        raise ConfigError(
            f"receipt_column is a name, and needs a dataset with a batch_size; got {name!r}"
            + (" for single rows" if row_wise else "")
        )
    return name


def numbered(item: Any, name: str, number: int) -> Any:
    """Return the batch ``item`` with ``number`` under ``name``; ConfigError if it cannot hold it."""
    if not isinstance(item, dict) or name in item:
        what = f"has a column {name!r}" if isinstance(item, dict) else f"is a {type(item).__name__}"
        raise ConfigError(
            f"receipt_column={name!r} adds a column of this name to each batch, which must be a dict without it, "
            f"and the batch {what}. Name another one, or let the transform return a dict"
        )
    item[name] = number
    return item


def is_text(value: Any) -> bool:
    """Return whether ``value`` is a column of texts, by its first row."""
    return type(value) is list and bool(value) and type(value[0]) is str


def texts(column: Any) -> Any:
    """Return a `Ragged` of texts as a list of str, and a struct with its texts so; any other column as it is."""
    if type(column) is dict:
        return {name: texts(one) for name, one in column.items()}
    return column.tolist() if type(column) is Ragged and column.kind == "str" else column
