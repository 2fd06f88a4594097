"""Loaders that are wrong on purpose, each in one way. `lakeckpt.testing` must catch every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lakeckpt import Batch, LakeDataset, LakeLoader, Receipt, open_table
from tests.data.reading import dataset_of

__all__ = ["UNTRACKED", "WRONG", "Wrapped", "make_of"]


class Wrapped:
    """A loader that does everything as the one inside, until a subclass breaks something."""

    def __init__(self, loader: LakeLoader) -> None:
        self.inner = loader
        self.dataset = loader.dataset
        self.batch_size = None
        self.received: Receipt | None = None

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    @property
    def last_receipt(self) -> Receipt | None:
        return self.received

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.received = self.inner.last_receipt
            yield batch

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        return self.inner.state_dict(at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)


class CountsPrefetched(Wrapped):
    """Has read a batch ahead when it gives one, and counts it."""

    def __iter__(self) -> Iterator[Any]:
        held: list[Batch] = []
        for batch in self.inner:
            held.append(batch)
            if len(held) > 1:
                self.received = held[0].receipt
                yield held.pop(0)
        for batch in held:
            self.received = batch.receipt
            yield batch

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        return self.inner.state_dict()


class SwapsTwoLanes(Wrapped):
    """Gives the rows of one lane under the receipts of another: batches change places, receipts do not."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(self.inner)
        receipts = [batch.receipt for batch in batches]
        batches[0:2] = reversed(batches[0:2])
        for batch, receipt in zip(batches, receipts, strict=True):
            self.received = receipt
            yield Batch(dict(batch), receipt)

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        return self.inner.state_dict(at or self.received)


class SkipsTheLastBatch(Wrapped):
    """Never gives the last batch of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        steps = len(self.inner)
        for batch in self.inner:
            self.received = self.inner.last_receipt
            if self.received is None or self.received.step + 1 < steps:
                yield batch


class ForgetsTheState(Wrapped):
    """Begins anew whatever it is told."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class ResumesOneLate(Wrapped):
    """Goes on a step too far."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict({**state, "step": int(state["step"]) + 1})


class ResumesOneEarly(Wrapped):
    """Gives the last step before the checkpoint again."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        early = max(int(state["step"]) - 1, state["segments"][-1][1])
        self.inner.load_state_dict({**state, "step": early})


class GivesABatchTwice(Wrapped):
    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.received = self.inner.last_receipt
            yield batch
            if self.received is not None and self.received.step == 1:
                yield batch


class EndsEarlyOnRankOne(Wrapped):
    def __iter__(self) -> Iterator[Any]:
        rank, steps = self.inner.topology[0], len(self.inner)
        for batch in self.inner:
            self.received = self.inner.last_receipt
            if rank != 1 or self.received is None or self.received.step + 1 < steps:
                yield batch


class ReordersAfterARestore(Wrapped):
    """Every row once, every receipt true: but not in the order of the run that did not crash."""

    restored = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restored = True
        self.inner.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        if not self.restored:
            yield from super().__iter__()
            return
        for batch in reversed(list(self.inner)):
            self.received = batch.receipt
            yield batch


class StatesDifferBetweenRanks(Wrapped):
    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        return {**self.inner.state_dict(at), "rank": self.inner.topology[0]}


class StatesAreNotPlain(Wrapped):
    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        state = self.inner.state_dict(at)
        return {**state, "step": np.int64(state["step"])}


class StatesChangeWhenAskedAgain(Wrapped):
    asked = 0

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        self.asked += 1
        return {**self.inner.state_dict(at), "asked": self.asked}


class StatesAsOfAReceiptAreOfNow(Wrapped):
    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        state = self.inner.state_dict(at)
        return state if at is None else {**state, "step": int(state["step"]) - 1}


class RowsInAnotherOrderThanReceipts(Wrapped):
    """The right rows in each batch, in an order that is not the one of the receipt's positions."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield Batch({name: column.flip(0) for name, column in batch.items()}, batch.receipt)


class StatesClaimAStepMore(Wrapped):
    """Restores exactly, but what its states say was consumed is a step too much: a ledger of them would lie."""

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        state = self.inner.state_dict(at)
        return {**state, "step": int(state["step"]) + 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict({**state, "step": int(state["step"]) - 1})


class ReceiptsOfTheRankBeside(Wrapped):
    @property
    def last_receipt(self) -> Receipt | None:
        if self.received is None:
            return None
        plain = self.received.to_plain()
        ranks = int(plain["world_size"])  # type: ignore[call-overload]
        return Receipt.from_plain({**plain, "rank": (int(plain["rank"]) + 1) % ranks})  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield dict(batch)


class FailsAfterARestore(Wrapped):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise RuntimeError("cannot restore")


class CountsAnEpochTooMany(Wrapped):
    @property
    def epoch(self) -> int:
        return self.inner.epoch + (self.inner.epoch > 0)


WRONG: tuple[type[Wrapped], ...] = (
    CountsPrefetched,
    SwapsTwoLanes,
    SkipsTheLastBatch,
    ForgetsTheState,
    ResumesOneLate,
    ResumesOneEarly,
    GivesABatchTwice,
    EndsEarlyOnRankOne,
    ReordersAfterARestore,
    StatesDifferBetweenRanks,
    StatesAreNotPlain,
    StatesChangeWhenAskedAgain,
    StatesAsOfAReceiptAreOfNow,
    StatesClaimAStepMore,
    RowsInAnotherOrderThanReceipts,
    ReceiptsOfTheRankBeside,
    FailsAfterARestore,
    CountsAnEpochTooMany,
)


class _ForgetfulDataset(LakeDataset):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class _LateDataset(LakeDataset):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "step": int(state["step"]) + 1})


class _PrefetchingDataset(LakeDataset):
    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        held = [batch for batch in [next(batches, None)] if batch is not None]
        for batch in batches:
            held.append(batch)
            yield held.pop(0)
        yield from held


UNTRACKED: tuple[type[LakeDataset], ...] = (_ForgetfulDataset, _LateDataset, _PrefetchingDataset)
"""Datasets that are wrong, without receipts that would tell: only counting rows finds them out."""


def make_of(wrong: type[Wrapped] | None, folder: Any, **fixed: Any) -> Callable[..., Any]:
    """A ``make_loader`` of wrong loaders; None: of right ones."""

    table = open_table(folder)

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> Any:
        arguments = {"batch_size": 3, "num_lanes": 6, "shuffle": True, **fixed, **options}
        dataset = dataset_of(table, rank=rank, world_size=world_size, **arguments)
        loader = LakeLoader(dataset, num_workers=num_workers)
        return loader if wrong is None else wrong(loader)

    return make_loader
