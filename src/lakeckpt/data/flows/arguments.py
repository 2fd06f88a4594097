"""This module makes what reads a dataset, and the place in it, also where a transform yields any number of rows.

It refuses arguments that do not go with such a transform. It reads nothing and starts no threads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lakeckpt.data.flows.ends import ends_of
from lakeckpt.data.flows.feed import Feed
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.flows.tokens import Tokenizing, TokenSource, check_text
from lakeckpt.data.flows.whole import WholeSource
from lakeckpt.data.options import one_of
from lakeckpt.data.place.identity import Pinned
from lakeckpt.data.place.progress import Progress
from lakeckpt.data.source import BatchSource
from lakeckpt.errors import ConfigError
from lakeckpt.reading.packed.packing import Packing

if TYPE_CHECKING:
    from lakeckpt.data.dataset import LakeDataset

__all__ = ["check_flow", "check_no_workers", "feed_of", "parts_of", "tokenized", "whole_documents"]

_MANY = 'rows="many"'


def check_flow(dataset: LakeDataset, rows: Any, *, endless: bool, drops: bool, begun: bool, name: str = _MANY) -> None:
    """Raise `ConfigError` where ``dataset`` has arguments that ``rows="many"`` does not go with; ``name`` says what
    the user wrote."""
    one_of("rows", rows, ("many",))
    wrong = {
        "transform=, which yields the rows": not dataset.has_transform,
        "a batch_size=, in rows that it yields": dataset.row_wise,
        'output="torch" or "numpy"': dataset.output == "arrow",
        "drop_last=False: which rows are the last is not known before they are read": drops and not endless,
        'on_new_version="keep"': dataset.options.on_new_version != "keep",
        "no consumed=": begun,
        "no follow=": dataset.follow is not None,
    }
    for needed, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{name} needs {needed}")


def check_no_workers(dataset: LakeDataset) -> None:
    """Raise `ConfigError` in a worker of another DataLoader, if ``dataset`` yields any number of rows of a row."""
    if dataset.yields_many:
        raise ConfigError(
            'rows="many", a tokenizer= and documents="whole" are read by lakeckpt.LakeLoader, with any number of '
            "workers, and not by the worker processes of another DataLoader, whose main process does not learn how far "
            "each has come"
        )


def parts_of(dataset: LakeDataset, pinned: Pinned, transform: Any) -> tuple[BatchSource, Progress]:
    """Return what reads ``pinned`` for ``dataset``, and the place in it."""
    return (_flow_parts if dataset.yields_many else _row_parts)(dataset, pinned, transform)


def _row_parts(dataset: LakeDataset, pinned: Pinned, transform: Any) -> tuple[BatchSource, Progress]:
    options, row_wise = dataset.options, dataset.row_wise
    source = BatchSource(pinned, output=dataset.output, options=options, transform=transform, row_wise=row_wise)
    progress = Progress(
        pinned,
        batch_size=dataset.batch_size or 1,
        num_lanes=options.num_lanes,
        row_wise=row_wise,
        accept_changes=options.accept_changes,
        moves=options.on_new_version == "next_epoch",
        follows=dataset.follow is not None,
    )
    return source, progress


def _flow_parts(dataset: LakeDataset, pinned: Pinned, transform: Any) -> tuple[BatchSource, Progress]:
    options, size = dataset.options, dataset.batch_size
    assert size is not None
    kind = _kind(pinned, transform)
    source = kind(pinned, output=dataset.output, options=options, transform=transform, row_wise=False)
    progress = Progress(
        pinned,
        batch_size=size * transform.length if isinstance(transform, Tokenizing) else size,
        num_lanes=options.num_lanes,
        row_wise=False,
        accept_changes=options.accept_changes,
        describes=source.describe,
    )
    return source, progress


def _kind(pinned: Pinned, transform: Any) -> type[FlowSource]:
    if pinned.packing is not None:
        return WholeSource
    return TokenSource if isinstance(transform, Tokenizing) else FlowSource


def tokenized(dataset: LakeDataset, tokenizing: Tokenizing) -> LakeDataset:
    """Return a dataset of sequences of tokens of the texts that ``dataset`` reads. `ConfigError`, `SchemaError`."""
    pinned = dataset._versions.at_hand
    check_text(pinned.table.schema, tokenizing.column)
    if dataset.has_transform or dataset.options.text != "str":
        raise ConfigError('pack with a tokenizer= needs a dataset without transform=, and ReadOptions(text="str")')
    return _flow_of(dataset, dataclasses.replace(pinned, columns=[tokenizing.column]), tokenizing, _MANY)


def whole_documents(dataset: LakeDataset, packing: Packing) -> LakeDataset:
    """Return a dataset of sequences of whole documents that ``dataset`` reads. `ConfigError`, `SchemaError`."""
    if dataset.has_transform:
        raise ConfigError(
            'documents="whole" needs a dataset without transform=: a state would not say what was made of a sequence'
        )
    pinned = dataclasses.replace(dataset._versions.at_hand, columns=[packing.column], packing=packing)
    return _flow_of(dataset, pinned, None, 'documents="whole"')


def _flow_of(dataset: LakeDataset, pinned: Pinned, transform: Any, name: str) -> LakeDataset:
    """Return a dataset that reads ``pinned`` as a flow, as ``dataset`` does otherwise."""
    made = object.__new__(type(dataset))
    made.__dict__.update(dataset.__dict__)
    made.has_transform = made.yields_many = True
    drops, begun = pinned.tail == "drop", pinned.table.index.rest is not None
    check_flow(made, "many", endless=pinned.endless, drops=drops, begun=begun, name=name)
    made.columns = pinned.columns
    made._read(pinned, transform)
    return made


def feed_of(dataset: LakeDataset, rank: int) -> Feed | None:
    """Return what gives ``rank`` the rest of the epoch of ``dataset``; None where positions alone decide that.

    Raises `ConfigError` where ranks cannot agree on the end of an epoch.
    """
    source, progress = dataset._source, dataset._progress
    if not isinstance(source, FlowSource):
        return None
    ends = ends_of(progress.origin, rank)
    return Feed(source, progress.state, rank, ends=ends, over=progress.ends_at)
