"""This module chooses the source of a dataset: one row of each row, or any number of rows that a transform yields.

It refuses arguments that do not go with such a transform. It reads nothing and starts no threads.
"""

from __future__ import annotations

from typing import Any

from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.options import ReadOptions, one_of
from lakeckpt.data.base.source import BatchSource
from lakeckpt.data.dataset.base_dataset import BaseDataset
from lakeckpt.data.flows.ends import ends_of
from lakeckpt.data.flows.feed import Feed
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.flows.tokens import Tokenizing, TokenSource
from lakeckpt.data.flows.whole import WholeSource
from lakeckpt.data.position.progress import Progress
from lakeckpt.errors import ConfigError

__all__ = ["check_flow", "check_no_workers", "feed_of", "source_of"]


def check_flow(
    dataset: BaseDataset,
    options: ReadOptions,
    rows: Any,
    *,
    endless: bool,
    drops: bool,
    begun: bool,
    name: str = 'rows="many"',
) -> None:
    """Raise `ConfigError` if ``dataset`` has arguments that ``rows="many"`` does not go with; ``name`` says what
    the user wrote."""
    one_of("rows", rows, ("many",))
    wrong = {
        "transform=, which yields the rows": not dataset.has_transform,
        "a batch_size=, in rows that it yields": dataset.row_wise,
        'output="torch" or "numpy"': dataset.output == "arrow",
        "drop_last=False: which rows are the last is not known before they are read": drops and not endless,
        'on_new_version="keep"': options.on_new_version != "keep",
        "no consumed=": begun,
        "no follow=": dataset.follow is not None,
    }
    for needed, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{name} needs {needed}")


def check_no_workers(yields_many: bool) -> None:
    """Raise `ConfigError` in a worker of another DataLoader, if a dataset ``yields_many`` rows of a row, or none."""
    if yields_many:
        raise ConfigError(
            'rows="many", a tokenizer= and documents="whole" are read by lakeckpt.LakeLoader, with any number of '
            "workers, and not by the worker processes of another DataLoader, whose main process does not learn how far "
            "each has come"
        )


def source_of(dataset: BaseDataset, options: ReadOptions, pinned: Pinned, transform: Any) -> tuple[BatchSource, int]:
    """Return what reads ``pinned`` for ``dataset``, and the rows, or items, of a micro-batch."""
    kind, size = BatchSource, dataset.batch_size or 1
    if dataset.yields_many and pinned.packing is not None:
        kind = WholeSource
    elif isinstance(transform, Tokenizing):
        kind, size = TokenSource, size * transform.length
    elif dataset.yields_many:
        kind = FlowSource
    source = kind(pinned, output=dataset.output, options=options, transform=transform, row_wise=dataset.row_wise)
    return source, size


def feed_of(source: Any, progress: Progress, rank: int) -> Feed | None:
    """Return what gives ``rank`` the rest of the epoch of ``source``; None if positions alone decide that.

    Raises `ConfigError` if ranks cannot agree on the end of an epoch.
    """
    if not isinstance(source, FlowSource):
        return None
    ends = ends_of(progress.origin, rank)
    return Feed(source, progress.state, rank, ends=ends, over=progress.ends_at)
