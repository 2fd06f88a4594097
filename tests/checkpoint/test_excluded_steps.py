"""A roll-back leaves out the batches that steps have used: every other row counts once, on any topology, on record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch.distributed as dist

from lakeckpt import LakeLoader, Ragged, mix, open_table, pack
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.consumed.exclusions import crashed, of_micro_batch, withdrawn, without_exclusions
from lakeckpt.checkpoint.consumed.steps_used import exclusions_of_steps
from lakeckpt.checkpoint.format.manifest import Exclusion
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.restore.choosing import Chooser
from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.cli.main import main
from lakeckpt.core.state import State
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError
from lakeckpt.testing import assert_exactly_once
from lakeckpt.tracking.steps import Frontier, StepRecord, StepRun
from tests.checkpoint.agent.rig import take_checksums
from tests.checkpoint.rig import Counter as CountedTo
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.data.reading import dataset_of
from tests.patience import PATIENCE_S
from tests.reading.cases import write_file

ROWS = 240


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Two tables of 240 rows in row groups of twenty; each row has its id, and a document of three tokens."""
    for name, first in (("a", 0), ("b", 10_000)):
        groups = []
        for start in range(first, first + ROWS, 20):
            ids = np.arange(start, start + 20)
            tokens = [[3 * at, 3 * at + 1, 3 * at + 2] for at in ids.tolist()]
            groups.append(pa.table({"id": ids, "tokens": tokens}))
        write_file(tmp_path / name / "part.parquet", groups)
    return tmp_path


def read(lake: Path, kind: str, rank: int, ranks: int, **options: Any) -> Any:
    """The reader of one rank, of a kind."""
    plain = {"batch_size": 4, "shuffle": True, "shuffle_window": 3, "seed": 7, "rank": rank, "world_size": ranks}
    names = ["a", "b"] if kind.startswith("mixture") else ["a"]
    if kind == "flow":
        options |= {"batch_size": 5, "transform": token_by_token, "rows": "many"}
    every = [dataset_of(open_table(lake / name), **plain | options, endless=kind == "endless") for name in names]
    if kind == "packed":
        return pack(dataset_of(open_table(lake / "a"), **plain | {"batch_size": 2}), length=5)
    if kind.startswith("mixture"):
        sources = {name: (one, 2.0 - at) for at, (name, one) in enumerate(zip(names, every, strict=True))}
        return mix(sources, exhausted="stop", granularity=kind.partition(" ")[2] or "row")
    return every[0]


def token_by_token(row: dict[str, Any]) -> Any:
    yield from ({"id": np.int64(token)} for token in row["tokens"].tolist())


def keys_of(batch: Any) -> list[int]:
    """What tells the rows of a batch apart: ids, or tokens of packed sequences."""
    if "loss_mask" in batch:
        return [int(one) for one in batch["tokens"].reshape(-1).tolist()]
    assert not isinstance(batch["id"], Ragged)
    return [int(one) for one in batch["id"].tolist()]


class Job:
    """Attempts of one run. ``used`` has the keys of each step of the history."""

    def __init__(self, lake: Path, kind: str, *, memory: Path | None = None, **options: Any) -> None:
        self.lake, self.kind, self.options = lake, kind, options
        self.captures: dict[str, Any] = {}
        if memory is not None:
            self.captures = {"capture_every": 1, "arenas": memory, "timeout_s": PATIENCE_S}
        self.storage = MemoryStorage()
        self.used: dict[int, list[int]] = {}
        self.sizes: dict[int, list[int]] = {}
        """Step → the rows of each of its micro-batches."""

    def attempt(
        self,
        steps: int | None = None,
        *,
        ranks: int = 1,
        workers: int = 0,
        every: int = 3,
        accumulate: int = 1,
        restore: dict[str, Any] | None = None,
    ) -> int:
        """Take ``steps`` steps (None: to the end), of ``accumulate`` batches each, and save ``every`` so many. Returns
        the step that it began at."""
        waiter, savers = EventWaiter(self.storage), list[Any]()

        def body(rank: int, exchange: HubExchange) -> tuple[int, dict[int, list[list[int]]]]:
            found: dict[int, list[list[int]]] = {}
            loader = LakeLoader(read(self.lake, self.kind, rank, ranks, **self.options), num_workers=workers)
            options = {"exchange": exchange, "waiter": waiter, "keep": 99, **self.captures}
            saver = manager(self.storage, {"n": CountedTo(0), "reader": loader}, **options)
            savers.append(saver)
            done = saver.restore(**restore or {})
            waiting: list[list[int]] = []
            last = None
            for last in loader:
                waiting.append(keys_of(last))
                if len(waiting) < accumulate and not last.receipt.last:
                    continue
                saver.step(last)
                if isinstance(saver._saves, Background):
                    saver._saves._engine.wait()
                found[saver.steps_done], waiting = waiting, []
                if saver.steps_done % every == 0:
                    saver.save()
                if steps is not None and saver.steps_done == done + steps:
                    return done, found
            saver.save()
            return done, found

        results = good(run_ranks(ranks, body, waiters=[waiter]))
        for saver in savers if self.captures else ():
            saver._saves._engine.close()  # as the kernel does for a process that ends
        if self.captures:
            take_checksums(self.captures["arenas"])
        done = results[0][0]
        self.used = {step: keys for step, keys in self.used.items() if step <= done}
        self.sizes = {step: sizes for step, sizes in self.sizes.items() if step <= done}
        for _, found in results:
            for step, batches in found.items():
                self.used.setdefault(step, []).extend(key for batch in batches for key in batch)
                self.sizes.setdefault(step, []).extend(map(len, batches))
        return done

    def keys(self, first: int = 1, stop: int = 10**9) -> list[int]:
        """The keys of the steps of the history from ``first`` to ``stop`` - 1."""
        return [key for step, keys in sorted(self.used.items()) if first <= step < stop for key in keys]


TOPOLOGIES = [((1, 0), (2, 0), (4, 0)), ((4, 0), (1, 0), (3, 0)), ((2, 1), (4, 0), (1, 0))]


@pytest.mark.parametrize("kind", ["rows", "packed"])
@pytest.mark.parametrize("topologies", TOPOLOGIES, ids=str)
def test_every_row_but_those_of_the_excluded_steps_counts_once_on_any_topology(
    lake: Path, kind: str, topologies: Sequence[tuple[int, int]]
) -> None:
    job = Job(lake, kind)
    (ranks, workers), second, third = topologies
    job.attempt(12, ranks=ranks, workers=workers)
    excluded = job.keys(8, 11)  # no checkpoint lies at step 7 or 10
    order = {"step": 6, "exclude_steps": (8, 11)}
    assert job.attempt(2, ranks=second[0], workers=second[1], every=2, restore=order) == 6
    assert job.attempt(ranks=third[0], workers=third[1], restore=order) == 8, "the order is given once"
    every = range(ROWS) if kind == "rows" else range(3 * ROWS)
    assert Counter(job.keys()) == Counter(every) - Counter(excluded)
    assert_full(job, last=2 * 4 // third[0])  # the last two micro-batches of each of up to four lanes
    report = audit(job.storage)
    assert report.verdict == "except" and report.excluded == len(excluded) // (1 if kind == "rows" else 5), report
    assert "excluded (order)" in report.words


def assert_full(job: Job, *, last: int = 0) -> None:
    """No micro-batch is empty, and all are full but those of the ``last`` steps."""
    assert all(size for sizes in job.sizes.values() for size in sizes)
    steps = sorted(job.sizes)[: -last or None]
    assert len({size for step in steps for size in job.sizes[step]}) == 1, job.sizes


@pytest.mark.parametrize("kind", ["mixture row", "mixture batch"])
def test_a_mixture_goes_on_without_the_batches_of_the_excluded_steps(lake: Path, kind: str) -> None:
    job = Job(lake, kind)
    job.attempt(14, ranks=2)
    excluded = job.keys(7, 12)
    assert job.attempt(5, ranks=4, restore={"step": 6, "exclude_steps": (7, 12)}) == 6
    assert job.attempt(ranks=1) == 9
    counts = Counter(job.keys())
    assert max(counts.values()) == 1 and not counts.keys() & set(excluded)
    assert_full(job)
    report = audit(job.storage)
    assert report.verdict == "except" and report.excluded == len(excluded), report
    assert all(not one.doubts and one.excluded for one in report.readers)


def test_a_stream_goes_on_without_the_batches_of_steps_in_an_epoch_that_has_not_begun(lake: Path) -> None:
    job = Job(lake, "endless", num_lanes=4)
    job.attempt(40, ranks=2)  # an epoch has 30 steps
    excluded = job.keys(29, 36)
    assert job.attempt(9, ranks=4, restore={"step": 24, "exclude_steps": (29, 36)}) == 24
    assert job.attempt(90, ranks=1) == 33
    before = {key: count for key, count in Counter(job.keys()).items() if key in set(excluded)}
    report = audit(job.storage)
    assert report.verdict == "except" and report.excluded == len(excluded) == 56, report
    (reader,) = report.readers
    assert [one.excluded for one in reader.epochs] == [16, 40, 0, 0]
    assert [one.once for one in reader.epochs[:2]] == [ROWS - 16, ROWS - 40]
    assert max(before.values()) <= len(reader.epochs) - 1
    assert_full(job)


def test_where_rows_yield_any_number_of_rows_the_steps_between_checkpoints_are_excluded_together(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [dist.HashStore() for _ in range(3)]
    job = Job(lake, "flow")
    for store, (ranks, steps, order) in zip(
        stores, ((2, 13, None), (1, 4, {"step": 6, "exclude_steps": (10, 13)}), (2, None, None)), strict=True
    ):
        monkeypatch.setattr("lakeckpt.data.flows.ends.job_store", lambda world_size, store=store: store)
        if order is not None:
            excluded = job.keys(10, 13)
            with pytest.raises(CheckpointMismatch, match=r"10 to 12 can be excluded together, but not 11 to 12"):
                roll_back(job.storage, 6, exclude_steps=(11, 13))
        job.attempt(steps, ranks=ranks, restore=order)
    counts = Counter(job.keys())
    missing = set(range(3 * ROWS)) - counts.keys()
    assert max(counts.values()) == 1 and set(excluded) <= missing
    # A row of which a part was used in these steps leaves the deal whole.
    assert {token // 3 for token in missing} == {token // 3 for token in excluded}
    report = audit(job.storage)
    assert report.verdict == "except" and report.excluded == len({token // 3 for token in excluded}), report


def test_a_cut_in_memory_that_has_gone_on_without_the_rows_is_restored_as_it_is(lake: Path, tmp_path: Path) -> None:
    job = Job(lake, "rows", memory=tmp_path / "memory")
    job.attempt(9, ranks=2)
    excluded = job.keys(7, 9)
    assert job.attempt(2, ranks=2, every=99, restore={"step": 6, "exclude_steps": (7, 9)}) == 6
    assert job.attempt(2, ranks=2, every=99) == 8, "nothing was saved since step 6"
    job.attempt(ranks=1)
    assert Counter(job.keys()) == Counter(range(ROWS)) - Counter(excluded)
    report = audit(job.storage)
    assert report.headline == f"PROVED EXCEPT {len(excluded)} rows", report


def test_steps_of_several_batches_are_excluded_with_all_of_them(lake: Path) -> None:
    job = Job(lake, "rows")
    job.attempt(9, ranks=2, accumulate=2, every=4)
    excluded = job.keys(7, 9)
    found, exclusions = roll_back(job.storage, 4, exclude_steps=(7, 9))
    assert found.step == 4 and sum(one.positions.size for one in exclusions) == len(excluded) == 32
    for _ in range(2):  # until something is saved, each attempt excludes them anew
        assert job.attempt(2, ranks=1, accumulate=2, every=99) == 4
    assert job.attempt(ranks=2, accumulate=2, every=4) == 4
    assert Counter(job.keys()) == Counter(range(ROWS)) - Counter(excluded)


def test_the_commands_say_what_was_excluded_and_which_steps_had_used_it(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    run = str(tmp_path / "run")
    for steps in (6, 3):
        loader = LakeLoader(read(lake, "rows", 0, 1))
        with manager(run, {"reader": loader}, persist_every=2) as saver:
            done = saver.restore()
            for batch in loader:
                saver.step(batch)
                if saver.steps_done == done + steps:
                    break
        if steps == 6:
            assert main(["rollback", run, "--step", "2", "--exclude-steps", "4:6"]) == 0
            said = capsys.readouterr().out
            assert "goes on from step 2" in said
            assert "excluded: 8 rows of 'reader', of the steps 4 to 5 of attempt 0" in said
    assert saver.restore_report is not None and saver.restore_report.excluded == (
        "8 rows of 'reader', of the steps 4 to 5 of attempt 0: order",
    )
    assert main(["audit", run]) == 0
    said = capsys.readouterr().out
    assert "PROVED EXCEPT 8 rows" in said and "8 excluded (order)" in said
    assert "in epoch 0, before step 3; the steps 4 to 5 of an abandoned history had used them" in said
    assert main(["explain", run, "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert "left the deal before this step (order): 8 rows, which the steps 4 to 5 had used" in said
    assert main(["explain", run, "--step", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["readers"][0]["left_out"] == []
    assert main(["inspect", run]) == 0
    assert "rolled back to step 2 (slot 1), without the batches of the steps 4 to 5," in capsys.readouterr().out
    assert main(["explore", run, "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert '"left_out":[{"reason":"order","rows":8,"steps":[4,6]}]' in page.replace(" ", "")


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_an_epoch_that_was_not_begun_goes_on_without_the_batches_of_steps_on_another_number_of_lanes(
    lake: Path, kind: str
) -> None:
    job = Job(lake, kind)
    job.attempt(ranks=2)  # to the end of epoch 0, and saved there: 2 lanes
    first = max(job.used)
    job.attempt(7, ranks=4, every=7)  # 4 lanes
    excluded = job.keys(first + 2, first + 5)
    order = {"step": first, "exclude_steps": (first + 2, first + 5)}
    assert job.attempt(2, ranks=1, every=2, restore=order) == first
    assert job.attempt(ranks=3) == first + 2
    every = range(ROWS) if kind == "rows" else range(3 * ROWS)
    assert Counter(job.keys(first + 1)) == Counter(every) - Counter(excluded)
    assert Counter(job.keys(1, first + 1)) == Counter(every)
    report = audit(job.storage)
    assert report.verdict == "except" and report.readers[0].epochs[1].status == "complete", report
    assert all(size for sizes in job.sizes.values() for size in sizes)


def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason(lake: Path) -> None:
    job = Job(lake, "rows")
    job.attempt(ranks=4)
    job.attempt(6, ranks=4)
    slots = len(job.storage.list("log"))
    for steps in ((3, 5), (4, 4), (5, 4), (2, 9), (4,), (4.0, 5), "45"):
        with pytest.raises(ConfigError, match=r"half-open, with 3 < A < B"):
            roll_back(job.storage, 3, exclude_steps=steps)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound, match="the history ends at step 21"):
        roll_back(job.storage, 3, exclude_steps=(20, 23))
    with pytest.raises(CheckpointMismatch, match=r"rows of epoch 1.* step 12 lies in epoch 0.*in epoch 1"):
        roll_back(job.storage, 12, exclude_steps=(15, 18))
    assert len(job.storage.list("log")) == slots, "nothing was ordered"
    loader = LakeLoader(read(lake, "rows", 0, 1))
    with pytest.raises(ConfigError, match="goes with step="):
        manager(job.storage, {"reader": loader}).restore(exclude_steps=(4, 5))


def test_steps_of_which_the_log_has_no_rows_are_refused(lake: Path) -> None:
    job = Job(lake, "rows")
    job.attempt(9, ranks=2)
    chain = read_history(job.storage).chain
    with pytest.raises(CheckpointDamaged, match="the history before step 6 cannot be read"):
        exclusions_of_steps(chain[1:], chain[0], (5, 7))
    record = chain[-1].readers["reader"]
    other = StepRecord(runs=(StepRun(first=9, count=1, start=Frontier(0, 9), stride=-1),))
    jumped = replace(chain[-1], readers={"reader": replace(record, steps=other)})
    with pytest.raises(CheckpointMismatch, match="other processes did the steps 7 to 9"):
        exclusions_of_steps([*chain[:-1], jumped], chain[0], (8, 10))
    with pytest.raises(CheckpointMismatch, match="no reader of them is in the manager's state"):
        exclusions_of_steps([replace(one, readers={}) for one in chain], chain[0], (5, 7))
    state = State.from_plain(record.state)
    followed = replace(state, orders=(replace(state.identity, tail="carry"),))
    with pytest.raises(ConfigError, match="it follows a growing table"):
        of_micro_batch("reader", followed, epoch=0, loader_step=9, rank=0, attempt=0, step=10)
    tailed = replace(chain[0], readers={"reader": replace(record, state=followed.to_plain())})
    with pytest.raises(ConfigError, match="it follows a growing table"):
        exclusions_of_steps(chain, tailed, (5, 7))


def test_a_roll_back_begins_anew_with_what_it_names(lake: Path) -> None:
    job = Job(lake, "rows")
    job.attempt(9, ranks=2)
    job.attempt(3, ranks=2, restore={"step": 6, "exclude_steps": (8, 9)})
    assert audit(job.storage).verdict == "except"
    job.attempt(ranks=1, restore={"step": 3})
    assert Counter(job.keys()) == Counter(range(ROWS)) and audit(job.storage).verdict == "proved"


def verdict_of(job: Job, patch: pytest.MonkeyPatch, verdict: tuple[Exclusion, ...]) -> None:
    """Let the next restores take ``verdict`` for what is to leave the deal, as rank 0 does after crashes."""

    class Judge(Chooser):
        def choose(self) -> dict[str, str]:
            self.exclusions = verdict
            return super().choose()

    patch.setattr("lakeckpt.checkpoint.restore.restorer.Chooser", Judge)


@pytest.mark.parametrize("kind", ["rows", "mixture row"])
def test_a_micro_batch_that_ends_the_job_again_and_again_leaves_the_deal_until_that_is_withdrawn(
    lake: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(lake, kind)
    job.attempt(6, ranks=2)
    job.attempt(3, ranks=2, every=99)  # nothing is saved
    poison = job.keys(8, 9)[4:]  # those of rank 1
    state = State.from_plain(read_history(job.storage).chain[-1].readers["reader"].state)
    found = of_micro_batch("reader", state, epoch=0, loader_step=7, rank=1, attempt=7, step=8)
    assert {one.reason for one in found} == {"crash"} and crashed(found) == 1
    with monkeypatch.context() as patch:
        verdict_of(job, patch, found)
        assert job.attempt(2, ranks=2, every=99) == 6
    assert read_history(job.storage).restores[-1].exclusions == found
    assert job.attempt(2, ranks=1, every=99) == 6, "it is in the log, and acts again on the same checkpoint"
    taken_back = withdrawn(found, "the job died at step 8 without these rows, too: it was code")
    assert crashed(taken_back) == 0
    assert not set(poison) & set(job.keys())
    with monkeypatch.context() as patch:
        verdict_of(job, patch, taken_back)
        with_them = Job(lake, kind)
        with_them.storage.objects, with_them.used = dict(job.storage.objects), dict(job.used)
        assert with_them.attempt(ranks=2) == 6
    assert set(poison) <= set(with_them.keys()) and audit(with_them.storage).verdict == "proved"
    job.attempt(ranks=2)
    assert not set(poison) & set(job.keys())
    report = audit(job.storage)
    assert report.headline == "PROVED EXCEPT 4 rows" and "(crash)" in report.words
    if kind == "rows":
        assert Counter(job.keys()) == Counter(range(ROWS)) - Counter(poison)


def test_a_micro_batch_of_another_epoch_than_the_cut_is_refused(lake: Path) -> None:
    job = Job(lake, "rows")
    job.attempt(3, ranks=2)
    state = State.from_plain(read_history(job.storage).chain[-1].readers["reader"].state)
    with pytest.raises(ConfigError, match="cut in their own epoch"):
        of_micro_batch("reader", state, epoch=1, loader_step=0, rank=1, attempt=0, step=40)
    with pytest.raises(ConfigError, match="no step 99"):
        of_micro_batch("reader", state, epoch=0, loader_step=99, rank=1, attempt=0, step=40)


def test_the_law_holds_from_a_state_without_the_excluded_rows(lake: Path) -> None:
    job = Job(lake, "rows", num_lanes=4)
    job.attempt(9, ranks=2)
    used, excluded = job.keys(1, 4), job.keys(6, 8)
    chain = read_history(job.storage).chain
    exclusions = exclusions_of_steps(chain, chain[0], (6, 8))
    _, state, _ = without_exclusions("reader", State.from_plain(chain[0].readers["reader"].state), exclusions, step=3)
    plain = state.to_plain()
    assert len(json.dumps(plain)) < len(json.dumps(chain[0].readers["reader"].state)) + 600

    def make_loader(rank: int, world_size: int, num_workers: int) -> LakeLoader:
        loader = LakeLoader(read(lake, "rows", rank, world_size, num_lanes=4), num_workers=num_workers)
        loader.load_state_dict(plain)
        return loader

    assert_exactly_once(
        make_loader,
        topologies=[(1, 0), (2, 0), (4, 0)],
        offsets=4,
        chains=0,
        key="id",
        expected=set(range(ROWS)) - {*used, *excluded},
    )
