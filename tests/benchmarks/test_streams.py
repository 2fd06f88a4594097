"""The benchmark of streams counts tokens rightly, lays out mixtures, and compares runs of one round."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.readers.adapters.streams.hf import GroupTexts, Wrapped
from benchmarks.readers.adapters.streams.mosaic import Documents, Sequences
from benchmarks.readers.case import Case
from benchmarks.readers.plan import case_of
from benchmarks.readers.process import save
from benchmarks.readers.publish import publish
from benchmarks.readers.reader import Batch
from benchmarks.readers.registry import STREAMS
from benchmarks.readers.runner import Failed
from benchmarks.readers.streams.flow import flow, tally, tokens_of
from benchmarks.readers.streams.measuring import streams
from benchmarks.readers.streams.plan import MANY, OURS, SOURCES, Job, documents, jobs
from benchmarks.readers.streams.sources import LEAST, lay_out, sources, weights
from benchmarks.readers.streams.summary import ratio, stream_grids
from benchmarks.readers.tables import DataSet, make

LENGTH = 512


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return make("tokens", 0.0, tmp_path_factory.mktemp("data"))


def packed(table: DataSet, **options: Any) -> Case:
    return case_of("stream-bare", table, batch_size=4, length=LENGTH, **options)


class Simple:
    """Delivers what bare pyarrow does; ``wrong`` changes the list of batches."""

    pads = False

    def __init__(self, case: Case, wrong: Callable[[list[Batch]], list[Batch]] = lambda batches: batches) -> None:
        self._reader, self._wrong = STREAMS["stream-bare"].load()(case), wrong

    def batches(self) -> Iterator[Batch]:
        return iter(self._wrong(list(self._reader.batches())))

    def mask(self, batch: Batch) -> Any:
        return batch.get("mask")


SEQUENCES = 4 * LENGTH
WRONGS: dict[str, tuple[Callable[[list[Batch]], list[Batch]], int, int]] = {
    "right": (lambda batches: batches, 0, 0),
    "loses a batch": (lambda batches: batches[1:], SEQUENCES, 0),
    "gives a batch twice": (lambda batches: [batches[0], *batches], 0, SEQUENCES),
    "counts padding": (lambda b: [*b[:-1], {"tokens": b[-1]["tokens"]}], 0, -1),
}


@pytest.mark.parametrize(("wrong", "lost", "repeated"), WRONGS.values(), ids=WRONGS)
def test_tokens_that_were_lost_or_came_twice_are_counted(
    wrong: Callable[[list[Batch]], list[Batch]], lost: int, repeated: int, table: DataSet
) -> None:
    found = tally(lambda: Simple(packed(table), wrong), packed(table))  # type: ignore[arg-type, return-value]
    if repeated < 0:
        assert found["lost"] == 0 and 0 < found["repeated"] < LENGTH
    else:
        assert (found["lost"], found["repeated"]) == (lost, repeated)


def test_a_lost_token_and_another_that_came_twice_do_not_cancel(table: DataSet) -> None:
    swap = lambda batches: [batches[1], *batches[1:]]  # noqa: E731
    found = tally(lambda: Simple(packed(table), swap), packed(table))  # type: ignore[arg-type, return-value]
    assert 0 < found["lost"] == found["repeated"] <= SEQUENCES


@pytest.mark.parametrize("length", [0, LENGTH])
@pytest.mark.parametrize("name", [OURS, "stream-bare"])
def test_readers_that_are_here_deliver_every_token_once(name: str, length: int, table: DataSet) -> None:
    case = case_of(name, table, batch_size=4, length=length, shuffle=name == OURS)
    found = tally(lambda: STREAMS[name].load()(case), case)  # type: ignore[arg-type, return-value]
    assert found["delivered"] > 1_000_000 and (found["lost"], found["repeated"]) == (0, 0)


def test_a_flow_counts_the_tokens_after_the_first_batch_and_goes_on_over_epochs(table: DataSet) -> None:
    ticks = itertools.count()
    batches = [{"tokens": torch.zeros(2, 3), "mask": torch.tensor([[True] * 3, [True, False, False]])}] * 4

    class Padded(Simple):
        pads = True

        def batches(self) -> Iterator[Batch]:
            return iter(batches)

    def read(kind: type[Simple], **options: Any) -> dict[str, Any]:
        clocks = {"clock": lambda: float(next(ticks)), "processor": lambda: 0.0}
        return flow(lambda: kind(packed(table)), 10.0, **clocks, **options)  # type: ignore[arg-type, return-value]

    found = read(Padded)
    assert found["seconds"] == 10.0 and found["tokens"] == 11 * 4 and found["tokens_per_s"] == pytest.approx(4.0)
    assert read(Padded, at_least=100)["tokens"] == 100, "it goes on until it has as many"
    assert found["peak_bytes"] >= found["start_bytes"] > 0

    class Nothing(Simple):
        def batches(self) -> Iterator[Batch]:
            return iter(())

    with pytest.raises(ValueError, match="without a token"):
        read(Nothing)


def test_weights_add_up_to_one_and_go_down_to_the_least() -> None:
    assert weights(1) == [1.0]
    for count, least in LEAST.items():
        found = weights(count)
        assert len(found) == count and found == sorted(found)
        assert sum(found) == pytest.approx(1.0, abs=1e-9) and found[0] == pytest.approx(least, rel=1e-3)


def test_sources_are_folders_of_the_same_files_and_one_source_is_the_data_set(table: DataSet) -> None:
    case = packed(table, sources=MANY)
    lay_out(case)
    lay_out(case)
    for number, source in enumerate(sources(case)):
        (link,) = source.folder.iterdir()
        assert os.path.samefile(link, case.files[number % len(case.files)]) and source.file == case.files[number % 8]
    (alone,) = sources(packed(table, sources=1))
    assert alone.folder == Path(table.folder) and alone.weight == 1.0


@pytest.mark.parametrize("length", [0, LENGTH])
def test_a_mixture_goes_on_at_the_place_that_was_saved(length: int, table: DataSet) -> None:
    case = case_of(OURS, table, batch_size=4, length=length, shuffle=True, sources=SOURCES)
    lay_out(case)
    kept: dict[str, Any] = {}

    def make() -> Any:
        return STREAMS[OURS].load()(case)

    save(make, {"place": 20}, kept.__setitem__)
    whole = list(itertools.islice(make().batches(), 22))
    reader = make()
    reader.load(kept["place"])
    rest = list(itertools.islice(reader.batches(), 2))
    assert [tokens_of(one).tolist() for one in rest] == [tokens_of(one).tolist() for one in whole[20:]]
    assert not torch.equal(tokens_of(whole[0]), tokens_of(whole[20]))


def test_every_job_can_be_read_and_memory_and_places_are_of_lakeckpt_alone(table: DataSet) -> None:
    found = list(jobs(table, table, list(STREAMS), 1.0))
    assert {job.group for job in found} == {"packed", "mixed", "both", "total", "memory", "resumed"}
    assert all(STREAMS[job.case.reader].load().refuses(job.case) is None for job in found)
    assert {job.case.reader for job in found if job.group in ("memory", "resumed")} == {OURS}
    assert {job.case.sources for job in found if job.group == "mixed"} == {1, SOURCES}
    assert abs(documents(table) * 300 / (2048 * 8) - 1) < 0.1
    assert not [job for job in jobs(table, table, ["stream-grain"], 1.0) if job.group == "memory"]


class Told:
    """A runner that answers with rates, and remembers what it ran."""

    def __init__(self, folder: Path) -> None:
        self.path, self.ran, self.fails = folder, list[Any](), False

    def one(self, task: Any, case: Case) -> dict[str, Any]:
        self.ran.append((task["do"], case.reader, task.get("state")))
        if self.fails:
            raise Failed("no")
        if task["do"] == "save":
            return {"states": {"place": {"bytes": 10}}}
        rate = {OURS: 30e6, "stream-bare": 40e6}.get(case.reader, 1e6) * len(self.ran)
        found = {"tokens_per_s": rate, "seconds": 1.0, "tokens_per_processor_s": rate, "first_batch_s": 0.1}
        return {**found, "peak_bytes": 3_000_000, "start_bytes": 1_000_000, "delivered": 7, "lost": 0, "repeated": 0}

    def folder(self, name: str) -> Path:
        return self.path / name


def test_every_round_runs_every_job_and_the_state_is_saved_before(table: DataSet, tmp_path: Path) -> None:
    case = packed(table)
    flows = [
        Job(group="packed", case=case, task={"do": "flow"}),
        Job(group="total", case=case, task={"do": "tally"}, once=True),
    ]
    place = Job(group="resumed", case=case, task={"do": "resume", "state": None}, save_at=3)
    runner = Told(tmp_path)
    found = list(streams(runner, [*flows, place], 2, lambda text: None))  # type: ignore[arg-type]
    state = str(tmp_path / "states/place")
    one_round = [("flow", "stream-bare", None), ("tally", "stream-bare", None), ("resume", "stream-bare", state)]
    assert runner.ran == [("save", "stream-bare", None), *one_round, one_round[0], one_round[2]]
    assert [run["round"] for run in found[0]["runs"]] == [0, 1] and found[2]["state_bytes"] == 10
    runner.fails = True
    failed = list(streams(runner, [flows[0], place], 5, lambda text: None))  # type: ignore[arg-type]
    assert [len(one["failures"]) for one in failed] == [2, 1]


def test_a_ratio_is_of_runs_of_the_same_round() -> None:
    one = {"runs": [{"round": 0, "x": 1.0}, {"round": 2, "x": 9.0}, {"round": 3, "x": 4.0}]}
    other = {"runs": [{"round": 0, "x": 2.0}, {"round": 1, "x": 100.0}, {"round": 2, "x": 3.0}, {"round": 3, "x": 4.0}]}
    found = ratio(one, other, "x")
    assert found is not None and (found.median, found.least, found.most) == (1.0, 0.5, 3.0)
    assert str(found) == "1.00 (0.50 … 3.00)"
    assert ratio(one, {"runs": []}, "x") is None and ratio(None, other, "x") is None


def test_tables_name_the_fastest_peer_and_the_page_has_them(table: DataSet, tmp_path: Path) -> None:
    names = [OURS, "stream-bare", "stream-grain", "stream-mosaic"]
    found = list(streams(Told(tmp_path), list(jobs(table, table, names, 1.0)), 1, lambda text: None))  # type: ignore[arg-type]
    bars, *groups = stream_grids(found)
    assert not [row for row in bars.rows if row[1] == "not measured"]
    assert ["MosaicML" in row[4] for row in bars.rows if "fastest peer" in row[0]] == [True] * 4
    assert len(groups) == 4 and all(len(row) == len(grid.columns) for grid in (bars, *groups) for row in grid.rows)
    publish(tmp_path / "out", {"versions": {}, "about": {"streams": {"command": "x"}}, "streams": found})
    page = (tmp_path / "out/readers-results.md").read_text()
    assert "part: streams" in page and "## Packed: sequences of 2,048 tokens" in page
    assert (
        json.loads((tmp_path / "out/readers.json").read_text())["streams"][0]["case"]["folder"]
        == Path(table.folder).name
    )
    assert stream_grids([]) == []


def test_peers_pack_as_their_examples_do(table: DataSet) -> None:
    rows = [list(range(7)), [], list(range(100, 104))]
    texts = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
    assert Wrapped.pack(texts, 4)["tokens"].to_pylist() == [[0, 1, 2, 3], [4, 5, 6, 100], [101, 102, 103]]
    assert Wrapped.pack(texts.slice(2), 4)["tokens"].to_pylist() == [[100, 101, 102, 103]]
    assert GroupTexts.pack({"tokens": rows}, 4)["tokens"] == [[0, 1, 2, 3], [4, 5, 6, 100]]
    case = packed(table)
    documents_of = np.concatenate(list(Documents.rows(case, case.files[0])))
    cut = list(Sequences.rows(case, case.files[0]))
    assert {len(one) for one in cut} == {LENGTH} and 0 <= len(documents_of) - len(cut) * LENGTH < LENGTH
    assert np.array_equal(np.concatenate(cut), documents_of[: len(cut) * LENGTH])
