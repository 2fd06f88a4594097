"""Row groups that cannot be read, in the middle of what is not rows of one table: windows are excluded, on record."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from lakeckpt import LakeDataset, LakeLoader, Ragged, Table, mix, open_table, pack
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.errors import DataFileDamaged
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.reading.cases import write_file
from tests.reading.damage import Damage

GROUPS, TOKENS = 8, 100
Pairs = list[tuple[str, int]]


def make_lake(folder: Path, first: int) -> Path:
    """A file of eight row groups of a hundred tokens each, in documents; all tokens differ, from ``first`` on."""
    groups, ends = [], random.Random(first)
    for start in range(first, first + GROUPS * TOKENS, TOKENS):
        cuts = sorted({start, start + TOKENS, *ends.sample(range(start + 1, start + TOKENS), 15)})
        documents = [list(range(low, high)) for low, high in itertools.pairwise(cuts)]
        groups.append(pa.table({"tokens": documents, "id": [one[0] for one in documents]}))
    write_file(folder / "a.parquet", groups, write_page_checksum=True)
    return folder


def two(row: dict[str, Any]) -> Any:
    yield from ({"tokens": np.array([token])} for token in row["tokens"].tolist())


def dataset(table: Table, kind: str, **options: Any) -> LakeDataset:
    plain = {"batch_size": 2, "shuffle": True, "shuffle_window": 2, **options}
    if kind == "many":
        return LakeDataset(table, **plain | {"batch_size": 7}, transform=two, rows="many")
    if kind == "filtered":
        return LakeDataset(table, **plain, filters=[("id", ">", 3)])
    if kind == "rows":
        return LakeDataset(table, **plain)
    if kind == "packed in order":
        plain |= {"shuffle": False}
    length = plain.pop("length", 16)
    return pack(LakeDataset(table, **plain), length=length, documents="whole" if kind == "whole" else "cut")


class Job:
    """Attempts of one run. ``tokens`` are those that its history trained, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, lakes: dict[str, Path], kinds: Any, **options: Any) -> None:
        self.patch, self.lakes, self.kinds, self.options = patch, lakes, kinds, options
        self.storage = MemoryStorage()
        self.tokens: list[int] = []
        self.workers = 0

    def read(self, exclude: dict[str, Pairs], rank: int, ranks: int) -> Any:
        tables = {name: open_table(lake, exclude=exclude.get(name, [])) for name, lake in self.lakes.items()}
        options = dict(self.options)
        lanes = options.pop("num_lanes", None)
        plain = {"rank": rank, "world_size": ranks, **options}
        if isinstance(self.kinds, str):
            return dataset(*tables.values(), self.kinds, **plain)
        every = {name: dataset(one, self.kinds[name], **plain) for name, one in tables.items()}
        found = mix({name: (one, 2.0 if name == "a" else 1.0) for name, one in every.items()}, num_lanes=lanes)
        return pack(found, length=16) if "rows" in self.kinds.values() else found

    def attempt(
        self, exclude: dict[str, Pairs] | None = None, *, ranks: int = 1, steps: int | None = None, lost: int = 0
    ) -> list[str]:
        """Take ``steps`` steps (None: to the end of the epoch), of which the last ``lost`` come after the last save.

        Returns the messages of damage that ended it.
        """
        waiter, store = EventWaiter(self.storage), dist.HashStore()
        self.patch.setattr("lakeckpt.data.flows.ends.job_store", lambda world_size: store)

        def body(rank: int, exchange: HubExchange) -> tuple[list[int], str]:
            loader = LakeLoader(self.read(exclude or {}, rank, ranks), num_workers=self.workers)
            saver = manager(self.storage, {"reader": loader}, exchange=exchange, waiter=waiter)
            done, got, told = saver.restore(), [], ""
            try:
                for batch in loader:
                    if steps is not None and saver.steps_done == done + steps:
                        break
                    saver.step(batch)
                    if steps is None or saver.steps_done <= done + steps - lost:
                        got += trained(batch)
                        saver.save()
                else:
                    saver.save()
            except DataFileDamaged as error:
                told = str(error)
            return got, told

        results = good(run_ranks(ranks, body, waiters=[waiter]))
        self.tokens += [token for got, _ in results for token in got]
        return [told for _, told in results if told]

    def audited(self) -> AuditReport:
        return audit(self.storage)


def trained(batch: Any) -> list[int]:
    """The tokens of a batch, without padding."""
    tokens = batch["tokens"]
    if "loss_mask" in batch:
        return tokens[batch["loss_mask"]].tolist()
    return (tokens.values if isinstance(tokens, Ragged) else tokens).reshape(-1).tolist()


def documents(lake: Path) -> list[set[int]]:
    return [set(one) for one in pq.read_table(lake)["tokens"].to_pylist()]


def tokens_of(groups: Pairs, first: int = 1) -> set[int]:
    return {token for _, group in groups for token in range(first + group * TOKENS, first + (group + 1) * TOKENS)}


def is_said(kind: str, report: AuditReport, missing: set[int], lake: Path) -> bool:
    """Whether the audit lists as excluded what is ``missing`` of epoch 0, as it counts."""
    listed = [one for one in report.readers[0].excluded if one.epoch == 0]
    count = sum(one.rows for one in listed)
    if kind == "packed":
        return len(missing) == 16 * count
    if kind == "whole":
        groups = [("a.parquet", one.row_group) for one in listed]
        return missing <= tokens_of(groups) and count == len({*groups})
    return count == sum(bool(one & missing) for one in documents(lake))


SEEDS = [0, pytest.param(1, marks=pytest.mark.soak)]


@pytest.mark.parametrize("kind", ["packed", "whole", "many", "filtered"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_rest_of_an_epoch_goes_on_without_the_windows_of_damaged_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    dice, lake = random.Random(f"{kind} {seed}"), make_lake(tmp_path / "lake", 1)
    job = Job(monkeypatch, {"a": lake}, kind, shuffle=seed > 0, seed=seed)
    every = set[int]().union(*(one for one in documents(lake) if kind != "filtered" or min(one) > 3))
    excluded = [("a.parquet", group) for group in dice.sample(range(GROUPS), 2)]
    ranks = [dice.choice((1, 2, 3)) for _ in range(4)]
    assert not job.attempt(ranks=ranks[0], steps=3)
    Damage(open_table(lake)).hurt(*excluded[0])
    assert not job.attempt({"a": excluded[:1]}, ranks=ranks[1], steps=2, lost=1)
    before = set(job.tokens)
    Damage(open_table(lake)).hurt(*excluded[1])
    assert not job.attempt({"a": excluded}, ranks=ranks[2], steps=2)
    assert not job.attempt({"a": excluded}, ranks=ranks[3])
    assert len(job.tokens) == len({*job.tokens}), "a token came twice"
    missing = every - {*job.tokens}
    assert tokens_of(excluded) & every <= missing | before
    report = job.audited()
    assert report.verdict == "except" and report.excluded and not report.readers[0].doubts, report
    assert is_said(kind, report, missing, lake), (missing, report)
    job.tokens = []
    assert not job.attempt({"a": excluded}, ranks=2)
    assert sorted(job.tokens) == sorted(every - tokens_of(excluded))
    assert job.audited().verdict == "except"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixture_goes_on_without_the_windows_of_damaged_row_groups_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    lakes = {"a": make_lake(tmp_path / "a", 1), "b": make_lake(tmp_path / "b", 10_001)}
    kinds = {"a": "packed", "b": dice.choice(("packed", "packed in order"))}
    job = Job(monkeypatch, lakes, kinds, seed=seed, num_lanes=dice.choice((None, 6)))
    excluded: dict[str, Pairs] = {"a": [], "b": []}
    for _ in range(4):
        assert not job.attempt(excluded, ranks=dice.choice((1, 2, 3)), steps=dice.randrange(1, 20))
        name = dice.choice("ab")
        group = ("a.parquet", dice.randrange(GROUPS))
        if group not in excluded[name]:
            Damage(open_table(lakes[name])).hurt(*group)
            excluded[name].append(group)
    assert not job.attempt(excluded, ranks=2, steps=40, lost=1)
    assert not job.attempt(excluded, ranks=3, steps=20)
    report = job.audited()
    assert report.verdict == "except" and report.excluded, report
    for reader, first in zip(report.readers, (1, 10_001), strict=True):
        assert not reader.doubts and not reader.findings
        counts = Counter(token for token in job.tokens if first <= token < first + 10_000)
        assert counts.total() == 16 * sum(one.once for one in reader.epochs)
        lost = 16 * sum(one.rows for one in reader.excluded if not one.file)
        healthy = {*range(first, first + GROUPS * TOKENS)} - tokens_of(excluded[reader.name[-1]], first)
        complete = sum(one.status == "complete" for one in reader.epochs)
        assert sum(max(0, complete - counts[token]) for token in healthy) <= lost
        # The last sequence of an epoch goes on with the first tokens of the next one.
        assert sum(max(0, count - len(reader.epochs)) for count in counts.values()) < 16


def test_a_stream_goes_on_at_the_token_at_which_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and in one lane, the tokens are those of the table without the row group, again and again."""
    lake = make_lake(tmp_path / "a", 1)
    job = Job(monkeypatch, {"a": lake}, {"a": "packed in order"}, batch_size=3, num_lanes=1, length=24)
    every, left = [*range(1, 801)], [*range(1, 701)]
    assert not job.attempt(steps=19)
    assert job.tokens == (every * 2)[: 57 * 24]
    Damage(open_table(lake)).hurt("a.parquet", 7)
    excluded = {"a": [("a.parquet", 7)]}
    assert not job.attempt(excluded, steps=1)
    assert not job.attempt(excluded, steps=40)
    # The sequences that begin in row group 6 are one window, and its last one goes on in row group 7. The last sequence
    # of the epoch, which is excluded, would have had the first 8 tokens of the next epoch.
    begins = next(at for at in range(0, 1600, 24) if at >= 1400)
    expected = [*(every * 2)[:begins], *left[8:], *(left * 5)]
    assert job.tokens == expected[: len(job.tokens)]
    report = job.audited()
    assert report.verdict == "except" and sum(one.excluded for one in report.readers[0].epochs) == 8, report
    named = Counter[tuple[int, int]]()
    for step in range(18, 23):
        for one in (one for reader in explain(job.storage, step).readers for one in reader.ranks[0].micro_batches):
            named.update((span.epoch, at) for span in one.spans for at in range(span.start, span.stop))
    assert named.total() == len(named) == 15


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixture_with_whole_documents_goes_on_without_the_windows_of_damaged_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    lakes = {"a": make_lake(tmp_path / "a", 1), "b": make_lake(tmp_path / "b", 10_001)}
    job = Job(monkeypatch, lakes, {"a": "whole", "b": "packed"}, seed=seed, num_lanes=dice.choice((None, 6)))
    excluded: dict[str, Pairs] = {"a": [], "b": []}
    for name in ("a", "b", "a"):
        assert not job.attempt(excluded, ranks=dice.choice((1, 2)), steps=dice.randrange(4, 20))
        group = ("a.parquet", dice.choice([one for one in range(GROUPS) if ("a.parquet", one) not in excluded[name]]))
        Damage(open_table(lakes[name])).hurt(*group)
        excluded[name].append(group)
    assert not job.attempt(excluded, ranks=2, steps=60, lost=1)
    report = job.audited()
    assert report.verdict == "except" and report.excluded, report
    whole = report.readers[0]
    assert whole.name == "reader.a" and not whole.doubts and not whole.findings
    counts = Counter(token for token in job.tokens if token <= GROUPS * TOKENS)
    assert max(counts.values()) <= len(whole.epochs) + 1  # of a window that has begun, none is listed
    complete = sum(one.status == "complete" for one in whole.epochs)
    healthy = {*range(1, 1 + GROUPS * TOKENS)} - tokens_of(excluded["a"])
    lost = TOKENS * sum(one.rows for one in whole.excluded)
    assert complete and sum(max(0, complete - counts[token]) for token in healthy) <= lost


@pytest.mark.parametrize("seed", SEEDS)
def test_a_packed_mixture_goes_on_without_the_windows_of_damaged_row_groups_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    lakes = {"a": make_lake(tmp_path / "a", 1), "b": make_lake(tmp_path / "b", 10_001)}
    job = Job(monkeypatch, lakes, {"a": "rows", "b": "rows"}, seed=seed, num_lanes=dice.choice((None, 6)))
    excluded: dict[str, Pairs] = {"a": [], "b": []}
    for name in ("a", "b", "a"):
        assert not job.attempt(excluded, ranks=dice.choice((1, 2)), steps=dice.randrange(4, 20))
        group = ("a.parquet", dice.choice([one for one in range(GROUPS) if ("a.parquet", one) not in excluded[name]]))
        Damage(open_table(lakes[name])).hurt(*group)
        excluded[name].append(group)
    assert not job.attempt(excluded, ranks=2, steps=60, lost=1)
    report = job.audited()
    assert report.verdict == "except" and report.excluded, report
    for reader, first in zip(report.readers, (1, 10_001), strict=True):
        assert not reader.doubts and not reader.findings
        counts = Counter(token for token in job.tokens if first <= token < first + 10_000)
        assert max(counts.values()) <= len(reader.epochs)
        complete = sum(one.status == "complete" for one in reader.epochs)
        damaged = excluded[reader.name[-1]]
        healthy = [one for one in documents(lakes[reader.name[-1]]) if not one & tokens_of(damaged, first)]
        # Of a document that has begun, some tokens came before.
        missing = sum(max(0, complete - min(counts[token] for token in one)) for one in healthy)
        listed = sum(one.rows for one in reader.excluded if (one.file, one.row_group) not in damaged)
        assert complete and missing <= listed
