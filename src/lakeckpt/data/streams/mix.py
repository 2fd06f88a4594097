"""This module defines `lakeckpt.mix`: a weighted mixture of datasets, each of which is read exactly.

A mixture has one place (`lakeckpt.data.position.progress`), and reads its sources by
`lakeckpt.data.streams.mixed_source`. The module reads nothing itself and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import get_worker_info

from lakeckpt.core.identity import Mixing
from lakeckpt.core.streams.mixing import MAX_SOURCES
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.options import integer, one_of, optional
from lakeckpt.data.base.source import BatchSource
from lakeckpt.data.base.transform import CarriedRows
from lakeckpt.data.dataset.base_dataset import BaseDataset
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.flows.tokens import Tokenizing
from lakeckpt.data.position.orders import Orders, checked_weights
from lakeckpt.data.position.progress import Progress
from lakeckpt.data.position.reader import TableReader
from lakeckpt.data.position.versions import Versions
from lakeckpt.data.streams.mixed_flows import Completed
from lakeckpt.data.streams.mixed_source import MixedSource
from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import select_columns

__all__ = ["MixedDataset", "mix"]

_MOST_PIECES = 1000
Weights = Mapping[str, float]


def mix(
    sources: Mapping[str, tuple[LakeDataset, float]],
    *,
    seed: int = 0,
    batch_size: int | None = None,
    num_lanes: int | None = None,
    granularity: Literal["row", "batch"] = "row",
    exhausted: Literal["next_epoch", "stop", "continue"] = "next_epoch",
    schedule: Sequence[tuple[int, Weights]] = (),
    source_column: str | None = None,
    memory_limit_bytes: int | None = None,
) -> MixedDataset:
    """Return a dataset that reads rows, or sequences, of several datasets in the proportion of their weights.

    Each source has its own table version, order and epochs, and every row of it counts exactly once in each of its
    epochs. Sources may be of any kind: rows, packed sequences, texts that are tokenized where they are read, whole
    documents, and rows that a transform yields (``rows="many"``). Which source a row comes from depends on the weights,
    the seed and the place of the row alone. Of the first n rows of a lane, each source has its share to within two
    rows, counted from the last change of weights or lanes on.

        mixed = lakeckpt.mix({"web": (web, 0.7), "code": (code, 0.3)}, batch_size=8)
        loader = lakeckpt.LakeLoader(mixed, num_workers=2)

    Args:
        sources: name → (a `LakeDataset`, packed or not; its weight). Weights need not add up to 1. They are rounded,
            each by at most 1 %. A dataset describes its source: it was never read, and has no memory limit of its own.
            Its ``batch_size``, ``endless`` and lanes do not count; its filters, transforms and options do. The columns
            of all must have the same names and types. A transform gets the rows of its source in a micro-batch, and
            must return a dict.
        seed: any integer of 64 bits. Sources keep their own seeds for the order of their rows.
        batch_size: rows per micro-batch; None: that of the sources, if it is the same.
        num_lanes: as in `ReadOptions`, for all sources.
        granularity: ``"row"`` mixes rows inside of each micro-batch; ``"batch"`` mixes whole micro-batches.
        exhausted: what happens when one source is through its first epoch, or too little of it is left for a step.
            ``"next_epoch"``: it goes on with its next epoch; the mixture never ends. ``"stop"``: the mixture ends.
            ``"continue"``: the others go on with its share, and the mixture ends when all are through. A source that is
            through has a few rows left, fewer than a step takes of each lane; they are not read, and `lakeckpt audit`
            lists them as to come. With a source whose consumption depends on the data (``tokenizer=``,
            ``documents="whole"``, ``rows="many"``), only ``"next_epoch"`` can be.
        schedule: (step, weights) pairs, ascending, at most 1,000: from this step of the loader on, these weights hold.
            `LakeLoader.set_weights` changes them at any other step.
        source_column: a name under which each batch also holds the number of each row's source, in the order of
            ``sources``: int64, shape (batch,). None: it holds none.
        memory_limit_bytes: as in `ReadOptions`, for all sources together.

    A batch has a `MixedReceipt`. ``lakeckpt audit`` counts the rows of each source, as ``"reader.web"`` and so on. If a
    run is restored, its weights go on. A source that the run did not have begins at its first row; then the weights
    given here hold. With a source whose consumption depends on the data, the state of one of several ranks is its part:
    see `lakeckpt.merge_states`. Raises `ConfigError`, `SchemaError`.
    """
    if not isinstance(sources, Mapping) or not 1 <= len(sources) <= MAX_SOURCES:
        raise ConfigError(f"mix takes 1 to {MAX_SOURCES} sources, as name → (LakeDataset, weight)")
    for name, one in sources.items():
        _check_source(name, one, exhausted=exhausted)
    names = tuple(sources)
    mixing = Mixing(
        names=names,
        weights=checked_weights({name: weight for name, (_, weight) in sources.items()}, names),
        seed=integer("seed", seed),
        whole=granularity == "batch",
        exhausted=exhausted,
        schedule=_checked_schedule(schedule, names),
    )
    one_of("granularity", granularity, ("row", "batch"))
    one_of("exhausted", exhausted, ("next_epoch", "stop", "continue"))
    datasets = {name: dataset for name, (dataset, _) in sources.items()}
    size = optional("batch_size", batch_size) or _common_size(datasets)
    _check_alike(datasets)
    return MixedDataset(
        mixing,
        datasets,
        batch_size=size,
        num_lanes=optional("num_lanes", num_lanes),
        source_column=source_column,
        memory_limit_bytes=optional("memory_limit_bytes", memory_limit_bytes),
    )


class MixedDataset(BaseDataset):
    """The result of `mix`: a dataset for a `LakeLoader`, or for a loop in this process."""

    def __init__(
        self,
        mixing: Mixing,
        datasets: Mapping[str, LakeDataset],
        *,
        batch_size: int,
        num_lanes: int | None,
        source_column: str | None,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__()
        every = list(datasets.values())
        self.batch_size, self.output = batch_size, every[0].output
        self._explicit_rank, self._dp_group = every[0]._explicit_rank, every[0]._dp_group
        pinned = [replace(one._versions.at_hand, endless=True) for one in every]
        accepted = [one.options.accept_changes for one in every]
        sources = [_source_of(one, where) for one, where in zip(every, pinned, strict=True)]
        self.yields_many = any(one.yields_many for one in every)
        describes = [one.describe for one in sources]
        orders = Orders(pinned, accepted=accepted, describes=describes, mixing=mixing)
        self._progress = Progress(orders, batch_size=batch_size, num_lanes=num_lanes)
        self.sources = self._tables = {
            name: TableReader(Versions(where, source, self._progress, one.options, number=number), name)
            for number, ((name, one), where, source) in enumerate(zip(datasets.items(), pinned, sources, strict=True))
        }
        """Name → the source that is read."""
        self._source = MixedSource(
            mixing.names,
            sources,
            source_column=source_column,
            memory_limit_bytes=memory_limit_bytes,
        )
        self._carried = CarriedRows(looks=False)

    @property
    def table(self) -> Table:
        """The table of one source: one that lies in an object store, if any does."""
        tables = [one.table for one in self.sources.values()]
        return next((one for one in tables if not isinstance(one.storage, LocalStorage)), tables[0])

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError("a mixture is read in worker processes by lakeckpt.LakeLoader(mixture, num_workers=…)")
        return self._read_here()

    def __len__(self) -> int:
        raise TypeError("a mixture has no length: its sources are endless streams")

    def _completed(self, found: Iterator[Any]) -> Iterator[Any]:
        return Completed(found) if self.yields_many else found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all that was yielded (plain types)."""
        self._progress.settle(self.topology[1], 0)
        return self._progress.state.to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` at the next iteration; StateError, without a change, if it does not fit."""
        self._progress.load(self._progress.read(state))

    def set_epoch(self, epoch: int) -> None:
        """Refuse: sources count their epochs themselves."""
        self._progress.begin_epoch(epoch)

    def rewind(self) -> None:
        """Refuse: a mixture has no epochs."""
        raise ConfigError("a mixture has no epoch to begin again: load a state, or make a new mixture")


def _source_of(dataset: LakeDataset, pinned: Pinned) -> BatchSource:
    """Return what reads ``pinned`` for the source that ``dataset`` describes."""
    kind: type[BatchSource] = type(dataset._source)
    transform = dataset._source.transform
    return kind(pinned, output=dataset.output, options=dataset.options, transform=transform, row_wise=False)


def _check_source(name: Any, given: Any, *, exhausted: str) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"sources have non-empty names without '/', got {name!r}")
    if isinstance(given, tuple) and given and isinstance(given[0], MixedDataset):
        raise ConfigError(f"source {name!r} is a mixture: mix its sources with the others, in one mixture")
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], LakeDataset):
        raise ConfigError(f"source {name!r} must be (LakeDataset, weight), got {given!r:.80}")
    dataset = given[0]
    dataset._check_not_followed()
    if dataset.yields_many and exhausted != "next_epoch":
        raise ConfigError(
            f'source {name!r} has a transform with rows="many", a tokenizer= or documents="whole", so that only '
            f"reading tells when its first epoch ends: exhausted={exhausted!r} cannot be; leave it at 'next_epoch'"
        )
    if dataset.row_wise or dataset.output == "arrow":
        raise ConfigError(f'source {name!r} must have a batch_size, and output="torch" or "numpy"')
    if dataset._progress.begun:
        raise ConfigError(
            f"source {name!r} has a place of its own: it was read, or a state was loaded. Give mix a dataset that was "
            "never read, which describes the source; the mixture has one place, in its own state"
        )
    if dataset.options.memory_limit_bytes is not None:
        raise ConfigError(f"source {name!r} has a memory limit of its own: give mix(…, memory_limit_bytes=…), for all")
    if not dataset.table.num_rows:
        raise ConfigError(f"source {name!r} has no rows: the table {dataset.table.uri!r} is empty")
    if dataset.options.on_new_version != "keep" or dataset.table.index.rest is not None:
        raise ConfigError(
            f'source {name!r} has on_new_version="next_epoch" or consumed=, which a mixture does not have: it reads '
            "each table at the version that was opened"
        )


def _common_size(datasets: Mapping[str, LakeDataset]) -> int:
    sizes = {name: one.batch_size for name, one in datasets.items()}
    first = next(iter(sizes.values()))
    if first is None or len(set(sizes.values())) > 1:
        raise ConfigError(f"sources have the batch sizes {sizes}: give mix(…, batch_size=…), the rows of a micro-batch")
    return first


def _checked_schedule(
    schedule: Sequence[tuple[int, Weights]], names: tuple[str, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    found = tuple((integer("a step of schedule", step), checked_weights(weights, names)) for step, weights in schedule)
    steps = [step for step, _ in found]
    if steps != sorted(set(steps)) or (steps and steps[0] < 1) or len(steps) > _MOST_PIECES:
        raise ConfigError(f"schedule has at most {_MOST_PIECES} pieces, at ascending steps from 1 on, got {steps[:20]}")
    return found


def _check_alike(datasets: Mapping[str, LakeDataset]) -> None:
    """Refuse sources that cannot make one batch, or that are read for different ranks."""
    first_name, first = next(iter(datasets.items()))
    for name, one in datasets.items():
        pair = f"sources {first_name!r} and {name!r}"
        if one.output != first.output:
            raise ConfigError(f"{pair} have output={first.output!r} and {one.output!r}: give both the same")
        if (one._explicit_rank, one._dp_group) != (first._explicit_rank, first._dp_group):
            raise ConfigError(f"{pair} are read for different ranks: give both the same rank= and world_size=")
        if (mine := _columns_of(first)) is not None and (its := _columns_of(one)) is not None:
            _check_columns(pair, mine, its)


def _columns_of(one: LakeDataset) -> dict[str, str] | None:
    """Return the columns that a dataset delivers, and their types; None: its transform decides."""
    transform, packing = one._source.transform, one.packing
    if isinstance(transform, Tokenizing):
        return {name: _kind_of(name, transform.length, "int32") for name in transform.columns}
    if transform is not None:
        return None
    if packing is None:
        return {field.name: str(field.type) for field in select_columns(one.table.schema, one.columns)}
    dtype = str(packing.dtype_in(one.table.schema))
    return {name: _kind_of(name, packing.length, dtype) for name in packing.columns}


def _kind_of(column: str, length: int, dtype: str) -> str:
    """Return the type of a column of sequences."""
    return f"{dtype if column == 'tokens' else 'of'} sequences of {length} tokens"


def _check_columns(pair: str, mine: Mapping[str, str], its: Mapping[str, str]) -> None:
    if mine.keys() != its.keys():
        raise SchemaError(f"{pair} have the columns {sorted(mine)} and {sorted(its)}: name the same in columns=")
    for name, kind in mine.items():
        if kind != its[name]:
            raise SchemaError(
                f"column {name!r} of the {pair} is {kind} and {its[name]}: make them one type, in the tables or by "
                "transform="
            )
