"""The benchmark of readers counts lost and repeated rows rightly: wrong readers are caught, right ones are not."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.readers.arrow import tensors
from benchmarks.readers.case import Case
from benchmarks.readers.counting import Count, count
from benchmarks.readers.measuring import exactness, far_behind, speeds
from benchmarks.readers.plan import Topology, case_of
from benchmarks.readers.process import resume, save, speed
from benchmarks.readers.reader import Batch, Ragged
from benchmarks.readers.registry import READERS
from benchmarks.readers.runner import Failed, Runner
from benchmarks.readers.tables import TABLES, DataSet, make

HERE = ("lakeckpt", "row-group", "row-group-threads", "iter-batches", "scanner", "hand-written", "stateful")
"""Readers whose packages the tests have."""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def small(tables: Path) -> DataSet:
    return make("resume-odd", 1, tables)


Wrong = Callable[[list[int], int], list[int]]
"""(the batches that are left, where the epoch was entered) to the batches that are given."""


class Simple:
    """Reads by its state, a number of batches; ``wrong`` changes which batches are given."""

    modules = ()

    def __init__(self, case: Case, wrong: Wrong = lambda batches, begin: batches) -> None:
        self._case, self._wrong, self._done, self._begin = case, wrong, 0, 0

    def batches(self) -> Iterator[Batch]:
        case = self._case
        numbers = list(range(-(-case.rows // case.batch_size)))[self._begin :]
        self._done = self._begin
        for number in self._wrong(numbers, self._begin):
            begin = number * case.batch_size
            self._done = number + 1
            yield {"row": torch.arange(begin, min(begin + case.batch_size, case.rows))}
        self._begin = 0

    def state(self) -> Any:
        return self._done

    def load(self, state: Any) -> None:
        self._begin = state


def over(case: Case, wrong: Wrong) -> Count:
    """What a job counts that saves at half of the epoch, and goes on."""
    kept: dict[str, Any] = {}
    half = case.rows // case.batch_size // 2
    _, before = save(lambda: Simple(case, wrong), {"half": half}, kept.__setitem__)  # type: ignore[arg-type, return-value]
    _, after = resume(lambda: Simple(case, wrong), kept["half"], whole=True)  # type: ignore[arg-type, return-value]
    return count(case.rows, [before, after])


CASE = Case(reader="lakeckpt", table="none", folder="", rows=1003, row_bytes=8.0, batch_size=50)
WRONGS: dict[str, tuple[Wrong, int, int]] = {
    "right": (lambda numbers, begin: numbers, 0, 0),
    "loses the batch after the save": (lambda numbers, begin: numbers[1:] if begin else numbers, 50, 0),
    "gives the last batch before the save again": (lambda n, begin: [begin - 1, *n] if begin else n, 0, 50),
    "begins the epoch again": (lambda n, begin: list(range(21)) if begin else n, 0, 500),
    "loses the last, short batch": (lambda numbers, begin: numbers[:-1], 3, 0),
    "loses one and gives another twice": (lambda n, begin: [n[1], *n[1:]] if begin else n, 50, 50),
    "ends when it is resumed": (lambda numbers, begin: [] if begin else numbers, 503, 0),
}


@pytest.mark.parametrize(("wrong", "lost", "repeated"), WRONGS.values(), ids=WRONGS)
def test_what_a_wrong_reader_loses_or_repeats_after_a_resume_is_counted_exactly(
    wrong: Wrong, lost: int, repeated: int
) -> None:
    assert over(CASE, wrong) == Count(rows=1003, lost=lost, repeated=repeated)


def test_ids_of_another_table_are_an_error_and_not_a_count() -> None:
    with pytest.raises(ValueError, match="not this table"):
        count(10, [np.arange(11)])


def test_a_row_that_comes_three_times_counts_two() -> None:
    assert count(4, [np.array([0, 1, 1]), np.array([1, 3])]) == Count(rows=4, lost=1, repeated=2)


def ticks() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is asked."""
    numbers = itertools.count()
    return lambda: float(next(numbers))


def test_the_speed_is_of_what_comes_after_the_first_batch_and_goes_on_over_epochs() -> None:
    found = speed(lambda: Simple(CASE), CASE, 30.0, ticks())  # type: ignore[arg-type, return-value]
    assert found["whole_epochs"] == 1 and found["lost_in_whole_epochs"] == found["repeated"] == 0
    assert found["first_batch_s"] == 1.0 and found["seconds"] == 30.0
    assert found["rows_per_s"] == pytest.approx((found["rows"] - 50) / 30.0)


class Told:
    """A runner that tells rates, and remembers which cases it ran."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates, self.ran = rates, list[str]()

    def one(self, task: Any, case: Case, *, memory: bool) -> dict[str, Any]:
        self.ran.append(case.reader)
        return {"rows_per_s": self.rates[case.reader]}


def test_who_is_far_behind_on_the_same_batches_is_measured_once() -> None:
    runner = Told({"lakeckpt": 1.0, "hand-written": 100.0, "lance": 20.0, "grain": 19.9})
    cases = [replace(CASE, reader=name) for name in runner.rates]
    cases.append(replace(CASE, reader="grain", batch_size=8))
    found = list(speeds(runner, cases, 3, 1.0, lambda text: None))  # type: ignore[arg-type]
    assert [len(one["runs"]) for one in found] == [3, 3, 3, 1, 3], "ours is repeated anyhow"
    repeated = ["lakeckpt", "hand-written", "lance", "grain"]
    assert runner.ran == ["lakeckpt", "hand-written", "lance", "grain", "grain", *2 * repeated]
    failed = {"case": found[3]["case"], "runs": []}
    assert not far_behind(failed, [failed, *found]), "who failed may try again"


def test_the_speed_of_a_reader_that_loses_rows_is_told_with_what_it_lost() -> None:
    lossy = lambda: Simple(CASE, lambda numbers, begin: numbers[2:])  # noqa: E731
    assert speed(lossy, CASE, 30.0, ticks())["lost_in_whole_epochs"] == 100  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HERE)
def test_readers_deliver_every_row_once_with_its_own_values(name: str, tables: Path) -> None:
    table = small(tables)
    reader = READERS[name].load()(case_of(name, table, shuffle=True in READERS[name].orders))
    whole = tensors(pq.read_table(table.folder))
    values, offsets = whole["tokens"]
    seen = []
    for batch in reader.batches():
        ids, tokens = batch["row"], batch["tokens"]
        assert isinstance(ids, torch.Tensor) and len(tokens.offsets) == len(ids) + 1 and len(ids) <= 50  # type: ignore[union-attr]
        first = int(ids[0])
        expected = values[offsets[first] : offsets[first + 1]]
        assert torch.equal(tokens.values[: int(tokens.offsets[1])], expected)  # type: ignore[union-attr]
        seen.append(ids.numpy().copy())
    assert count(table.rows, seen).exact


def test_lakeckpt_resumed_on_more_ranks_is_counted_as_exact_and_a_wrong_state_is_not(tables: Path) -> None:
    case = case_of("lakeckpt", small(tables), shuffle=True)
    kind, kept = READERS["lakeckpt"].load(), dict[str, Any]()
    _, before = save(lambda: kind(case), {"early": 50, "half": 160}, kept.__setitem__)

    def rest(place: str) -> list[Any]:
        ranks = [replace(case, rank=rank, world_size=2) for rank in range(2)]
        return [resume(lambda one=one: kind(one), kept[place], whole=True)[1] for one in ranks]  # type: ignore[misc]

    assert count(case.rows, [before, *rest("half")]).exact
    assert count(case.rows, [before, *rest("early")]) == Count(rows=case.rows, lost=0, repeated=110 * 50)


@pytest.mark.parametrize("name", TABLES)
def test_data_sets_number_their_rows_and_are_made_once(name: str, tables: Path) -> None:
    table = make(name, 0.0, tables)
    files = sorted(Path(table.folder).iterdir())
    assert pq.read_table(table.folder, columns=["row"])["row"].to_pylist() == list(range(table.rows))
    made = [path.stat().st_mtime_ns for path in files]
    assert asdict(make(name, 0.0, tables)) == asdict(table)
    assert [path.stat().st_mtime_ns for path in files] == made


def test_every_reader_of_the_table_can_be_looked_up_without_its_package() -> None:
    for name, entry in READERS.items():
        refusal = entry.load().refuses(CASE)
        assert refusal is None or entry.why, name


def test_slices_of_ragged_columns_are_the_rows() -> None:
    from benchmarks.readers.arrow import slices

    batch = {"x": Ragged(torch.arange(10), torch.tensor([0, 3, 3, 7, 10])), "row": torch.arange(4)}
    for size in (1, 2, 3, 4, 5):
        cut = list(slices(batch, 4, size))
        assert torch.cat([one["row"] for one in cut]).tolist() == [0, 1, 2, 3]  # type: ignore[arg-type]
        rows = [
            one["x"].values[one["x"].offsets[n] : one["x"].offsets[n + 1]].tolist()  # type: ignore[union-attr]
            for one in cut
            for n in range(len(one["row"]))
        ]
        assert rows == [[0, 1, 2], [], [3, 4, 5, 6], [7, 8, 9]]


@pytest.mark.soak
def test_measured_processes_of_several_ranks_answer_and_one_that_misses_its_deadline_is_ended(tables: Path) -> None:
    table = small(tables)
    before, after = Topology(ranks=1, workers=0), Topology(ranks=2, workers=2)
    runner = Runner({"peers": sys.executable}, timeout_s=120.0)
    try:
        (found,) = exactness(runner, [(case_of("lakeckpt", table, shuffle=True), before, after)], print)
        assert (found["lost"], found["repeated"]) == (0, 0), found
    finally:
        runner.close()
    hurried = Runner({"peers": sys.executable}, timeout_s=0.5)
    try:
        case = case_of("lakeckpt", table, workers=2)
        with pytest.raises(Failed, match="did not end in"):
            hurried.one({"do": "speed", "seconds": 1e9}, case)
        hurried.timeout_s = 120.0
        found = hurried.one({"do": "resume", "state": None, "whole": False}, case_of("row-group", table))
        assert found["first_batch_s"] > 0
    finally:
        hurried.close()
