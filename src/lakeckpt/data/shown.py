"""This module shows datasets and loaders to people: table, what is read of it, batch size, ranks and place.

It reads nothing, asks no other process and never raises: what is not known yet is not shown. It starts no threads.
"""

from __future__ import annotations

from typing import Any

from lakeckpt.errors import ConfigError

__all__ = ["shown_dataset", "shown_loader"]


def shown_dataset(dataset: Any) -> str:
    """Return the repr of a dataset.

    A mixture shows its sources, and each of these its table.
    """
    sources = getattr(dataset, "sources", None)
    parts = [f"batch_size={dataset.batch_size}", _ranks(dataset), _place(dataset)]
    if sources is not None:
        tables = ", ".join(f"{name!r}: {_what(one)}" for name, one in sources.items())
        return f"MixedDataset({{{tables}}}, {', '.join(parts)})"
    return f"{type(dataset).__name__}({_what(dataset)}, {', '.join(parts)})"


def shown_loader(loader: Any) -> str:
    """Return the repr of a loader."""
    restarts = ", restart=True" if loader._restarts is not None else ""
    return f"{type(loader).__name__}({shown_dataset(loader.dataset)}, num_workers={loader.num_workers}{restarts})"


def _what(dataset: Any) -> str:
    """Return the table of one dataset, and how its rows become sequences."""
    maker = getattr(dataset._source, "maker", None) if dataset.yields_many else None
    packing = dataset.packing if maker is None else maker if maker.length else None
    uri = repr(dataset.table.uri)
    return uri if packing is None else f"{uri} in sequences of {packing.length} tokens"


def _ranks(dataset: Any) -> str:
    try:
        rank, world_size = dataset.topology
    except ConfigError:
        return "rank not known yet"
    return f"rank {rank} of {world_size}"


def _place(dataset: Any) -> str:
    """Return the step (of an endless stream or a mixture), or the epoch and the step that come next."""
    progress = dataset._progress
    if not progress.begun:
        return f"epoch {progress.epoch}, not begun"
    state = progress.state
    return f"step {state.step}" if progress.identity.endless else f"epoch {state.epoch}, step {state.step}"
