"""This module checks that every row counts exactly once, whatever happens to a job: the law, as a call.

    consumed + rest == table, as multisets, when restored at every offset, chained, on every topology

`assert_exactly_once` runs a job of each topology through an epoch, and checkpoints at every offset (or a sample) while
batches that were read ahead are in flight. It restores each checkpoint on that topology and on others, and reads to the
end. Then it draws longer histories: chains of checkpoints, crashes that lose steps, other topologies, over epoch
borders. It makes a failing history as small as it can, and prints a script that replays it.

`replay` runs one history. Nothing depends on time or chance: the same arguments do the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.errors import ConfigError
from lakeckpt.testing.attempts import Attempt, Topology, TopologyLike, count, script
from lakeckpt.testing.job import Job, MakeLoader, SavedStates, Step
from lakeckpt.testing.observed import Observed, Violation
from lakeckpt.testing.packed_laws import PackedDocuments
from lakeckpt.testing.receipt_laws import TrueRows
from lakeckpt.testing.row_keys import Key, RowKeys, canonical

__all__ = ["DEFAULT_TOPOLOGIES", "Offsets", "assert_exactly_once", "chosen", "replay"]

Offsets = int | Literal["all"]

DEFAULT_TOPOLOGIES: tuple[TopologyLike, ...] = ((1, 0), (2, 0), (3, 0), (1, 2))
_ENDLESS_EPOCHS = 2
_MOST_STEPS = 1_000_000
_SHRINKING_RUNS = 80


def assert_exactly_once(
    make_loader: MakeLoader,
    *,
    topologies: Iterable[TopologyLike] = DEFAULT_TOPOLOGIES,
    offsets: Offsets = 12,
    chains: int = 3,
    key: Key = None,
    expected: Iterable[Hashable] | None = None,
    seed: int = 0,
) -> None:
    """Prove that what ``make_loader`` makes consumes every row exactly once per epoch, restored anywhere.

    Of packed sequences (`lakeckpt.pack`) every token of every document is counted, and no sequence may be split.

    Args:
        make_loader: called as ``make_loader(rank, world_size, num_workers, **options)``; returns a new
            `lakeckpt.LakeLoader` over a new `lakeckpt.LakeDataset` made with these ``rank`` and ``world_size`` (or the
            dataset itself, or a torchdata ``StatefulDataLoader`` over one, which goes on with as many ranks and workers
            as it had: give it one topology at a time). Only a `LakeLoader` can be checked with ``drop_last=True``.
            Small tables: every restore reads the rest of the epoch.
        topologies: (ranks, workers), or (ranks, workers, options), or `Topology`; all ranks run in this process. A
            loader that has not the ``num_workers`` that its topology asks for is refused.
        offsets: at how many steps of an epoch to restore, evenly spread: 1 or more, or ``"all"``.
        chains: how many random histories of several checkpoints, crashes and topologies to replay.
        key: what tells rows apart: None, whole rows; a column; or a function from an item to the keys of its rows.
            A column's rows are held to the table's, batch by batch: if a transform drops, makes or reorders rows, or
            gives something else than columns, only a function will do. With ``drop_last=True`` it gives one key for
            each row.
        expected: the keys of one epoch. None: those of the table; if a transform or ``key`` made them incomparable,
            those of one run without a restore. If ``make_loader`` loads a state, histories begin there: give the keys
            of what is left of its epoch, and ``chains=0``.
        seed: chooses the histories.

    Raises AssertionError saying what does not hold, with the smallest history found that shows it, as a script; and
    ConfigError if the arguments leave nothing to prove.
    """
    every = [Topology.of(one) for one in topologies]
    if not every:
        raise ConfigError("assert_exactly_once needs at least one topology")
    if offsets != "all":
        offsets = count("offsets", offsets, least=1, otherwise=" or 'all'")
    chains = count("chains", chains, least=0)
    law = _Law(make_loader, key=key, expected=expected, first=every[0])
    for number, topology in enumerate(every):
        law.restore_everywhere(topology, every[number + 1 :] + every[:number], offsets)
    choose = random.Random(seed)
    for _ in range(chains):
        history = [
            Attempt(topology=choose.choice(every), steps=_some_steps(choose, law.steps), lost=choose.randrange(4))
            for _ in range(choose.randrange(2, 6))
        ]
        law.hold(history, partial(law.replay, history))


def replay(
    make_loader: MakeLoader,
    history: Sequence[Attempt],
    *,
    key: Key = None,
    expected: Iterable[Hashable] | None = None,
) -> None:
    """Replay one history; AssertionError if a row did not count exactly once. Arguments as `assert_exactly_once`."""
    if not history:
        raise ConfigError("a history has at least one attempt")
    law = _Law(make_loader, key=key, expected=expected, first=Topology.of(history[-1].topology))
    law.hold(history, lambda: law.replay(history), shrink=False)


def _truth_of(dataset: LakeDataset, keys: RowKeys, expected: Iterable[Hashable] | None) -> TrueRows | PackedDocuments:
    """Return what the table holds, to compare batches with."""
    if dataset.packing is None:
        return TrueRows(dataset, keys.of_table())
    if expected is not None:
        raise ConfigError(
            "the tokens of packed sequences are those of the table: give expected= with key=function only"
        )
    return PackedDocuments(dataset, keys.documents())


def _some_steps(choose: random.Random, epoch: int) -> int | None:
    """Return a number of steps up to two epochs; None: to the end of an epoch."""
    return None if choose.random() < 0.15 else choose.randrange(2 * epoch + 2)


class _Law:
    """The law for one ``make_loader``."""

    def __init__(
        self, make_loader: MakeLoader, *, key: Key, expected: Iterable[Hashable] | None, first: Topology
    ) -> None:
        self._make_loader = make_loader
        self._key = key
        self._truth: TrueRows | PackedDocuments | None = None
        self._expected: Counter[Hashable] | None = None
        self.steps = 0
        """Steps of an epoch (of an endless stream: of two), on the topology that has the most."""
        probe = Job(make_loader, first, None, Observed(), key=key, truth=None)
        self._in_order = probe.tracked
        if probe.keys.comparable:
            self._truth = _truth_of(probe.dataset, probe.keys, expected)
        self._drops = probe.dataset.identity.tail == "drop"
        self._endless = probe.endless
        probe.close()
        self._rows = probe.dataset.identity.rows
        self._fresh = partial(Observed, counted="tokens" if isinstance(self._truth, PackedDocuments) else "rows")
        if expected is not None:
            self._expected = Counter(canonical(one) for one in expected)
            if self._rows and not self._expected:
                raise ConfigError(
                    f"expected= is empty, and an epoch has {self._rows} rows: it holds the keys of all of them"
                )
        elif self._truth is not None:
            self._expected = self._truth.every()

    # --- jobs

    def _job(self, topology: Topology, saved: SavedStates | None, observed: Observed) -> Job:
        return Job(self._make_loader, topology, saved, observed, key=self._key, truth=self._truth)

    def _take(self, job: Job, steps: int) -> list[Step]:
        """Take ``steps`` steps, over epoch borders; what was consumed of an epoch that ends is checked."""
        taken: list[Step] = []
        empty = 0
        while len(taken) < steps and empty < 2:  # two empty epochs in turn: a table without rows
            found = job.step()
            empty = 0 if found is not None else empty + 1
            if found is None:
                self._check_ended(job)
            else:
                taken.append(found)
        return taken

    def _finish(self, job: Job) -> list[Step]:
        """Go on to the end of the epoch, or in an endless stream until every epoch that has begun is complete."""
        taken: list[Step] = []
        begun = max(job.observed.rows, default=0)
        enough = (begun + 3) * sum(self._expected.values() if self._expected else [_MOST_STEPS]) + 16
        while len(taken) < enough:
            if job.endless and self._complete(job, begun):
                return taken
            found = job.step()
            if found is None:
                self._check_ended(job)
                return taken
            taken.append(found)
        for epoch in sorted(job.observed.rows)[: begun + 1] if self._expected else []:
            job.observed.check(epoch, self._expected or Counter(), may_miss=0)
        raise Violation(f"epoch {job.epoch} has not ended after {len(taken)} more steps")

    def _complete(self, job: Job, begun: int) -> bool:
        assert self._expected is not None
        for epoch in range(begun + 1):
            seen = job.observed.rows.get(epoch, Counter())
            if seen - self._expected:
                job.observed.check(epoch, self._expected, may_miss=0)
            if seen.total() < self._expected.total():
                return False
        return True

    def _check_ended(self, job: Job) -> None:
        if self._expected is None:
            self._expected = Counter(job.observed.rows.get(job.epoch - 1, Counter()))
        job.observed.check(job.epoch - 1, self._expected, may_miss=job.may_miss())
        job.check_dealt()

    # --- histories

    def replay(self, history: Sequence[Attempt]) -> None:
        """Run ``history``; Violation if it breaks the law."""
        self._reference(Topology.of(history[-1].topology))
        saved, observed = None, self._fresh()
        for number, attempt in enumerate(history):
            job = self._job(Topology.of(attempt.topology), saved, observed)
            try:
                if attempt.steps is not None:
                    self._take(job, attempt.steps)
                if attempt.steps is None or number == len(history) - 1:
                    self._finish(job)
                saved, observed = job.save(), job.observed.copy()
                self._take(job, attempt.lost)
            finally:
                job.close()

    def _reference(self, topology: Topology) -> None:
        """Count the keys of an epoch by a run without a restore, if the table does not give them."""
        if self._expected is not None:
            return
        if self._endless or self._drops:
            raise ConfigError(
                "what one epoch holds is not known from the table (a transform, or key=function, makes rows of its "
                "own), nor from a run without a restore (endless=True, or drop_last=True): give expected=, or "
                'key="a column"'
            )
        job = self._job(Topology(world_size=1, num_workers=0, options=topology.options), None, self._fresh())
        try:
            self._finish(job)
        finally:
            job.close()
        if self._rows and not self._expected:
            raise ConfigError(
                f"an epoch of {self._rows} rows gave no key at all, so that nothing could be missed: let key= return "
                "the keys of the rows that an item holds, or give expected="
            )

    def restore_everywhere(self, topology: Topology, others: list[Topology], offsets: Offsets) -> None:
        """Run ``topology`` through an epoch; restore it at ``offsets``, on itself and on one of ``others`` in turn."""
        saves, steps = self._saves(topology)
        self.steps = max(self.steps, len(steps))
        for number, offset in enumerate(chosen(offsets, len(saves))):
            saved, observed = saves[offset]
            targets = [topology]
            if others:
                targets += others if offsets == "all" else [others[number % len(others)]]
            for target in targets:
                history = [Attempt(topology=topology, steps=offset), Attempt(topology=target)]
                rest = steps[offset:] if self._same_order(topology, target) else None
                self.hold(history, partial(self._rest, target, saved, observed, rest))

    def _same_order(self, one: Topology, other: Topology) -> bool:
        """True if a checkpoint of ``one`` goes on in the very same order on ``other``."""
        same = one.world_size == other.world_size and dict(one.options) == dict(other.options)
        return same and (self._in_order or one.num_workers == other.num_workers)

    def _saves(self, topology: Topology) -> tuple[list[tuple[SavedStates, Observed]], list[Step]]:
        """Return (what was saved, what had been consumed) before each step and after the last, and the steps."""
        saves: list[tuple[SavedStates, Observed]] = []
        steps: list[Step] = []
        history = [Attempt(topology=topology)]

        def run() -> None:
            self._reference(topology)
            job = self._job(topology, None, self._fresh())
            try:
                saves.append((job.save(), job.observed.copy()))
                while not (job.endless and self._complete(job, _ENDLESS_EPOCHS - 1)):
                    found = job.step()
                    if found is None:
                        self._check_ended(job)
                        break
                    steps.append(found)
                    history[:] = [Attempt(topology=topology, steps=len(steps)), Attempt(topology=topology)]
                    saves.append((job.save(), job.observed.copy()))
            finally:
                job.close()

        self.hold(history, run)
        return saves, steps

    def _rest(self, topology: Topology, saved: SavedStates, observed: Observed, expected: list[Step] | None) -> None:
        job = self._job(topology, saved, observed.copy())
        try:
            found = self._finish(job)
            if expected is not None:
                _check_order(found, expected)
            job.save()
        finally:
            job.close()

    # --- failures

    def hold(self, history: Sequence[Attempt], run: Callable[[], None], *, shrink: bool = True) -> None:
        """Run ``run``. If the law breaks, raise `AssertionError` with the smallest history that breaks it."""
        try:
            run()
        except ConfigError:
            raise
        except Exception as error:  # a loader that fails breaks the law as well, and is reported with its history
            smallest, reason = self._shrunk(list(history), error) if shrink else (list(history), error)
            raise AssertionError(self._message(smallest, reason)) from reason

    def _shrunk(self, history: list[Attempt], reason: Exception) -> tuple[list[Attempt], Exception]:
        """Return the smallest history found that still breaks the law, and how it does."""
        left = _SHRINKING_RUNS
        again = True
        while again and left:
            again = False
            for candidate in _smaller(history):
                left -= 1
                try:
                    self.replay(candidate)
                except Exception as error:
                    history, reason, again = candidate, error, True
                    break
                if not left:
                    break
        return history, reason

    def _message(self, history: list[Attempt], error: Exception) -> str:
        what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        arguments = [] if self._key is None else [f"key={self._key!r}" if isinstance(self._key, str) else "key=key"]
        return (
            f"exactly-once does not hold: {what}\n\nReplay it with:\n\n"
            f"{script(history, arguments)}\n"
            "Each attempt takes `steps` steps of every rank, checkpoints, takes `lost` more and crashes."
        )


def _check_order(found: list[Step], expected: list[Step]) -> None:
    for number, (mine, before) in enumerate(zip(found, expected, strict=False)):
        if mine.keys != before.keys:
            raise Violation(
                f"resumed on as many ranks, step {number} after the restore gave {_short(mine)}, and without a crash "
                f"it gave {_short(before)}"
            )


def _short(step: Step) -> str:
    shown = repr(step.keys)
    return shown if len(shown) <= 200 else shown[:200] + "…"


def _smaller(history: list[Attempt]) -> Iterator[list[Attempt]]:
    """Yield simpler histories: fewer attempts, nothing lost, fewer steps."""
    for i in range(len(history) - 1):
        yield history[:i] + history[i + 1 :]
    for i, attempt in enumerate(history[:-1]):
        if attempt.lost:
            yield [*history[:i], Attempt(topology=attempt.topology, steps=attempt.steps), *history[i + 1 :]]
        steps = attempt.steps or 0
        for fewer in sorted({0, steps // 2, steps - 1} & set(range(steps))):
            less = Attempt(topology=attempt.topology, steps=fewer, lost=attempt.lost)
            yield [*history[:i], less, *history[i + 1 :]]


def chosen(offsets: Offsets, existing: int) -> list[int]:
    """Return which of the offsets 0 … ``existing`` - 1 to restore at: evenly spread, the first and the last among them.

    >>> chosen(3, 11), chosen("all", 3), chosen(1, 9)
    ([0, 5, 10], [0, 1, 2], [4])
    """
    if offsets == "all" or existing <= offsets:
        return list(range(existing))
    if offsets == 1:
        return [existing // 2]
    return sorted({round(i * (existing - 1) / (offsets - 1)) for i in range(offsets)})
