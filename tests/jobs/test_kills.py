"""Real jobs on real tables, killed with SIGKILL at random moments and gone on with on other topologies."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import Attempt, Job

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage

ROWS = 1_900
TOKENS = 7_666


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of uneven files and row groups."""
    folder = tmp_path / "lake"
    folder.mkdir()
    done, generator = 0, np.random.default_rng(3)
    for number, (rows, group) in enumerate([(1_000, 130), (1, 10), (0, 10), (899, 64)]):
        columns = {"id": np.arange(done, done + rows), "x": generator.normal(size=rows).astype("float32")}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=group)
        done += rows
    assert done == ROWS
    return folder


def history(seed: int, topologies: list[tuple[int, int]]) -> list[Attempt]:
    """Attempts on ``topologies`` (ranks, workers); all but the last are killed somewhere."""
    chance = random.Random(seed)
    kills = [(chance.randrange(1, 9), chance.uniform(0.0, 0.25)) for _ in topologies[:-1]]
    return [
        Attempt(ranks=ranks, workers=workers, kill_after=kill)
        for (ranks, workers), kill in zip(topologies, [*kills, None], strict=True)
    ]


CASES = {
    "shuffled, short, from 1 x 0 over 4 x 3 to 3 x 1": (
        ["--shuffle", "--every", "2"],
        [(1, 0), (4, 3), (2, 1), (3, 1)],
    ),
    "in table order, batches change with the topology": (
        ["--every", "1", "--batch-size", "24"],
        [(2, 2), (2, 2), (1, 1)],
    ),
    "lanes fixed, accumulating two micro-batches a step": (
        ["--shuffle", "--num-lanes", "12", "--accumulate", "2", "--every", "2"],
        [(2, 0), (3, 0), (2, 2)],
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_every_row_counts_once_an_epoch_in_the_history_that_survives(case: str, table: Path, tmp_path: Path) -> None:
    options, topologies = CASES[case]
    job = Job(tmp_path / "job", table, options)
    for attempt in history(len(case), topologies):
        job.attempt(attempt)
    counts = job.surviving_rows()
    assert set(counts) == {(epoch, row) for epoch in range(2) for row in range(ROWS)}
    assert set(counts.values()) == {1}
    report = audit(open_storage(str(job.run)))
    assert report.verdict == "proved", report


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "topologies"),
    [
        (["--every", "2"], [(2, 1), (3, 0), (1, 2), (2, 0)]),
        (["--every", "4", "--capture-every", "1", "--num-lanes", "6"], [(2, 0), (2, 0), (3, 1), (2, 0)]),
    ],
    ids=["saves in the loop", "saves beside training"],
)
def test_every_row_that_a_transform_yields_counts_once_in_the_history_that_survives(
    options: list[str], topologies: list[tuple[int, int]], table: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", table, ["--many", "--shuffle", *options])
    for attempt in history(31, topologies):
        job.attempt(attempt)
    counts = job.surviving_rows()
    every = {(epoch, row * 4 + part) for epoch in range(2) for row in range(ROWS) for part in range(row % 4)}
    assert set(counts) == every and set(counts.values()) == {1}
    report = audit(open_storage(str(job.run)))
    assert report.verdict == "proved", report


@pytest.mark.soak
def test_what_drop_leaves_out_is_the_only_thing_that_does_not_count(table: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", table, ["--shuffle", "--tail", "drop", "--every", "2", "--epochs", "1"])
    for attempt in history(11, [(2, 1), (1, 2), (2, 0)]):
        job.attempt(attempt)
    counts = job.surviving_rows()
    assert set(counts.values()) == {1}
    assert 0 <= ROWS - len(counts) < 4 * 16 + 4
    assert audit(open_storage(str(job.run))).verdict == "proved"


@pytest.mark.soak
def test_an_endless_stream_repeats_no_row_before_all_have_counted(table: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", table, ["--shuffle", "--endless", "--every", "3"])
    *killed, last = history(23, [(2, 0), (1, 1), (3, 0), (2, 1)])
    for attempt in killed:
        job.attempt(attempt)
    job.attempt(Attempt(ranks=last.ranks, workers=last.workers, options=("--steps", "150")))
    counts = job.surviving_rows()
    assert set(counts.values()) == {1}
    by_epoch = Counter(epoch for epoch, _ in counts)
    # 150 steps of 16 to 48 rows: an epoch is complete before the one after the next begins.
    assert max(by_epoch) >= 1
    assert all(by_epoch[epoch] == ROWS for epoch in range(max(by_epoch) - 1))
    assert audit(open_storage(str(job.run))).verdict == "proved"


@pytest.mark.parametrize("topologies", [[1, 1, 1], pytest.param([2, 1, 2, 1, 2], marks=pytest.mark.soak)])
@pytest.mark.soak
def test_every_attempt_restores_at_its_first_try_beside_those_before_it_that_live_on(
    topologies: list[int], table: Path, tmp_path: Path
) -> None:
    """They save, and remove what is older, after every step."""
    job = Job(tmp_path / "job", table, ["--shuffle", "--every", "1", "--keep", "1", "--epochs", "2"])
    try:
        for ranks in topologies[:-1]:
            job.attempt(Attempt(ranks=ranks, kill_after=(9, 0.0), lives_on=True))
        job.attempt(Attempt(ranks=topologies[-1]))
        told = job.superseded()
    finally:
        job.end()
    assert all("AttemptSuperseded" in one and "was taken by attempt" in one for one in told) and len(told) > 1
    counts = job.surviving_rows()
    assert set(counts) == {(epoch, row) for epoch in range(2) for row in range(ROWS)}
    assert set(counts.values()) == {1}
    assert audit(open_storage(str(job.run))).verdict == "proved"


def test_a_job_killed_in_its_first_epoch_goes_on_with_one_rank_less_and_a_worker_more(
    table: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", table, ["--shuffle", "--every", "2", "--epochs", "1"])
    job.attempt(Attempt(ranks=2, kill_after=(7, 0.02)))
    job.attempt(Attempt(ranks=1, workers=1))
    counts = job.surviving_rows()
    assert set(counts) == {(0, row) for row in range(ROWS)}
    assert set(counts.values()) == {1}
    assert audit(open_storage(str(job.run))).verdict == "proved"


def write_texts(folder: Path, files: tuple[int, ...], first: int = 0) -> int:
    """Write ``files`` of so many documents, some of them empty, of unique tokens from ``first`` on; one past the last.

    Row groups are of 10 documents.
    """
    folder.mkdir(parents=True)
    generator, done = np.random.default_rng(7), first
    for number, documents in enumerate(files):
        lengths = generator.integers(0, 90, documents) * (generator.random(documents) < 0.9)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.arange(done, done + ends[-1], dtype=np.int32)))
        pq.write_table(pa.table({"tokens": tokens}), folder / f"{number}.parquet", row_group_size=10)
        done += int(ends[-1])
    return done


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Documents of unique tokens, some of them empty: 19 row groups in two files."""
    assert write_texts(tmp_path / "texts", (120, 66)) == TOKENS
    return tmp_path / "texts"


@pytest.mark.parametrize(
    ("topologies", "epochs"),
    [
        ([(2, 0), (1, 1)], 1),
        pytest.param([(2, 1), (3, 0), (1, 2)], 2, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_every_token_counts_once_an_epoch_in_a_packed_job_that_is_killed(
    topologies: list[tuple[int, int]], epochs: int, texts: Path, tmp_path: Path
) -> None:
    options = ["--shuffle", "--pack", "16", "--batch-size", "8", "--every", "2", "--epochs", str(epochs)]
    job = Job(tmp_path / "job", texts, options)
    for attempt in history(TOKENS, topologies):
        job.attempt(attempt)
    counts = job.surviving_rows()
    assert set(counts) == {(epoch, token) for epoch in range(epochs) for token in range(TOKENS)}
    assert set(counts.values()) == {1}
    assert audit(open_storage(str(job.run))).verdict == "proved"


LENGTH = 16
"""Tokens of a sequence of the packed mixture."""


def complete_epochs(counts: Counter[tuple[int, int]], tokens: range) -> int:
    """Check that every token of a packed source counts once in each complete epoch, and return their number.

    The last sequence of an epoch is filled with the first tokens of the next one, fewer than `LENGTH`. So after e
    complete epochs all tokens have counted e times, but for so many, which have counted once more.
    """
    mine = {one: count for one, count in counts.items() if one[1] in tokens}
    sofar, complete, last = Counter[int](), 0, max(epoch for epoch, _ in mine)
    for epoch in range(last + 1):
        sofar.update({token: count for (one, token), count in mine.items() if one == epoch})
        sequences, rest = divmod(sofar.total(), LENGTH)
        assert rest == 0, "no sequence is split"
        assert max(sofar.values()) <= epoch + 2
        if sequences < -(-(epoch + 1) * len(tokens) // LENGTH):
            break
        begun = [token for token in tokens if sofar[token] != epoch + 1]
        assert len(begun) == sofar.total() - (epoch + 1) * len(tokens) < LENGTH
        assert all(sofar[token] == epoch + 2 for token in begun)
        complete += 1
    # Lanes never drift more than one sequence apart, so an epoch is complete before the one after the next begins.
    assert complete >= last - 1
    assert all(count == 1 for (epoch, _), count in mine.items() if epoch > complete)
    return complete


@pytest.mark.parametrize(
    ("topologies", "steps"),
    [
        ([(2, 0), (1, 1)], 40),
        pytest.param([(2, 1), (3, 0), (1, 2), (2, 2), (4, 0), (3, 1)], 90, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_every_token_of_every_source_counts_once_an_epoch_in_a_packed_mixture_that_is_killed(
    topologies: list[tuple[int, int]], steps: int, tmp_path: Path
) -> None:
    """Its weights change twice in mid-run."""
    lake = tmp_path / "lake"
    code = range(write_texts(lake / "code", (24, 9)))
    web = range(code.stop, write_texts(lake / "web", (48, 17), code.stop))
    options = ["--mix", "--shuffle", "--pack", str(LENGTH), "--batch-size", "8", "--every", "2"]
    job = Job(tmp_path / "job", lake, options)
    *killed, last = history(steps, topologies)
    for attempt in killed:
        job.attempt(attempt)
    job.attempt(Attempt(ranks=last.ranks, workers=last.workers, options=("--steps", str(steps))))
    counts = job.surviving_rows()
    assert min(complete_epochs(counts, code), complete_epochs(counts, web)) >= 1
    assert {token for _, token in counts} == {*code, *web}
    report = audit(open_storage(str(job.run)))
    assert {one.name: one.findings for one in report.readers} == {"reader.code": (), "reader.web": ()}
    assert report.verdict == "proved", report
