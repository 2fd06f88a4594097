"""Packed mixtures: sequences whose documents come from several sources, which take turns by documents."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import LakeDataset, LakeLoader, MixedReceipt, cumulative_lengths, errors, mix, pack
from lakeckpt.core.state import State
from lakeckpt.core.streams.turns import MOST_ROWS_OFF
from tests.data.reading import as_json, same
from tests.data.test_mixed_flows import (
    FIRST,
    LENGTH,
    every_token,
    lake,
    length_of,
    name_of,
    run_ranks,
    source_of,
    tokenize,
    tokens_of,
)

__all__ = ["lake"]

THREE = {"web": 2.0, "code": 1.0, "plain": 1.0}


def mixed_of(lake: Path, *ranks: int, weights: dict[str, float] = THREE, lanes: int | None = None, **how: Any) -> Any:
    """Rows of tokens of several tables."""
    options = {"columns": ["tokens"], **how.pop("options", {})}
    sources = {name: (source_of(lake, name, *ranks, **options), weight) for name, weight in weights.items()}
    return mix(sources, seed=1, num_lanes=lanes, **how)


def loader_of(lake: Path, *ranks: int, workers: int = 0, lanes: int | None = None, **how: Any) -> LakeLoader:
    mixed = mixed_of(lake, *ranks, lanes=lanes, weights=how.pop("weights", THREE))
    return LakeLoader(pack(mixed, **{"length": LENGTH, **how}), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_token_is_lost_or_repeated_over_ranks_workers_and_batch_sizes(lake: Path, workers: int) -> None:
    found: list[int] = []
    state: Any = None
    for world_size, lanes, steps in [(2, None, 5), (1, 3, 4), (3, 6, 3), (1, None, 4), (2, 4, 3)]:
        ran = run_ranks(
            world_size,
            state,
            steps,
            lambda rank, w=world_size, lanes=lanes: loader_of(lake, rank, w, workers=workers, lanes=lanes),
        )
        assert all(batch["tokens"].shape == (4, LENGTH) for rank in ran.batches for batch in rank)
        found += tokens_of(itertools.chain.from_iterable(ran.batches))
        state = ran.state
    assert set(Counter(found).values()) == {1}
    rest = run_ranks(2, state, 60, lambda rank: loader_of(lake, rank, 2))
    found += tokens_of(itertools.chain.from_iterable(rest.batches))
    assert set(found) == set().union(*map(every_token, THREE)), "all of the first epochs were read"


def test_documents_stand_whole_one_after_another_and_sources_have_their_shares_of_them(lake: Path) -> None:
    weights = {"web": 3.0, "code": 1.0, "books": 2.0}
    loader = loader_of(lake, lanes=1, weights=weights)
    batches = list(itertools.islice(loader, 20))
    found = [(document, list(run)) for document, run in itertools.groupby(tokens_of(batches), lambda one: one // 100)]
    for document, tokens in found[:-1]:
        number = document - FIRST[name_of(100 * document)] // 100
        assert tokens == list(range(100 * document, 100 * document + length_of(number)))
    counts = {name: len(set(_positions(batches, name))) for name in weights}
    for name, weight in weights.items():
        share = sum(counts.values()) * weight / 6
        assert abs(counts[name] - share) <= MOST_ROWS_OFF + 1, "the last one has begun"


def _positions(batches: list[Any], name: str) -> list[tuple[int, int]]:
    spans = [span for batch in batches for one, each in batch.receipt.spans if one == name for span in each]
    return [(span.epoch, at) for span in spans for at in range(span.start, span.stop)]


def test_a_sequence_has_documents_of_several_sources(lake: Path) -> None:
    batches = list(itertools.islice(loader_of(lake), 10))
    names = [{name_of(token) for token in row} for batch in batches for row in batch["tokens"].tolist()]
    assert any(len(one) > 1 for one in names)
    assert all(isinstance(batch.receipt, MixedReceipt) and batch.receipt.rows == 4 for batch in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_going_on_from_any_step_gives_the_same_batches_and_receipts(lake: Path, workers: int) -> None:
    loader = loader_of(lake, lanes=2, workers=workers)
    states, batches = [loader.state_dict()], []
    for batch in itertools.islice(loader, 10):
        batches.append(batch)
        states.append(as_json(loader.state_dict()))
        assert loader.state_dict(batch.receipt)["held"] == loader.state_dict()["held"]
    assert as_json(loader.state_dict(batches[-3].receipt)) == states[-3]
    for step in (0, 1, 4, 7):
        again = loader_of(lake, lanes=2)
        again.load_state_dict(states[step])
        for batch, other in zip(again, batches[step:], strict=False):
            assert batch.receipt == other.receipt and same(batch, other)


def test_columns_say_where_documents_begin_and_what_follows(lake: Path) -> None:
    columns = ["tokens", "position_ids", "labels", "cu_seqlens", "loss_mask"]
    for batch in itertools.islice(loader_of(lake, columns=columns, labels=True, lanes=1), 12):
        assert list(batch) == columns and bool(batch["loss_mask"].all())
        assert torch.equal(batch["cu_seqlens"], cumulative_lengths(batch["position_ids"]))
        is_same = batch["position_ids"][:, 1:] > 0
        assert torch.equal(is_same, batch["tokens"][:, 1:] == batch["tokens"][:, :-1] + 1)
        assert torch.equal(batch["labels"][:, :-1][is_same], batch["tokens"][:, 1:][is_same].long())
        assert bool((batch["labels"][:, :-1][~is_same] == -100).all())


def written(folder: Path, name: str, tokens: pa.Array, **options: Any) -> LakeDataset:
    table = pa.table({"tokens": tokens, "id": range(len(tokens))})
    pq.write_table(table, folder / f"{name}.parquet", row_group_size=4)
    return LakeDataset(folder / f"{name}.parquet", batch_size=2, **{"columns": ["tokens"], **options})


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", np.int32), ("uint32", np.int64)])
def test_bytes_filters_and_added_tokens_are_as_in_sequences_of_one_table(tmp_path: Path, dtype: Any, kind: Any) -> None:
    def of_bytes(first: int) -> pa.Array:
        return pa.array([np.arange(first, first + at, dtype=dtype).tobytes() if at % 3 else None for at in range(12)])

    kept = {"filters": [("id", ">", 4)], "output": "numpy"}
    sources = {name: (written(tmp_path, name, of_bytes(first), **kept), 1.0) for name, first in FIRSTS.items()}
    loader = LakeLoader(pack(mix(sources), length=6, dtype=dtype, before=1, after=[2, 3]))
    batches = list(itertools.islice(loader, 12))
    documents = [[1, *range(first, first + at), 2, 3] for first in FIRSTS.values() for at in (5, 7, 8, 10, 11)]
    tokens = np.concatenate([batch["tokens"].reshape(-1) for batch in batches])
    assert tokens.dtype == kind
    ends = np.flatnonzero(tokens == 3) + 1
    found = [one.tolist() for one in np.split(tokens, ends)[:-1]]
    assert {tuple(one) for one in found} == {tuple(one) for one in documents}


FIRSTS = {"a": 100, "b": 200}


def test_a_row_that_holds_no_tokens_is_named_by_its_file_row_group_and_row(tmp_path: Path) -> None:
    good = written(tmp_path, "good", pa.array([[1, 2, 3]] * 9))
    nulls = written(tmp_path, "nulls", pa.array([[1, 2, 3]] * 6 + [[1, None]]), shuffle=True)
    loader = LakeLoader(pack(mix({"good": (good, 1.0), "nulls": (nulls, 1.0)}), length=6))
    with pytest.raises(errors.NullValueError, match=r"1 null tokens in row group 1 of the data file 'nulls\.parquet'"):
        list(itertools.islice(loader, 9))
    torn = {name: written(tmp_path, name, pa.array([b"1234"] * 9)) for name in ("even", "odd")}
    torn["odd"] = written(tmp_path, "odd", pa.array([b"1234"] * 6 + [b"123"]))
    loader = LakeLoader(pack(mix({name: (one, 1.0) for name, one in torn.items()}), length=6, dtype="uint16"))
    with pytest.raises(
        errors.DataFileDamaged, match=r"row 2 of row group 1 of the data file 'odd\.parquet' has 3 byte"
    ):
        list(itertools.islice(loader, 9))


def test_a_source_without_tokens_is_refused_in_mid_epoch(tmp_path: Path) -> None:
    sources = {"full": written(tmp_path, "full", pa.array([[1, 2, 3]] * 9))}
    sources["empty"] = written(tmp_path, "empty", pa.array([[]] * 9, pa.list_(pa.int64())))
    loader = LakeLoader(pack(mix({name: (one, 1.0) for name, one in sources.items()}), length=6))
    with pytest.raises(errors.ConfigError, match="an endless stream of such rows never gives a micro-batch"):
        list(itertools.islice(loader, 20))


def cut(row: Any) -> list[Any]:
    return [row]


@pytest.mark.parametrize(
    ("how", "packing", "named"),
    [
        ({}, {"tokenizer": tokenize, "column": "text"}, r"does not take a tokenizer=: pack each source, and mix them"),
        ({}, {"documents": "whole"}, r"does not take documents=\"whole\": pack each source, and mix them then"),
        ({}, {"mask_ends": False}, "does not take mask_ends=False"),
        ({}, {"length": 1}, "length must be at least 2"),
        ({"granularity": "batch"}, {}, r"granularity=\"batch\"\): its sources take turns by documents"),
        ({"schedule": [(3, THREE)]}, {}, "schedule=…\\), because lanes are at different documents: leave it out"),
        ({"exhausted": "stop"}, {}, r"exhausted='stop'\).*leave it at 'next_epoch'"),
        ({"source_column": "source"}, {}, "source_column=…\\), because a sequence has documents of several sources"),
        ({"options": {"transform": cut}}, {}, "source 'web' of the mixture has a transform="),
        (
            {"options": {"transform": cut, "rows": "many"}},
            {},
            r"source 'web' .* or rows=\"many\", and pack of a mixture",
        ),
    ],
)
def test_what_a_packed_mixture_cannot_have_is_refused_by_name(
    lake: Path, how: dict[str, Any], packing: dict[str, Any], named: str
) -> None:
    with pytest.raises(errors.ConfigError, match=named):
        pack(mixed_of(lake, **how), **{"length": LENGTH, **packing})


def test_mixtures_of_sequences_and_columns_without_tokens_are_refused_by_name(lake: Path) -> None:
    sequences = mix({"web": (pack(source_of(lake, "web"), length=LENGTH), 1.0)})
    with pytest.raises(errors.ConfigError, match=r"source 'web' of the mixture has sequences of pack\(…\)"):
        pack(sequences, length=LENGTH)
    with pytest.raises(errors.ConfigError, match="a mixture that is packed already"):
        pack(pack(mixed_of(lake), length=LENGTH), length=LENGTH)
    with pytest.raises(errors.SchemaError, match="source 'web' of the mixture cannot be packed: column 'id' is int64"):
        pack(mixed_of(lake), length=LENGTH, column="id")
    begun = mixed_of(lake)
    next(iter(begun))
    with pytest.raises(errors.ConfigError, match="a mixture that was read, or into which a state was loaded"):
        pack(begun, length=LENGTH)


def test_weights_stay_and_states_of_other_mixtures_are_refused_by_name(lake: Path) -> None:
    loader = loader_of(lake)
    next(iter(loader))
    with pytest.raises(errors.ConfigError, match="pack of a mixture has no set_weights: pack each source"):
        loader.set_weights(THREE)
    state = loader.state_dict()
    assert State.from_plain(state).makers == (0, 1, 2)
    weights = {name: (pack(source_of(lake, name), length=LENGTH), weight) for name, weight in THREE.items()}
    with pytest.raises(errors.StateMismatch, match="granularity: 'row' in this mixture, 'document, as pack of a mix"):
        LakeLoader(mix(weights, seed=1)).load_state_dict(state)
    with pytest.raises(
        errors.StateMismatch, match=r"source 'web' of the mixture: .* packing: \"tokens of 'tokens' bet"
    ):
        loader_of(lake, after=1).load_state_dict(state)
    with pytest.raises(errors.StateMismatch, match="length: 16 in this dataset, 8 in the state"):
        loader_of(lake, length=16).load_state_dict(state)
    assert repr(loader).count("in sequences of 8 tokens") == 3
