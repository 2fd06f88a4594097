"""Any history of trainers that live on, crash, and are rolled back: every restore succeeds, every row counts once."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import not_rolled_back, read_history
from lakeckpt.checkpoint.persist.log import read_log
from lakeckpt.checkpoint.restore.run_log import RunLog, before_orders
from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.errors import AttemptSuperseded
from lakeckpt.testing.faulty_storage import FaultyStorage, Killed, StoreFault
from tests.checkpoint.rig import Counter, MemoryStorage, Reader, manager

KEEP = 2


class Trainer:
    """One attempt; what it has done and saved is in its counter."""

    def __init__(self, storage: Any, step: int | None = None) -> None:
        self.objects = {"n": Counter(torch.zeros(3)), "reader": Reader(rows=100_000)}
        self.saver = manager(storage, self.objects, keep=KEEP)
        self.done = self.saver.restore(step)
        assert self.saver.restore_report.damaged == ()
        assert self.objects["n"].value.tolist() == [self.done] * 3
        assert self.objects["reader"].state_dict()["step"] == self.done
        self.batches = iter(self.objects["reader"])
        self.is_superseded = False

    def save(self) -> None:
        """A step, saved; nothing where somebody owns the run by now."""
        if self.is_superseded:
            return
        next(self.batches)
        self.objects["n"].value = self.objects["n"].value + 1
        self.saver.step()
        try:
            self.done = self.saver.save().step
        except AttemptSuperseded:
            self.is_superseded = True


class Beside(FaultyStorage):
    """A storage as one restore sees it, while another trainer saves before some of its calls."""

    def __init__(self, inner: MemoryStorage, trainer: Trainer, moments: frozenset[int]) -> None:
        super().__init__(inner, before=self.happens)
        self.trainer, self.moments, self.count = trainer, moments, 0

    def happens(self, method: str, path: str) -> None:
        if path.startswith("log/") and method == "read":
            return  # by several threads at once
        self.count += 1
        if self.count in self.moments:
            self.trainer.save()


moments = st.frozensets(st.integers(1, 25), max_size=6)
events = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 4)),
    st.tuples(st.just("crash")),
    st.tuples(st.just("restart beside"), moments),
    st.tuples(st.just("restore dies"), st.integers(1, 14)),
    st.tuples(st.just("roll back"), st.integers(0, 3)),
    st.tuples(st.just("restore step"), st.integers(0, 3), moments),
)


@given(st.lists(events, max_size=8))
def test_every_restore_succeeds_and_every_row_counts_once_in_any_history(history: list[tuple[Any, ...]]) -> None:
    storage = MemoryStorage()
    live = Trainer(storage)
    live.save()
    ordered: int | None = None  # what the script asks for, as long as it does
    for what, *more in history:
        if what == "save":
            for _ in range(more[0]):
                live.save()
        elif what == "crash":
            newest = read_history(storage).tip
            live = Trainer(storage, ordered)
            assert newest is not None and live.done == newest.step
        elif what == "restart beside":
            old = live
            live = Trainer(Beside(storage, old, more[0]), ordered)
            assert live.done == old.done or old.is_superseded
        elif what == "restore dies":
            before = [one.slot for one in read_history(storage).chain]
            try:
                Trainer(FaultyStorage(storage, fail_at={("*", more[0]): StoreFault.KILL}), ordered)
            except Killed:
                assert [one.slot for one in read_history(storage).chain] == before
            live = Trainer(storage, ordered)
        else:
            log = RunLog(storage, reads_all=True)
            log.look()
            kept = log.kept(before_orders(log.view) if what == "roll back" else log.view)
            steps = sorted(one.step for one in kept)
            step = steps[more[0] % len(steps)]
            if what == "roll back":
                roll_back(storage, step)
                ordered = None
                live.save()
                assert live.is_superseded
                live = Trainer(storage)
                assert live.done == step
            else:
                ordered = step
                before = [one.step for one in read_history(storage).chain]
                live = Trainer(storage, step)
                assert live.done in (step, before[-1])
    live.save()
    told = read_history(storage)
    assert told.whole and [one.step for one in told.chain] == list(range(1, live.done + 1))
    assert [one.slot for one in not_rolled_back(read_log(storage))] == [one.slot for one in reversed(told.chain)]
    rows = [one.readers["reader"].consumed()[0] for one in told.chain]
    assert sum(one.size for one in rows) == 10 * live.done
    total = rows[0]
    for one in rows[1:]:
        assert not total.intersection(one)
        total = total.union(one)
    assert verify(storage).every_damage == ()
