"""Mixtures of raw text, whole documents, transforms with ``rows="many"``, and sequences and rows in lockstep."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import (
    LakeDataset,
    LakeLoader,
    TransformContext,
    cumulative_lengths,
    errors,
    merge_states,
    mix,
    pack,
)
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from tests.data.flow_jobs import Ran
from tests.data.reading import as_json, same
from tests.tracking.processes import run_processes

FIRST = {"web": 0, "code": 100_000, "books": 200_000, "plain": 300_000}
DOCUMENTS = {"web": 90, "code": 70, "books": 60, "plain": 50}
LENGTH = 8


def length_of(document: int) -> int:
    return 61 if document % 17 == 3 else document * 7 % 13


def tokenize(text: str) -> list[int]:
    """The tokens of "first length": each is in one document of one table."""
    first, length = map(int, text.split())
    return list(range(first, first + length))


def two_tokens(text: str) -> list[int]:
    return tokenize(text)[:2]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed_flows")
    for name, count in DOCUMENTS.items():
        starts = [FIRST[name] + 100 * document for document in range(count)]
        lengths = [length_of(document) for document in range(count)]
        tokens = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
        table = pa.table(
            {
                "id": starts,
                "text": [f"{start} {length}" for start, length in zip(starts, lengths, strict=True)],
                "tokens": pa.array(tokens, pa.list_(pa.int32())),
            }
        )
        (folder / name).mkdir()
        for part in range(2):
            half = table.slice(part * count // 2, count // 2)
            pq.write_table(half, folder / name / f"{part}.parquet", row_group_size=9)
    return folder


def every_token(name: str) -> set[int]:
    return {
        FIRST[name] + 100 * document + place
        for document in range(DOCUMENTS[name])
        for place in range(length_of(document))
    }


def source_of(lake: Path, name: str, rank: int = 0, world_size: int = 1, **given: Any) -> LakeDataset:
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "shuffle_window": 2, **given}
    return LakeDataset(lake / name, rank=rank, world_size=world_size, **options)


def sequences_of(lake: Path, name: str, *ranks: int, tokenizer: Any = tokenize, **given: Any) -> LakeDataset:
    """Sequences of raw text; of "books", of whole documents; of "plain", of tokens in lockstep."""
    names = {"labels", "columns"} & given.keys()
    how = {one: given.pop(one) for one in names}
    dataset = source_of(lake, name, *ranks, **given)
    if name == "books":
        return pack(dataset, length=LENGTH, documents="whole", **how)
    if name == "plain":
        return pack(dataset, length=LENGTH, **how)
    return pack(dataset, length=LENGTH, column="text", tokenizer=tokenizer, **how)


WEIGHTS = {"web": 4.0, "code": 2.0, "books": 1.0, "plain": 1.0}


def loader_of(
    lake: Path,
    *ranks: int,
    workers: int = 0,
    weights: dict[str, float] = WEIGHTS,
    lanes: int | None = None,
    **given: Any,
) -> LakeLoader:
    how = {one: given.pop(one) for one in {"schedule", "granularity", "source_column"} & given.keys()}
    sources = {name: (sequences_of(lake, name, *ranks, **given), weight) for name, weight in weights.items()}
    return LakeLoader(mix(sources, seed=1, num_lanes=lanes, **how), num_workers=workers)


def run_ranks(world_size: int, state: Any, steps: int, make: Callable[[int], LakeLoader]) -> Ran:
    """``steps`` steps of all ranks, one rank after another: in an endless stream none waits for another."""
    ran = Ran()
    for rank in range(world_size):
        loader = make(rank)
        if state is not None:
            loader.load_state_dict(state)
        ran.batches.append(list(itertools.islice(loader, steps)))
        ran.states.append(loader.state_dict())
    return ran


def tokens_of(batches: Any) -> list[int]:
    return [token for batch in batches for token in batch["tokens"][batch["loss_mask"]].tolist()]


def name_of(token: int) -> str:
    return max((name for name, first in FIRST.items() if first <= token), key=lambda name: FIRST[name])


@pytest.mark.parametrize("granularity", ["row", "batch"])
def test_sources_of_all_kinds_give_their_shares_and_each_token_once(lake: Path, granularity: str) -> None:
    loader = loader_of(lake, granularity=granularity, source_column="source", lanes=2)
    batches = list(itertools.islice(loader, 32))
    assert all(batch["tokens"].shape == (4, LENGTH) and batch.receipt.rows == 4 for batch in batches)
    numbers = Counter(number for batch in batches for number in batch["source"].tolist())
    assert [numbers[one] for one in range(4)] == pytest.approx(
        [64, 32, 16, 16], abs=16 if granularity == "batch" else 4
    )
    tokens = Counter(tokens_of(batches))
    assert set(tokens.values()) == {1}
    for batch in batches:
        of_rows = [
            Counter(map(name_of, row[mask].tolist()))
            for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True)
        ]
        assert [list(one) for one in of_rows] == [[list(WEIGHTS)[number]] for number in batch["source"].tolist()]


THREE = {"web": 2.0, "code": 1.0, "plain": 1.0}


def test_no_token_of_several_tables_is_lost_or_repeated_over_ranks_and_workers(lake: Path) -> None:
    found: list[int] = []
    state: Any = None
    for world_size, workers, steps in [(2, 0, 5), (1, 2, 4), (2, 0, 3), (1, 0, 4)]:

        def make(rank: int, world_size: int = world_size, workers: int = workers) -> LakeLoader:
            return loader_of(lake, rank, world_size, workers=workers, weights=THREE)

        ran = run_ranks(world_size, state, steps, make)
        found += [token for rank in ran.batches for token in tokens_of(rank)]
        state = ran.state
    assert set(Counter(found).values()) == {1}
    rest = run_ranks(2, state, 60, lambda rank: loader_of(lake, rank, 2, weights=THREE))
    found += [token for rank in rest.batches for token in tokens_of(rank)]
    assert set(found) == set().union(*map(every_token, THREE)), "all of the first epochs were read"


def read(rank: int, world_size: int, lake: Path, folder: Path, state: Any, dies_at: int) -> None:
    """Read with a worker, and write what each step got, and the state after it, up to a kill of the process."""
    loader = loader_of(lake, rank, world_size, workers=1, weights=THREE)
    if state is not None:
        loader.load_state_dict(state)
    with (folder / f"{rank}.jsonl").open("w") as file:
        for step, batch in enumerate(loader):
            if step == dies_at - rank:
                os.kill(os.getpid(), signal.SIGKILL)
            print(json.dumps([tokens_of([batch]), loader.state_dict()]), file=file, flush=True)


def test_no_token_is_lost_or_repeated_over_killed_processes_with_workers(lake: Path, tmp_path: Path) -> None:
    run_processes(2, read, 2, lake, tmp_path, None, 6, ends=[-signal.SIGKILL] * 2)
    lines = [(tmp_path / f"{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    steps = [[json.loads(line) for line in step] for step in zip(*lines, strict=False)]
    assert len(steps) == 5, "rank 1 died after so many"
    found = [token for step in steps for tokens, _ in step for token in tokens]
    state = merge_states([one for _, one in steps[-1]])
    ran = run_ranks(1, state, 9, lambda rank: loader_of(lake, rank, 1, weights=THREE))
    found += tokens_of(ran.batches[0])
    assert set(Counter(found).values()) == {1}


def test_going_on_from_any_step_gives_the_same_batches_and_receipts(lake: Path) -> None:
    loader = loader_of(lake, lanes=2, schedule=[(3, {**WEIGHTS, "web": 0.0}), (6, WEIGHTS)])
    states, batches = [loader.state_dict()], []
    for batch in itertools.islice(loader, 14):
        if len(batches) == 9:
            loader.set_weights({**WEIGHTS, "books": 9.0})
        batches.append(batch)
        states.append(as_json(loader.state_dict()))
        assert loader.state_dict(batch.receipt)["held"] == loader.state_dict()["held"]
    assert as_json(loader.state_dict(batches[-3].receipt)) == states[-3]
    for step in (0, 1, 4, 6, 9, 11, 13):
        again = loader_of(lake, lanes=2, schedule=[(3, {**WEIGHTS, "web": 0.0}), (6, WEIGHTS)])
        again.load_state_dict(states[step])
        stop = 10 if step < 10 else 14
        for batch, other in zip(itertools.islice(again, stop - step), batches[step:stop], strict=True):
            assert batch.receipt == other.receipt and same(batch, other)


def parts_of_row(row: dict[str, Any], context: TransformContext) -> Iterator[dict[str, Any]]:
    """0 to 4 rows, which name their epoch."""
    for part in range(int(row["id"]) // 100 % 5):
        yield {"id": row["id"], "part": torch.tensor(part), "epoch": torch.tensor(context.receipt.epoch)}


def one_row_of_each(batch: Any, context: TransformContext) -> dict[str, Any]:
    rows = [span.epoch for span in context.receipt.spans for _ in range(span.rows)]
    return {"id": batch["id"], "part": torch.zeros(len(rows), dtype=torch.int64), "epoch": torch.tensor(rows)}


def rows_loader(lake: Path, *ranks: int, lanes: int, workers: int = 0) -> LakeLoader:
    many = source_of(lake, "web", *ranks, columns=["id"], transform=parts_of_row, rows="many")
    plain = source_of(lake, "code", *ranks, columns=["id"], transform=one_row_of_each)
    return LakeLoader(mix({"many": (many, 2.0), "plain": (plain, 1.0)}, num_lanes=lanes), num_workers=workers)


def test_each_row_of_a_transform_counts_once_in_each_epoch_on_any_chain_of_lanes(lake: Path) -> None:
    found, state = Counter[tuple[int, int, int]](), None
    for world_size, lanes, steps in [(2, 2, 15), (1, 3, 21), (3, 6, 9), (1, 1, 40)]:
        ran = run_ranks(
            world_size, state, steps, lambda rank, w=world_size, lanes=lanes: rows_loader(lake, rank, w, lanes=lanes)
        )
        state = ran.state
        for batch in itertools.chain.from_iterable(ran.batches):
            found.update(zip(*(batch[name].tolist() for name in ("id", "part", "epoch")), strict=True))
    reached, epochs = State.from_plain(state), max(epoch for _, _, epoch in found)
    assert set(found.values()) == {1} and epochs > 0
    for number, name in enumerate(("web", "code")):
        whole = {
            (FIRST[name] + 100 * document, part)
            for document in range(DOCUMENTS[name])
            for part in range(document % 5 if number == 0 else 1)
        }
        over = [epoch for epoch in range(epochs) if not Plan(reached.of(number)).left.of(epoch, DOCUMENTS[name])]
        assert over, "an epoch is over"
        for epoch in over:
            assert {(row, part) for row, part, one in found if one == epoch and name_of(row) == name} == whole


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_of_sequences_are_the_same_whatever_made_them(lake: Path, workers: int) -> None:
    columns = ["tokens", "position_ids", "labels", "cu_seqlens", "loss_mask"]
    loader = loader_of(lake, columns=columns, labels=True, workers=workers, lanes=1)
    for batch in itertools.islice(loader, 12):
        assert list(batch) == columns
        assert torch.equal(batch["cu_seqlens"], cumulative_lengths(batch["position_ids"]))
        follows = batch["tokens"][:, 1:] == batch["tokens"][:, :-1] + 1
        is_same = (batch["position_ids"][:, 1:] > 0) & batch["loss_mask"][:, 1:]
        assert bool((follows | ~is_same).all())
        assert torch.equal(batch["labels"][:, :-1][is_same], batch["tokens"][:, 1:][is_same].long())


FAILS = {"at": -1}


def tokenize_once_broken(text: str) -> list[int]:
    if FAILS["at"] == 0:
        FAILS["at"] = -1
        raise OSError("the vocabulary is not there")
    FAILS["at"] -= FAILS["at"] > 0
    return tokenize(text)


def peek_and_take(loader: LakeLoader, found: list[Any], count: int) -> None:
    loader.peek()
    found += itertools.islice(loader, count)


def test_a_tokenizer_that_fails_loses_nothing(lake: Path) -> None:
    weights = {"plain": 1.0, "code": 1.0, "web": 1.0}
    expected = tokens_of(itertools.islice(loader_of(lake, weights=weights, lanes=1), 12))
    for at in (0, 3, 11):
        loader, found = loader_of(lake, weights=weights, lanes=1, tokenizer=tokenize_once_broken), list[Any]()
        loader.state_dict()
        FAILS["at"] = at
        with pytest.raises(OSError, match="the vocabulary is not there"):
            peek_and_take(loader, found, 12)
        while len(found) < 12:
            found += itertools.islice(loader, 3)
        assert tokens_of(found)[: len(expected)] == expected


def test_states_of_other_kinds_of_sources_and_parts_are_refused_by_name(lake: Path) -> None:
    sources = {"web": 1.0, "plain": 1.0}
    ran = run_ranks(2, None, 2, lambda rank: loader_of(lake, rank, 2, weights=sources))
    with pytest.raises(
        errors.StateError, match=r"part of the ranks Intervals\(\[0, 1\)\) of 2: lakeckpt\.merge_states"
    ):
        loader_of(lake, 0, 2, weights=sources).load_state_dict(ran.states[0])
    whole = loader_of(lake, 0, 1, weights=sources)
    next(iter(whole))
    packed = mix({name: (sequences_of(lake, "plain"), weight) for name, weight in sources.items()}, seed=1)
    with pytest.raises(errors.StateError, match="source 'web' of the mixture: in this dataset each row is one row"):
        LakeLoader(packed).load_state_dict(whole.state_dict())
    other = loader_of(lake, weights=sources, tokenizer=two_tokens)
    with pytest.raises(errors.StateMismatch, match=r"source 'web' of the mixture: .* tokenizer: '.*two_tokens'"):
        other.load_state_dict(whole.state_dict())
    assert repr(whole).count("in sequences of 8 tokens") == 2
