"""This module runs a whole job inside one process: the loaders of all ranks take their steps in lockstep.

Each rank has a loader of its own, made with an explicit rank and world size, so that no torch.distributed is needed.
Every step is checked: all ranks have the same number of steps, receipts name the rows that the batch holds, and no
micro-batch exceeds the batch size. `Job.save` takes the state as a checkpoint would, and checks that it is plain, equal
on all ranks, and in agreement with the rows consumed. The next job gets nothing but this `SavedStates`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lakeckpt.core.consumption import consumed
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.data.streams.mix import MixedDataset
from lakeckpt.errors import ConfigError
from lakeckpt.testing.attempts import Topology
from lakeckpt.testing.observed import Observed, Violation
from lakeckpt.testing.packed_laws import PackedDocuments
from lakeckpt.testing.receipt_laws import TrueRows, check_receipts, dealt, planned_drop
from lakeckpt.testing.row_keys import Key, RowKeys

__all__ = ["Job", "MakeLoader", "SavedStates", "Step"]

MakeLoader = Callable[..., Any]
_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStates:
    """The readers' states of a checkpoint, and the epoch of the job by our own count."""

    topology: Topology
    epoch: int
    states: tuple[Mapping[str, Any], ...]
    """One per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: the keys of the rows of each rank; empty for a rank that had ended."""

    epoch: int
    keys: tuple[tuple[Hashable, ...], ...]


class Job:
    """A job of ``topology`` that begins at ``saved`` (None: at the start) and adds to ``observed``."""

    def __init__(
        self,
        make_loader: MakeLoader,
        topology: Topology,
        saved: SavedStates | None,
        observed: Observed,
        *,
        key: Key,
        truth: TrueRows | PackedDocuments | None,
    ) -> None:
        self.topology = topology
        self.observed = observed
        self.loaders = [
            make_loader(rank, topology.world_size, topology.num_workers, **topology.options)
            for rank in range(topology.world_size)
        ]
        self.dataset = _dataset_of(self.loaders[0])
        _check_workers(self.loaders, topology)
        self.tracked = isinstance(self.loaders[0], LakeLoader) or hasattr(self.loaders[0], "last_receipt")
        if not self.tracked:
            _check_untracked(self.loaders[0], self.dataset)
        self._truth = truth
        single = self.dataset.row_wise and getattr(self.loaders[0], "batch_size", None) is None
        self.keys = RowKeys(self.dataset, key, single=single)
        if saved is not None:
            self._restore(saved)
        elif self.tracked:
            self._begin_where_loaded()
        self.epoch = int(getattr(self.loaders[0], "epoch", self.dataset.epoch)) if saved is None else saved.epoch
        self._iterators: list[Iterator[Any]] = []
        self._ended: list[int] = []
        self._plan: Plan | None = None

    @property
    def endless(self) -> bool:
        """True if the data has no end."""
        return self.dataset.identity.endless

    def close(self) -> None:
        """Drop iterators and loaders, which ends their worker processes."""
        self._iterators = []
        self.loaders = []

    def _begin_where_loaded(self) -> None:
        """If ``make_loader`` has loaded a state, the history begins there: what it has consumed counts as observed."""
        if self.dataset._progress.begun:
            self.observed.positions.update(consumed(State.from_plain(self.loaders[0].state_dict())))

    def _restore(self, saved: SavedStates) -> None:
        same = (saved.topology.world_size, saved.topology.num_workers) == (
            self.topology.world_size,
            self.topology.num_workers,
        )
        for rank, loader in enumerate(self.loaders):
            if self.tracked or isinstance(loader, LakeDataset):
                loader.load_state_dict(saved.states[0])
            elif same:
                loader.load_state_dict(saved.states[rank])
            else:
                raise ConfigError(
                    f"a {type(loader).__name__} goes on with as many ranks and workers as it had, and its state of "
                    f"{saved.topology} was to go on as {self.topology}: give one of topologies= at a time"
                )

    # --- steps

    def step(self) -> Step | None:
        """Take one step on every rank. Return None if all ranks saw the end of the epoch instead."""
        if not self._iterators:
            self._begin()
        items = [next(iterator, _END) for iterator in self._iterators]
        ended = [rank for rank, item in enumerate(items) if item is _END]
        if len(ended) == len(items):
            self._iterators, self._ended = [], []
            self.epoch += 1
            return None
        self._check_ends(ended)
        self._ended = ended
        return self._taken(items)

    def _check_ends(self, ended: list[int]) -> None:
        """Check that ranks end together. Row by row, some ranks may get one more row, which cannot be divided."""
        ranks = f"epoch {self.epoch}: ranks {ended} of {self.topology.world_size} have ended"
        if self._ended:
            raise Violation(f"{ranks}, and the others go on for more than one row")
        if ended and (not self.dataset.row_wise or self.dataset.identity.tail == "drop"):
            raise Violation(f"{ranks} and the others go on")

    def _begin(self) -> None:
        if self.tracked:
            epochs = [loader.epoch for loader in self.loaders if hasattr(loader, "epoch")]
            if not self.endless and any(epoch != self.epoch for epoch in epochs):
                raise Violation(f"epoch {self.epoch} comes next, but the ranks' loader.epoch are {epochs}")
            self._plan = Plan(State.from_plain(self.loaders[0].state_dict()))
        for loader in self.loaders:
            if not self.tracked and not self.endless and getattr(loader, "num_workers", None):
                loader.dataset.set_epoch(self.epoch)  # as a training loop must, over the workers of such a loader
        self._iterators = [iter(loader) for loader in self.loaders]

    def _taken(self, items: list[Any]) -> Step:
        keys: list[tuple[Hashable, ...]] = []
        receipts: list[Receipt] = []
        for rank, item in enumerate(items):
            found = [] if item is _END else self.keys.of_item(item)
            keys.append(tuple(found))
            if item is _END:
                continue
            if not self.tracked:
                self.observed.add(self.epoch, found)
                continue
            receipt = self.loaders[rank].last_receipt
            if receipt is None:
                raise Violation(f"rank {rank} got a batch, and its loader's last_receipt is None")
            receipts.append(receipt)
            self._account(item, found, receipt)
        if self.tracked:
            check_receipts(receipts, self.topology.world_size, self.dataset)
        return Step(epoch=self.epoch, keys=tuple(keys))

    def _account(self, item: Any, found: list[Hashable], receipt: Receipt) -> None:
        own = getattr(item, "receipt", None)
        if own is not None and own != receipt:
            raise Violation(f"batch.receipt is {own}, but the loader's last_receipt is {receipt}")
        if self._truth is None and self.dataset.identity.tail == "drop":
            _check_one_key_each(found, receipt)
        for epoch, keys in self._by_epoch(found, receipt):
            self.observed.add(epoch, keys)
        self.observed.add_positions(receipt)

    def _by_epoch(self, found: list[Hashable], receipt: Receipt) -> Iterator[tuple[int, Iterable[Hashable]]]:
        """Yield the keys to count for each epoch; Violation if they are not those of the receipt's positions."""
        assert self._plan is not None
        if isinstance(self._truth, PackedDocuments):
            yield from self._truth.tokens(found, receipt, self._plan)
            return
        if self._truth is not None:
            self._truth.check(found, receipt, self._plan)
        if len({span.epoch for span in receipt.spans}) <= 1:
            yield receipt.spans[0].epoch if receipt.spans else self.epoch, found
        else:
            yield from _split(found, receipt)

    # --- states

    def save(self) -> SavedStates:
        """Return the state of the rows consumed. `Violation` if it is not plain, equal on all ranks, and true."""
        states = [loader.state_dict() for loader in self.loaders]
        if self.tracked or self.loaders[0] is self.dataset:
            states = [_as_json(state) for state in states]
        if self.tracked:
            self._check_states(states)
        return SavedStates(topology=self.topology, epoch=self.epoch, states=tuple(states))

    def _check_states(self, states: list[Mapping[str, Any]]) -> None:
        others = [rank for rank, state in enumerate(states) if state != states[0]]
        if others and not self._ended:
            raise Violation(f"epoch {self.epoch}: the states of ranks {others} differ from that of rank 0: {states}")
        again = [_as_json(loader.state_dict()) for loader in self.loaders]
        if again != states:
            raise Violation(f"asked for its state twice, a loader gave {states} and then {again}")
        for rank, loader in enumerate(self.loaders):
            receipt = loader.last_receipt
            # After the end of an epoch the state is that of the next, and the receipt still of the one before.
            going = self._iterators and rank not in self._ended
            if receipt is not None and going and _as_json(loader.state_dict(at=receipt)) != states[rank]:
                raise Violation(f"rank {rank}: state_dict(at=last_receipt) is not state_dict(): {states[rank]}")
        self._check_consumed(State.from_plain(states[0]))

    def _check_consumed(self, state: State) -> None:
        claimed = consumed(state)
        epochs = set(claimed) if state.identity.endless else {state.epoch}
        for epoch in epochs:
            stated, seen = claimed.get(epoch, Intervals.empty()), self.observed.positions.get(epoch, Intervals.empty())
            if stated != seen:
                raise Violation(
                    f"epoch {epoch}: the state says that positions {stated} were consumed, and receipts name {seen}; "
                    f"too many: {stated.difference(seen)}, too few: {seen.difference(stated)}"
                )

    # --- ends

    def check_dealt(self) -> None:
        """Check that the receipts of the epoch that has ended name all rows of its plan."""
        if self._plan is None or self.endless:
            return
        ended = self._plan.state.epoch
        missing = dealt(self._plan).difference(self.observed.positions.get(ended, Intervals.empty()))
        if missing:
            raise Violation(f"epoch {ended} has ended, and its positions {missing} were never given")

    def may_miss(self) -> int:
        """Return how many rows, or tokens, the epoch that has ended may lack, because ``drop_last=True`` drops some."""
        if self._plan is None or self.endless:
            return 0
        unit = self.dataset.identity.unit if isinstance(self._truth, PackedDocuments) else 1
        return planned_drop(self._plan) * unit


def _dataset_of(loader: Any) -> LakeDataset:
    found = loader if isinstance(loader, LakeDataset) else getattr(loader, "dataset", None)
    if isinstance(found, MixedDataset):
        raise ConfigError("the law is of loaders of one dataset, got one of a mixture: check each source by itself")
    if not isinstance(found, LakeDataset):
        raise ConfigError(
            "make_loader(rank, world_size, num_workers, **options) must return a LakeLoader, a LakeDataset, or a "
            f"torchdata StatefulDataLoader over a LakeDataset, got {type(loader).__name__}"
        )
    if not all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        raise ConfigError(
            f"make_loader returned a {type(loader).__module__}.{type(loader).__qualname__}, which has no state_dict "
            "and load_state_dict, so that nothing of it can be restored: return a LakeLoader, a torchdata "
            "StatefulDataLoader, or the LakeDataset itself"
        )
    if found.yields_many:
        raise ConfigError(
            'this kit compares what readers yield with the rows of the table, and a transform with rows="many" (or a '
            'tokenizer=, or documents="whole") decides itself what it yields: check that it yields the same whenever '
            "it gets the same row"
        )
    return found


def _check_workers(loaders: list[Any], topology: Topology) -> None:
    """Refuse loaders that lack the workers of their topology. A loader with more workers tests no less, and a loader
    without ``num_workers`` cannot be checked."""
    for rank, loader in enumerate(loaders):
        has = getattr(loader, "num_workers", None)
        if topology.num_workers and isinstance(has, int) and has != topology.num_workers:
            raise ConfigError(
                f"make_loader(rank={rank}, world_size={topology.world_size}, num_workers={topology.num_workers}) "
                f"returned a {type(loader).__name__} of {has} workers: pass num_workers on to it, or give topologies= "
                f"of the workers that it has, such as ({topology.world_size}, {has})"
            )


def _check_untracked(loader: Any, dataset: LakeDataset) -> None:
    """Refuse a loader without receipts if only receipts say what it gave."""
    if dataset.packing is not None:
        raise ConfigError(
            f"packed sequences are counted by their receipts, and a {type(loader).__name__} has no last_receipt: check "
            "a LakeLoader"
        )
    if dataset.identity.tail == "drop":
        raise ConfigError(
            f"drop_last=True drops rows, and a {type(loader).__name__} has no last_receipt, and nobody knows which: "
            "check it with drop_last=False, or check a LakeLoader"
        )


def _check_one_key_each(keys: list[Hashable], receipt: Receipt) -> None:
    if len(keys) > receipt.rows:
        raise ConfigError(
            f"key= gave {len(keys)} keys for a batch of {receipt.rows} rows, and drop_last=True drops rows, so that "
            "nobody knows how many keys an epoch may lack: return one key for each row, or check with drop_last=False"
        )


def _as_json(state: Any) -> Mapping[str, Any]:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Violation(f"a state is not JSON-able: {error}: {state!r}") from error
    back = json.loads(text)
    if not isinstance(back, dict) or back != state:
        raise Violation(f"a state does not come back from JSON as it was: {state!r} became {back!r}")
    return back


def _split(keys: list[Hashable], receipt: Receipt) -> Iterator[tuple[int, list[Hashable]]]:
    """Yield the keys of each of the receipt's epochs."""
    if len(keys) != receipt.rows:
        raise Violation(f"{len(keys)} rows with a receipt of {receipt.rows}: {receipt}")
    start = 0
    for span in receipt.spans:
        yield span.epoch, keys[start : start + span.rows]
        start += span.rows
