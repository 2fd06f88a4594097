"""Whole documents in sequences: each token once, no document cut that fits, on any chain of topologies."""

from __future__ import annotations

import itertools
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, cumulative_lengths, merge_states, mix, open_table, pack
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import ConfigError, NullValueError, SchemaError, StateError, StateMismatch
from lakeckpt.testing import assert_exactly_once
from tests.data.flow_jobs import job_store, run_loaders
from tests.data.reading import as_json, same, some
from tests.examples import examples

__all__ = ["job_store"]

LENGTH = 16
LENGTHS = [3, 16, 50, 1, 0, 9, 8, 33, 2, 7, 9, 31, 0, 5, 15, 12, 4, 4, 6, 10, 11, 1, 2, 14, 13, 40, 0, 3]
"""Of each document, in tokens; token 1000 * document + i is its i-th."""


def document(number: int, length: int) -> list[int]:
    return [1000 * number + place for place in range(1, length + 1)]


def write(folder: Path, lengths: list[int], rows: int = 3) -> Path:
    lists = [document(number, length) for number, length in enumerate(lengths)]
    table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32())), "id": range(len(lists))})
    half = len(lists) // 2
    for part, piece in enumerate((table.slice(0, half), table.slice(half))):
        pq.write_table(piece, folder / f"{part}.parquet", row_group_size=rows)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole"), LENGTHS)


def loader_of(folder: Path, *, num_workers: int = 0, **given: Any) -> LakeLoader:
    names = {"labels", "too_long", "before", "after", "padding", "length", "column"} & given.keys()
    packing = {"documents": "whole", "length": LENGTH, **{one: given.pop(one) for one in names}}
    options = ReadOptions(num_lanes=given.pop("num_lanes", None))
    made = {"batch_size": 2, "shuffle": True, "shuffle_window": 2, "seed": 4, **given}
    dataset = LakeDataset(open_table(folder), options=options, **made)
    return LakeLoader(pack(dataset, **packing), num_workers=num_workers)


def tokens_of(batches: Any) -> list[int]:
    return [token for batch in batches for token in batch["tokens"][batch["loss_mask"]].tolist()]


def every(lengths: list[int]) -> list[int]:
    return [token for number, length in enumerate(lengths) for token in document(number, length)]


def check(batch: Any, lengths: list[int]) -> None:
    """Each sequence holds whole documents, or pieces of long ones, and its columns say so."""
    for row in range(len(batch["tokens"])):
        one = {name: column[row].tolist() for name, column in batch.items()}
        kept = sum(one["loss_mask"])
        assert kept and one["loss_mask"] == [True] * kept + [False] * (LENGTH - kept)
        at = 0
        runs = itertools.groupby(one["tokens"][:kept], lambda token: token // 1000)
        for index, (number, tokens) in enumerate(runs):
            run = list(tokens)
            stop = at + len(run)
            check_run(run, number, lengths[number])
            assert one["position_ids"][at:stop] == list(range(len(run)))
            assert one["document_ids"][at:stop] == [index] * len(run)
            if "labels" in one:
                last = run[-1] + 1 if run[-1] % 1000 < lengths[number] else -100
                assert one["labels"][at:stop] == [*run[1:], last]
            at = stop
        assert set(one.get("labels", [])[kept:]) <= {-100}


def check_run(run: list[int], number: int, length: int) -> None:
    """A run is a document, or a piece of a document that does not fit into a sequence."""
    whole = document(number, length)
    assert run in (whole[start : start + LENGTH] for start in range(0, length, LENGTH))


@pytest.mark.parametrize(("num_workers", "shuffle"), [(0, True), (2, True), (0, False)])
def test_each_document_stands_whole_in_one_sequence(folder: Path, num_workers: int, shuffle: bool) -> None:
    options = {"shuffle": shuffle, "shuffle_window": 2 if shuffle else 1, "num_lanes": 2, "labels": True}
    loader = loader_of(folder, num_workers=num_workers, **options)
    for _ in range(2):
        batches = list(loader)
        assert sorted(tokens_of(batches)) == every(LENGTHS)
        for batch in batches:
            check(batch, LENGTHS)
            assert batch["tokens"].dtype == torch.int32 and batch["labels"].dtype == torch.int64
            assert batch.receipt.rows == len(batch["tokens"])
        assert [len(batch["tokens"]) for batch in batches].count(2) >= len(batches) - 2
    assert cumulative_lengths(batches[0]["position_ids"])[-1] == len(batches[0]["tokens"]) * LENGTH


GOLDEN = [[24], [23], [25], [25], [13, 25], [22, 20], [15, 16], [21, 14], [10, 9], [11], [11], [27], [19, 18]]
"""The documents of the first sequences of `LENGTHS`."""


def test_sequences_of_a_table_are_these_for_ever(folder: Path) -> None:
    found = [row.tolist() for batch in loader_of(folder, num_lanes=1) for row in batch["tokens"]]
    assert [list(dict.fromkeys(token // 1000 for token in row if token)) for row in found[: len(GOLDEN)]] == GOLDEN


def test_a_run_goes_on_inside_of_a_window(folder: Path) -> None:
    expected = list(loader_of(folder, num_lanes=2, labels=True))
    for stop in range(len(expected) + 1):
        loader = loader_of(folder, num_lanes=2, labels=True)
        some(loader, stop)
        state = as_json(loader.state_dict())
        resumed = loader_of(folder, labels=True, num_workers=2 * (stop == 5))
        resumed.load_state_dict(state)
        assert same([dict(one) for one in resumed], [dict(one) for one in expected[stop:]])
    loader = loader_of(folder)
    assert any(any(State.from_plain(loader.state_dict()).held.offsets) for _ in loader)  # type: ignore[union-attr]


topologies = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 5), st.booleans())
"""(world size, lanes per rank, batch size, steps, whether the job is killed before it saves)"""


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.lists(topologies, max_size=3),
    st.integers(1, 3),
    st.booleans(),
)
def test_each_token_counts_once_on_any_chain_of_ranks(
    lengths: list[int], chain: list[tuple[int, int, int, int, bool]], last: int, shuffle: bool
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        folder, state, found = write(Path(place), lengths), None, []
        patched.setattr("lakeckpt.data.flows.ends.job_store", store_of(torch.distributed.HashStore()))
        for world_size, lanes, batch_size, steps, is_killed in [*chain, (last, 1, 2, 10_000, False)]:
            options = {"num_lanes": world_size * lanes, "batch_size": batch_size, "world_size": world_size}
            options |= {"shuffle": shuffle, "shuffle_window": 2 if shuffle else 1}
            ran = run_loaders(lambda rank: loader_of(folder, rank=rank, **options), world_size, state, steps)  # noqa: B023
            assert len({len(batches) for batches in ran.batches}) == 1, "all ranks have as many steps"
            for batch in itertools.chain(*ran.batches):
                check(batch, lengths)
            if not is_killed:
                found += tokens_of(itertools.chain(*ran.batches))
                state = ran.state
            if state is not None and state["epoch"]:
                break
        assert sorted(found) == every(lengths)


def store_of(store: Any) -> Any:
    return lambda world_size: store


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 9)), min_size=1, max_size=3))
def test_endless_streams_repeat_no_document_of_an_epoch(folder: Path, chain: list[tuple[int, int, int]]) -> None:
    state, batches = None, list[Any]()
    for world_size, lanes, steps in chain:
        options = {"num_lanes": world_size * lanes, "world_size": world_size, "endless": True}
        ran = run_loaders(lambda rank: loader_of(folder, rank=rank, **options), world_size, state, steps)  # noqa: B023
        batches += itertools.chain(*ran.batches)
        state = ran.state
    assert all(batch["tokens"].shape == (2, LENGTH) for batch in batches)
    resumed = loader_of(folder, num_lanes=1, batch_size=1, endless=True)
    resumed.load_state_dict(state)
    for batch in resumed:
        batches.append(batch)
        rest = Plan(State.from_plain(resumed.state_dict())).left  # type: ignore[arg-type]
        if not rest.begun:  # every window of the epochs so far was read, and none of later ones
            break
    counts = np.bincount(tokens_of(batches))
    assert set(counts[every(LENGTHS)].tolist()) == {rest.next_epoch}


def test_an_endless_stream_of_one_lane_is_one_epoch_after_another(folder: Path) -> None:
    loader = loader_of(folder, num_lanes=1)
    epochs = [row.tolist() for _ in range(3) for batch in loader for row in batch["tokens"]]
    stream = some(loader_of(folder, num_lanes=1, endless=True), len(epochs) // 2)
    assert [row.tolist() for batch in stream for row in batch["tokens"]] == epochs[: len(epochs) // 2 * 2]


def test_ranks_without_documents_get_no_sequence(folder: Path, job_store: Any) -> None:
    options = {"num_lanes": 2, "world_size": 2, "filters": [("id", "==", 2)], "labels": True}
    ran = run_loaders(lambda rank: loader_of(folder, rank=rank, **options), 2, None, None)
    assert sorted(tokens_of(itertools.chain(*ran.batches))) == document(2, 50)
    assert [len(batches) for batches in ran.batches] == [2, 2]
    idle = min(ran.batches, key=lambda batches: sum(batch.receipt.rows for batch in batches))
    assert all(batch["labels"].shape == (0, LENGTH) and batch["tokens"].dtype == torch.int32 for batch in idle)


def test_filters_tokens_around_documents_and_padding(folder: Path) -> None:
    kept = [length if number % 2 else 0 for number, length in enumerate(LENGTHS)]
    filters = [("id", "in", list(range(1, len(LENGTHS), 2)))]
    batches = list(loader_of(folder, filters=filters, before=7, after=(8, 9), padding=5, output="numpy"))
    found = tokens_of(batches)
    assert [found.count(token) for token in (7, 8, 9)] == [sum(length > 0 for length in kept)] * 3
    assert sorted(token for token in found if token > 9) == every(kept)
    assert all((batch["tokens"][~batch["loss_mask"]] == 5).all() for batch in batches)


def test_long_documents_are_dropped_where_asked_for_and_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lakeckpt"):
        batches = list(loader_of(folder, too_long="drop"))
    kept = [length if length <= LENGTH else 0 for length in LENGTHS]
    assert sorted(tokens_of(batches)) == every(kept)
    dropped = [record.args[0] for record in caplog.records if "are dropped" in record.msg]  # type: ignore[index]
    assert sum(dropped) == sum(length > LENGTH for length in LENGTHS) == 4  # type: ignore[arg-type]


def test_another_packing_is_refused_by_name(folder: Path) -> None:
    loader = loader_of(folder)
    some(loader, 2)
    state = loader.state_dict()
    packing = r"differ in packing: [^;]*whole documents of 'tokens'[^;]* in sequences of [^;]*\. Open"
    length = r"differ in length: 17 in this dataset, 16 in the state\. Open"
    for other, named in (({"length": 17}, length), ({"too_long": "drop"}, packing), ({"after": 1}, packing)):
        with pytest.raises(StateMismatch, match=named):
            loader_of(folder, **other).load_state_dict(state)
    odd, even = ([("id", "in", list(range(first, len(LENGTHS), 2)))] for first in (1, 0))
    filtered = loader_of(folder, filters=odd)
    some(filtered, 1)
    with pytest.raises(StateMismatch, match="selection: "):
        loader_of(folder, filters=even).load_state_dict(filtered.state_dict())
    cut = LakeLoader(pack(LakeDataset(folder, batch_size=2), length=LENGTH))
    with pytest.raises(StateError, match="each row is one row"):
        cut.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"documents": "half"}, ConfigError, "documents must be one of 'cut', 'whole'"),
        ({"too_long": "keep"}, ConfigError, "too_long must be one of 'cut', 'drop'"),
        ({"documents": "cut", "too_long": "drop"}, ConfigError, 'give documents="whole", too'),
        ({"mask_ends": False}, ConfigError, "leave mask_ends=True"),
        ({"tokenizer": document}, ConfigError, "make them in advance"),
        ({"length": 0}, ConfigError, "length must be a positive integer"),
        ({"column": "id"}, SchemaError, "'id' is int64, and packing needs a list"),
        ({"column": "nothing"}, SchemaError, "no column 'nothing'"),
    ],
)
def test_what_cannot_be_packed_is_refused(folder: Path, options: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        pack(LakeDataset(folder, batch_size=2), **{"length": 8, "documents": "whole", **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drop_last": True}, 'documents="whole" needs drop_last=False'),
        ({"transform": dict}, 'documents="whole" needs a dataset without transform='),
        ({"output": "arrow"}, 'give the dataset output="torch"'),
        ({"batch_size": None}, "give the dataset a batch_size"),
        ({"consumed": {"0.parquet": [(0, 2)]}}, 'documents="whole" needs no consumed='),
    ],
)
def test_datasets_that_cannot_be_packed_are_refused(folder: Path, options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        pack(LakeDataset(folder, **{"batch_size": 2, **options}), length=8, documents="whole")


def test_mixtures_with_rows_and_the_kit_for_pipelines_refuse_whole_documents(folder: Path) -> None:
    dataset = loader_of(folder).dataset
    with pytest.raises(SchemaError, match="sources 'a' and 'b' have the columns"):
        mix({"a": (dataset, 0.5), "b": (LakeDataset(folder, batch_size=2), 0.5)})
    with pytest.raises(ConfigError, match="this kit compares what readers yield"):
        assert_exactly_once(lambda rank, world_size, num_workers: loader_of(folder), topologies=[(1, 0)])


def test_a_null_token_is_refused_by_its_row_group(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1, None], [2]], pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    with pytest.raises(NullValueError, match="1 null tokens in row group 0"):
        list(loader_of(tmp_path))


def test_parts_of_ranks_merge(folder: Path, job_store: Any) -> None:
    ran = run_loaders(lambda rank: loader_of(folder, rank=rank, world_size=2, num_lanes=2), 2, None, 2)
    assert merge_states(ran.states)["step"] == 2
