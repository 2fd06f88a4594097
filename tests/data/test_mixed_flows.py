"""Mixtures of raw text, whole documents, transforms with ``rows="many"``, and sequences and rows in lockstep."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, mix, pack
from tests.data.flow_jobs import run_loaders

FIRST = {"web": 0, "code": 100_000, "books": 200_000, "plain": 300_000}
DOCUMENTS = {"web": 90, "code": 70, "books": 60, "plain": 50}
LENGTH = 8


def length_of(document: int) -> int:
    return 61 if document % 17 == 3 else document * 7 % 13


def tokenize(text: str) -> list[int]:
    """The tokens of "first length": each is in one document of one table."""
    first, length = map(int, text.split())
    return list(range(first, first + length))


def tokenize_otherwise(text: str) -> list[int]:
    return tokenize(text)[::-1]


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


def test_no_token_of_three_raw_tables_is_lost_or_repeated_over_ranks_workers_and_kills(lake: Path) -> None:
    weights = {"web": 2.0, "code": 1.0, "plain": 1.0}
    found: list[int] = []
    state: Any = None
    for world_size, workers, steps in [(2, 2, 5), (1, 2, 4), (2, 0, 3), (2, 1, 0), (1, 1, 4)]:

        def make(rank: int, world_size: int = world_size, workers: int = workers) -> LakeLoader:
            return loader_of(lake, rank, world_size, workers=workers, weights=weights)

        ran = run_loaders(make, world_size, state, steps)
        found += [token for rank in ran.batches for token in tokens_of(rank)]
        state = ran.state
        run_loaders(make, world_size, state, 3)  # it is killed, and nothing of it was saved
    assert set(Counter(found).values()) == {1}
    rest = run_loaders(lambda rank: loader_of(lake, rank, 2, weights=weights), 2, state, 60)
    found += [token for rank in rest.batches for token in tokens_of(rank)]
    assert set(found) == set().union(*map(every_token, weights)), "all of the first epochs were read"
