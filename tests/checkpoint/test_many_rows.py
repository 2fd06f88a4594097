"""Transforms that yield several rows of one, under the manager: each counts once, which the audit proves."""

from __future__ import annotations

import threading
from collections import Counter as Multiset
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lakeckpt import LakeDataset, LakeLoader, mix
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks, training
from tests.checkpoint.scripts import write_table
from tests.data.flow_jobs import Item, items, job_store, loader_of, whole
from tests.data.test_tokenizing import EVERY, packed, texts, tokens_of
from tests.data.test_whole_documents import LENGTHS
from tests.data.test_whole_documents import every as documents_tokens
from tests.data.test_whole_documents import loader_of as documents_loader
from tests.data.test_whole_documents import write as write_documents
from tests.patience import PATIENCE_S

ROWS = 200
RARE = [row for row in range(ROWS) if row * 7919 % 13 < 4]
__all__ = ["job_store", "texts"]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lake"))


def attempt(
    storage: MemoryStorage,
    lake: Path,
    world_size: int,
    steps: int | None,
    *,
    every: int,
    epochs: int = 1,
    make: Callable[..., LakeLoader] = loader_of,
    items_in: Callable[[Any], list[Any]] = items,
    **options: Any,
) -> list[list[tuple[int, Any]]]:
    """Restore, take ``steps`` steps and save, and one more step, which is lost; None: go on to the end of the epochs.
    What each rank got up to the save: (epoch, item)."""
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> list[tuple[int, Any]]:
        loader = make(lake, rank=rank, world_size=world_size, **options)
        saver = manager(storage, {"reader": loader}, exchange=exchange, waiter=waiter, persist_every=every)
        saver.restore()
        found: list[tuple[int, Any]] = []
        taken = 0
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                if taken == steps:
                    return found
                taken += 1
                found += [(epoch, item) for item in items_in(batch)]
                saver.step(batch)
                if taken == steps:
                    saver.save()
            saver.save()
        return found

    return good(run_ranks(world_size, body, waiters=[waiter]))


def proved(storage: MemoryStorage) -> AuditReport:
    report = audit(storage)
    assert report.verdict == "proved", report.to_plain()
    return report


@pytest.mark.parametrize("every", [1, 10**6])
@pytest.mark.parametrize(
    "chain",
    [
        [(1, 9), (2, 7), (4, 5), (3, None)],
        pytest.param([(3, 4), (2, 40), (2, 12), (1, None)], marks=pytest.mark.soak),
    ],
)
def test_every_yielded_row_counts_once_on_any_chain_of_topologies(
    chain: list[tuple[int, int | None]], every: int, lake: Path, job_store: dist.Store
) -> None:
    storage, found = MemoryStorage(), Multiset[tuple[int, Item]]()
    for world_size, steps in chain:
        for got in attempt(storage, lake, world_size, steps, every=every, epochs=2):
            found.update(got)
        state = State.from_plain(read_history(storage).tip.readers["reader"].state)
        assert state.is_whole and state.segment.world_size == world_size
        assert Plan(state).begun or steps is None
        proved(storage)
    assert found == Multiset((epoch, item) for epoch in range(2) for item in whole(ROWS))
    report = proved(storage)
    assert [(one.status, one.once) for one in report.readers[0].epochs] == [("complete", ROWS)] * 2


def rare(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of some rows, none of most."""
    return [{"id": row["id"], "part": 0}] if int(row["id"]) in RARE else []


@pytest.mark.parametrize(("world_size", "every"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.soak), (2, 10**6)])
def test_an_epoch_goes_over_into_the_next_where_the_last_lane_of_a_rank_yields_nothing(
    world_size: int, every: int, lake: Path, job_store: dist.Store
) -> None:
    """Two rows a lane: a rank may learn after its last step, which is saved, that its last lane has no item."""
    storage, found, epochs = MemoryStorage(), Multiset[tuple[int, Item]](), 4
    for got in attempt(storage, lake, world_size, None, every=every, epochs=epochs, num_lanes=100, transform=rare):
        found.update(got)
    assert found == Multiset((epoch, (row, 0)) for epoch in range(epochs) for row in RARE)
    assert [(one.status, one.once) for one in proved(storage).readers[0].epochs] == [("complete", ROWS)] * epochs


def test_a_cut_that_one_rank_captures_after_the_end_of_the_epoch_is_that_of_the_last_step(
    lake: Path, job_store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has no memory for a capture in the loop. What the end shows of lanes is recorded with the next save."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    cut = CaptureEngine.cut

    def scarce(self: CaptureEngine, which: CutId, *, must: bool, **given: Any) -> bool:
        return (must or threading.current_thread().name == "rank 0") and cut(self, which, must=must, **given)

    monkeypatch.setattr(CaptureEngine, "cut", scarce)

    def body(rank: int, exchange: HubExchange) -> None:
        threading.current_thread().name = f"rank {rank}"
        loader = loader_of(lake, rank=rank, world_size=2, num_lanes=100, transform=rare)
        options = {"exchange": exchange, "waiter": waiter, "arenas": tmp_path / str(rank), "timeout_s": PATIENCE_S}
        with manager(storage, {"reader": loader, **training()}, capture_every=1, **options) as saver:
            saver.restore()
            for _ in range(3):
                for batch in loader:
                    saver.step(batch)
                    saver._saves._engine.wait()
                saver.save()

    good(run_ranks(2, body, waiters=[waiter]))
    assert len(read_history(storage).chain) == 3
    statuses = [(one.status, one.once) for one in proved(storage).readers[0].epochs]
    assert statuses[:2] == [("complete", ROWS)] * 2


def tokenizing(lake: Path, **options: Any) -> LakeLoader:
    return LakeLoader(packed(lake, **options))


def test_every_token_of_texts_that_are_tokenized_on_the_fly_counts_once_on_any_chain(
    texts: Path, job_store: dist.Store
) -> None:
    storage, found = MemoryStorage(), Multiset[tuple[int, int]]()
    for world_size, steps in [(1, 5), (2, 4), (3, 2), (2, None)]:
        made: dict[str, Any] = {"make": tokenizing, "items_in": lambda batch: tokens_of([batch])}
        for got in attempt(storage, texts, world_size, steps, every=3, epochs=2, **made):
            found.update(got)
        proved(storage)
    assert found == Multiset((epoch, token) for epoch in range(2) for token in EVERY)
    assert [one.status for one in proved(storage).readers[0].epochs] == ["complete"] * 2


def test_every_token_of_whole_documents_counts_once_on_any_chain(tmp_path: Path, job_store: dist.Store) -> None:
    folder, storage, found = write_documents(tmp_path, LENGTHS), MemoryStorage(), Multiset[tuple[int, int]]()
    for world_size, steps in [(1, 5), (2, 2), (3, 2), (2, None)]:
        made: dict[str, Any] = {"make": documents_loader, "items_in": lambda batch: tokens_of([batch])}
        for got in attempt(storage, folder, world_size, steps, every=3, epochs=2, **made):
            found.update(got)
        proved(storage)
    every = documents_tokens(LENGTHS)
    assert found == Multiset((epoch, token) for epoch in range(2) for token in every)
    groups = -(-len(LENGTHS) // 2 // 3) * 2
    assert [(one.status, one.once) for one in proved(storage).readers[0].epochs] == [("complete", groups)] * 2


def accumulated(
    storage: MemoryStorage, lake: Path, world_size: int, steps: int | None, make: Callable[..., LakeLoader]
) -> list[list[Any]]:
    """The idiom of docs/how-to/accumulate.md for an epoch, three batches a step; ``steps``: the job is killed then."""
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> list[Any]:
        loader = make(lake, rank=rank, world_size=world_size)
        saver = manager(storage, {"reader": loader}, exchange=exchange, waiter=waiter, persist_every=1)
        done = saver.restore()
        used, waiting = [], []
        for batch in loader:
            waiting.append(batch)
            if len(waiting) == 3 or batch.receipt.last:
                saver.step(batch)
                used, waiting = used + waiting, []
                if steps is not None and saver.steps_done == done + steps:
                    return used
        if waiting:
            saver.step(waiting[-1])
        return used + waiting

    return good(run_ranks(world_size, body, waiters=[waiter]))


def mixture(lake: Path, **given: Any) -> LakeLoader:
    """Rows of two sources, until one of them is used up."""
    every = {name: (LakeDataset(lake, batch_size=4, **given), weight) for name, weight in (("a", 3.0), ("b", 1.0))}
    return LakeLoader(mix(every, exhausted="continue", num_lanes=2))


@pytest.mark.parametrize("chain", [(1, 1), (2, 1), (1, 2)])
def test_tokens_count_once_where_steps_take_several_batches(
    texts: Path, job_store: dist.Store, chain: tuple[int, int]
) -> None:
    storage = MemoryStorage()
    found = []
    for world_size, steps in zip(chain, (2, None), strict=True):

        def make(folder: Path, **given: Any) -> LakeLoader:
            return LakeLoader(packed(folder, num_lanes=2, **given))

        ran = accumulated(storage, texts, world_size, steps, make)
        found += [token for batches in ran for token in tokens_of(batches)]
    assert sorted(found) == EVERY
    proved(storage)


@pytest.mark.parametrize("chain", [(1, 2), (2, 1)])
def test_a_mixture_counts_once_where_steps_take_several_batches(lake: Path, chain: tuple[int, int]) -> None:
    storage, found = MemoryStorage(), []
    for world_size, steps in zip(chain, (3, None), strict=True):
        ran = accumulated(storage, lake, world_size, steps, mixture)
        found += [one for batches in ran for batch in batches for one in batch["id"].tolist()]
    state = {row: count for row, count in Multiset(found).items() if count > 2}
    assert len(found) > ROWS and not state
    assert audit(storage).verdict == "proved"
