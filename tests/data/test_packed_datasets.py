"""Packed datasets: every token once in each epoch on any chain of topologies, no sequence split, refusals by name."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import (
    CheckpointManager,
    LakeDataset,
    LakeLoader,
    ReadOptions,
    cumulative_lengths,
    errors,
    open_table,
    pack,
)
from lakeckpt.core.consumption import consumed
from lakeckpt.core.state import State
from lakeckpt.lake.parquet.footer import TAIL_BYTES
from tests.examples import examples
from tests.reading.cases import counted

LENGTH = 8


def write(folder: Path, lengths: Sequence[Sequence[int]], rows: int = 4) -> int:
    """Write a file for each of ``lengths``, ``rows`` documents to a row group; return the number of (unique) tokens."""
    count = itertools.count()
    for number, mine in enumerate(lengths):
        lists = [list(itertools.islice(count, length)) for length in mine]
        table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32())), "long": [one > 5 for one in mine]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=rows)
    return next(count)


def loader_of(folder: Path, *, rank: int = 0, world_size: int = 1, workers: int = 0, **given: Any) -> LakeLoader:
    """A loader of packed sequences of ``folder``; ``given`` goes to the dataset, ``lanes`` and ``pack`` aside."""
    lanes, packing = given.pop("lanes", None), given.pop("pack", {})
    dataset = LakeDataset(
        open_table(folder),
        **{"batch_size": 2, "shuffle": True, "seed": 4, "shuffle_window": 2, **given},
        rank=rank,
        world_size=world_size,
        options=ReadOptions(num_lanes=lanes),
    )
    return LakeLoader(pack(dataset, length=LENGTH, **packing), num_workers=workers)


def tokens_of(batch: Any) -> list[int]:
    return batch["tokens"][batch["loss_mask"]].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """537 tokens in 14 row groups of three files."""
    found = tmp_path_factory.mktemp("packed")
    assert write(found, [[3, 0, 40, 1] * 4, [9, 25, 0, 0, 7] * 3, [2, 1, 31] * 7]) == 537
    return found


topologies = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 12), st.integers(0, 3))
"""Ranks, lanes of each rank, sequences of a batch, steps up to the checkpoint, steps lost after it."""


@settings(max_examples=examples(40))
@given(
    st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=3),
    st.lists(topologies, max_size=4),
    st.booleans(),
)
def test_every_token_counts_once_in_any_history(
    lengths: list[list[int]], history: list[tuple[int, int, int, int, int]], shuffle: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        count = write(Path(place), lengths)
        state, found = None, list[int]()
        for ranks, lanes, batch, steps, lost in [*history, (1, 1, 2, 10**6, 0)]:
            states = []
            for rank in range(ranks):
                options = {"lanes": ranks * lanes, "batch_size": batch, "shuffle": shuffle}
                loader = loader_of(Path(place), rank=rank, world_size=ranks, **options)
                if state is not None:
                    loader.load_state_dict(state)
                if loader.epoch:  # the history is over its only epoch
                    states.append(loader.state_dict())
                    continue
                taken = list(itertools.islice(iter(loader), steps + lost))
                found += [token for one in taken[:steps] for token in tokens_of(one)]
                if steps and len(taken) >= steps:
                    states.append(loader.state_dict(taken[steps - 1].receipt))
                else:
                    again = loader_of(Path(place), rank=rank, world_size=ranks, **options)
                    if state is not None:
                        again.load_state_dict(state)
                    list(itertools.islice(iter(again), steps))
                    states.append(again.state_dict())
            assert all(one == states[0] for one in states)
            state = states[0]
        assert sorted(found) == list(range(count))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_bitwise_equal_on_topologies_that_divide_the_lanes(folder: Path, workers: int) -> None:
    whole = list(loader_of(folder, lanes=6))
    for ranks in (2, 3):
        parts = [
            list(loader_of(folder, rank=rank, world_size=ranks, lanes=6, workers=workers)) for rank in range(ranks)
        ]
        dealt = [one for step in itertools.zip_longest(*parts) for one in step if one is not None]
        full = len(whole) // 6 * 6 - 6  # the last turns are dealt out equally
        for mine, its in zip(whole[:full], dealt[:full], strict=True):
            assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


def test_an_endless_stream_is_always_full_and_counts_every_token_once_in_each_epoch(folder: Path) -> None:
    counts: Counter[int] = Counter()
    state: Any = None
    for ranks, lanes, steps in [(1, 2, 40), (3, 3, 25), (2, 6, 30), (1, 1, 60)]:
        states = []
        for rank in range(ranks):
            loader = loader_of(folder, rank=rank, world_size=ranks, lanes=lanes, endless=True)
            if state is not None:
                loader.load_state_dict(state)
            for batch in itertools.islice(iter(loader), steps):
                assert batch["tokens"].shape == (2, LENGTH) and batch["loss_mask"].all()
                counts.update(tokens_of(batch))
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
    found = State.from_plain(state)
    every = consumed(found)
    whole = sum(positions.size == found.identity.rows_of(epoch) for epoch, positions in every.items())
    assert counts.total() == LENGTH * sum(positions.size for positions in every.values())
    assert len(counts) == 537
    assert whole >= 4
    assert set(counts.values()) <= set(range(whole, len(every) + 2))  # the last sequence goes on in the next epoch


def test_no_batch_is_of_one_document(tmp_path: Path) -> None:
    write(tmp_path, [[800, *[8] * 100]], rows=101)
    batches = list(loader_of(tmp_path, batch_size=10))
    longest = max(sum(token < 800 for token in one["tokens"][:, 0].tolist()) for one in batches)
    assert longest < 10


def test_columns_have_the_shapes_and_types_that_models_take(folder: Path) -> None:
    batch = next(iter(loader_of(folder, pack={"labels": True, "before": 600, "after": [601, 602]})))
    shapes = {name: (column.dtype, tuple(column.shape)) for name, column in batch.items()}
    assert shapes == {
        "tokens": (torch.int32, (2, LENGTH)),
        "position_ids": (torch.int32, (2, LENGTH)),
        "document_ids": (torch.int32, (2, LENGTH)),
        "loss_mask": (torch.bool, (2, LENGTH)),
        "labels": (torch.int64, (2, LENGTH)),
    }
    begins = cumulative_lengths(batch["position_ids"])
    assert begins.dtype == torch.int32
    assert begins[0] == 0 and begins[-1] == 2 * LENGTH
    assert len(begins) - 1 == sum(int(one.max()) + 1 for one in batch["document_ids"])


def test_a_filter_holds_and_its_documents_alone_are_packed(folder: Path) -> None:
    found = [token for batch in loader_of(folder, filters=[("long", "==", True)]) for token in tokens_of(batch)]
    assert len(found) == len(set(found)) == 4 * 40 + 3 * (9 + 25 + 7) + 7 * 31


def test_drop_last_drops_the_sequences_that_fill_no_batch(folder: Path) -> None:
    batches = list(loader_of(folder, drop_last=True, lanes=2, batch_size=3))
    assert all(one["tokens"].shape == (3, LENGTH) for one in batches)
    assert len(batches) == 68 // 2 // 3 * 2


def test_a_killed_run_goes_on_and_its_audit_proves_every_sequence(folder: Path, tmp_path: Path) -> None:
    from lakeckpt.checkpoint.ledger.audit import audit
    from lakeckpt.lake.storage.local import LocalStorage

    found, model = list[int](), torch.nn.Linear(1, 1)
    for steps in (7, 9, 100):
        loader = loader_of(folder, lanes=3)
        with CheckpointManager(tmp_path / "run", {"model": model, "reader": loader}, persist_every=1) as manager:
            manager.restore()
            for batch in itertools.islice(iter(loader), steps):
                found += tokens_of(batch)
                manager.step(batch)
    assert sorted(found) == list(range(537))
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.verdict == "proved", report


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_row_group_is_read_once_from_a_store_although_windows_share_some(folder: Path, lanes: int) -> None:
    table, counting = counted(open_table(folder))
    dataset = LakeDataset(table, batch_size=2, shuffle=True, shuffle_window=2, options=ReadOptions(num_lanes=lanes))
    packed = pack(dataset, length=LENGTH)
    assert packed.identity.tokens == 537
    before = len(counting.reads)
    assert sorted(token for batch in LakeLoader(packed) for token in tokens_of(batch)) == list(range(537))
    footers, cut = 3, lanes - 1  # a row group that two lanes share is read by each
    assert len(counting.reads) - before <= footers + 14 + cut


@pytest.mark.parametrize(
    ("dataset", "packing", "message"),
    [
        ({"batch_size": None}, {}, "in micro-batches"),
        ({"output": "arrow"}, {}, "tensors or arrays"),
        ({}, {"length": 0}, "length must be"),
        ({}, {"length": -1}, "length must be"),
        ({}, {"length": 2.5}, "length must be"),
        ({}, {"length": 1}, "length must be at least 2"),
        ({}, {"length": 1 << 25}, "at most 16777216, got 33554432"),
        ({}, {"column": "words"}, "no column 'words'"),
        ({}, {"column": "long"}, "needs a list of integers"),
        ({}, {"before": -1}, "before takes tokens"),
        ({}, {"after": ["a"]}, "after takes tokens"),
        ({}, {"padding": None}, "padding takes a token"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    folder: Path, dataset: dict[str, Any], packing: dict[str, Any], message: str
) -> None:
    rows = LakeDataset(open_table(folder), **{"batch_size": 2, **dataset})
    with pytest.raises((errors.ConfigError, errors.SchemaError), match=message):
        pack(rows, **{"length": LENGTH, **packing})


@pytest.mark.parametrize("tokens", [0, LENGTH - 1])
def test_an_endless_stream_of_less_than_a_sequence_is_refused(tokens: int, tmp_path: Path) -> None:
    write(tmp_path, [[tokens]])
    with pytest.raises(errors.ConfigError, match=f"needs at least 8 tokens, and the table has {tokens}"):
        next(iter(loader_of(tmp_path, endless=True)))


@pytest.mark.parametrize("lists", [[], [[], None, []]], ids=str)
def test_a_table_without_tokens_has_epochs_without_batches(lists: list[Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    for rank in range(2):
        loader = loader_of(tmp_path, rank=rank, world_size=2)
        assert (list(loader), len(loader), loader.epoch) == ([], 0, 1)


def test_null_and_empty_documents_are_in_no_sequence_and_get_no_tokens_beside_them(tmp_path: Path) -> None:
    lists = [None, [1, 2], [], [3], None]
    pq.write_table(pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    loader = loader_of(tmp_path, shuffle=False, shuffle_window=1, pack={"before": 8, "after": 9})
    (batch,) = loader
    assert tokens_of(batch) == [8, 1, 2, 9, 8, 3, 9]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]  # the last one is padding


@pytest.mark.parametrize("workers", [0, 1])
def test_a_null_token_is_refused_with_its_row_group_where_it_is_read(workers: int, tmp_path: Path) -> None:
    lists = [[1, 2, 3], [4, 5, 6], [7, None], [8]]
    table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    loader = loader_of(tmp_path, shuffle=False, shuffle_window=1, workers=workers)
    with pytest.raises(
        errors.NullValueError, match=r"row group 1 of the data file 'a.parquet'.*Write the lists without"
    ):
        list(loader)


def test_a_fresh_start_reads_footers_and_no_data_before_the_first_window(tmp_path: Path) -> None:
    write(tmp_path, [[40_000] * 6] * 3, rows=2)
    table, counting = counted(open_table(tmp_path))
    options = ReadOptions(num_lanes=1)
    packed = pack(LakeDataset(table, batch_size=2, shuffle=True, shuffle_window=1, options=options), length=LENGTH)
    loader = LakeLoader(packed)
    assert (loader.state_dict()["step"], packed.identity.tokens) == (0, 3 * 6 * 40_000)
    sizes = {one.name: one.stat().st_size for one in tmp_path.iterdir()}
    tails = {(name, size - TAIL_BYTES, size) for name, size in sizes.items()}
    assert set(counting.reads) == tails and len(counting.reads) == 3
    next(iter(loader))
    assert set(counting.reads) > tails


def test_a_state_of_another_length_is_refused_by_name(folder: Path) -> None:
    loader = loader_of(folder)
    next(iter(loader))
    other = LakeLoader(pack(LakeDataset(open_table(folder), batch_size=2, shuffle=True, seed=4), length=LENGTH + 1))
    with pytest.raises(errors.StateMismatch, match="differ in length: 9 in this dataset, 8 in the state; window: "):
        other.load_state_dict(loader.state_dict())
