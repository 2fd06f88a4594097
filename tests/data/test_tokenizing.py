"""Texts that become tokens where they are read: each token counts once, and sequences are what documents say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, cumulative_lengths, merge_states, mix, pack
from lakeckpt.data.flows.fingerprints import rows_digest
from lakeckpt.errors import ConfigError, NullValueError, SchemaError, StateMismatch
from tests.data.flow_jobs import job_store, run_loaders
from tests.data.reading import as_json, same, some
from tests.examples import examples

__all__ = ["job_store"]

LENGTHS = [0, 3, 50, 1, 0, 17, 8, 130, 2, 2, 9, 31, 0, 5, 64, 12]
"""Of each document, in tokens; token 1000 * document + i is its i-th."""


def maker_of(state: Any) -> Any:
    return state["identity"]["maker"]


def tokenize(text: str) -> list[int]:
    """The tokens of "document length"."""
    document, length = map(int, text.split())
    return [1000 * document + place for place in range(1, length + 1)]


class Encoding:
    """As the tokenizers library returns it."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


def encode(text: str) -> Encoding:
    """As `tokenize`."""
    return Encoding(tokenize(text))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    names = [f"{document} {length}" for document, length in enumerate(LENGTHS)]
    table = pa.table({"text": names, "id": range(len(names)), "maybe": ["1 1", None, *names[2:]]})
    for part in range(2):
        pq.write_table(table.slice(part * 9, 9), folder / f"{part}.parquet", row_group_size=4)
    return folder


def packed(folder: Path, *, batch_size: int = 2, length: int = 8, **options: Any) -> LakeDataset:
    names = {"rank", "world_size", "endless", "output", "filters"} & options.keys()
    kept = {one: options.pop(one) for one in {"num_lanes", "accept_changes"} & options.keys()}
    read = ReadOptions(**kept)
    dataset = LakeDataset(
        folder, batch_size=batch_size, shuffle=True, options=read, **{one: options.pop(one) for one in names}
    )
    return pack(dataset, length=length, column="text", **{"tokenizer": tokenize, **options})


def tokens_of(batches: Any) -> list[int]:
    return [token for batch in batches for token in batch["tokens"][batch["loss_mask"]].tolist()]


EVERY = [token for document, length in enumerate(LENGTHS) for token in tokenize(f"{document} {length}")]


def check_sequences(batch: Any) -> None:
    """Positions, documents and labels of the sequences of a batch follow from its tokens."""
    for row in range(len(batch["tokens"])):
        kept = batch["loss_mask"][row].tolist()
        tokens, documents = batch["tokens"][row].tolist(), batch["document_ids"][row].tolist()
        assert kept == sorted(kept, reverse=True) and kept[0]
        ends = [before // 1000 != after // 1000 for before, after in itertools.pairwise(tokens)]
        for place, (is_kept, is_end) in enumerate(zip(kept[1:], ends, strict=True), 1):
            if is_kept:
                assert documents[place] == documents[place - 1] + is_end
                assert batch["position_ids"][row][place] == (0 if is_end else batch["position_ids"][row][place - 1] + 1)
        assert documents[0] == batch["position_ids"][row][0] == 0
        for place, is_kept in enumerate(kept):
            has_next = is_kept and tokens[place] % 1000 < LENGTHS[tokens[place] // 1000]
            assert batch["labels"][row][place] == (tokens[place] + 1 if has_next else -100)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_token_is_in_one_sequence(texts: Path, num_workers: int) -> None:
    loader = LakeLoader(packed(texts, labels=True, num_lanes=2, tokenizer=encode), num_workers=num_workers)
    for _ in range(2):
        batches = list(loader)
        assert sorted(tokens_of(batches)) == EVERY
        for batch in batches:
            check_sequences(batch)
            assert batch["tokens"].dtype == torch.int32 and batch["labels"].dtype == torch.int64
            assert batch.receipt.rows == int(batch["loss_mask"].sum())
        assert [batch["tokens"].shape for batch in batches].count((2, 8)) >= len(batches) - 2
    assert cumulative_lengths(batches[0]["position_ids"])[-1] == 16


def test_separators_stand_around_documents_with_tokens(texts: Path) -> None:
    batches = list(LakeLoader(packed(texts, before=7, after=(8, 9), padding=5)))
    found = tokens_of(batches)
    documents = sum(length > 0 for length in LENGTHS)
    assert [found.count(token) for token in (7, 8, 9)] == [documents] * 3
    assert sorted(token for token in found if token > 9) == EVERY
    (last,) = [batch for batch in batches if not batch["loss_mask"].all()]
    assert set(last["tokens"][~last["loss_mask"]].tolist()) == {5}


def test_a_run_goes_on_inside_of_a_document(texts: Path) -> None:
    expected = list(LakeLoader(packed(texts, labels=True, num_lanes=2)))
    for stop in range(0, len(expected), 3):
        loader = LakeLoader(packed(texts, labels=True, num_lanes=2))
        some(loader, stop)
        resumed = LakeLoader(packed(texts, labels=True))
        resumed.load_state_dict(as_json(loader.state_dict()))
        assert same([dict(one) for one in resumed], [dict(one) for one in expected[stop:]])


topologies = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 6))
"""(world size, lanes per rank, batch size, steps)"""


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(topologies, max_size=3), st.integers(1, 3))
def test_each_token_counts_once_on_any_chain_of_ranks(
    texts: Path, job_store: Any, chain: list[tuple[int, int, int, int]], last: int
) -> None:
    state, found = None, []
    for world_size, lanes, batch_size, steps in [*chain, (last, 1, 2, 10_000)]:
        options = {"num_lanes": world_size * lanes, "batch_size": batch_size, "world_size": world_size}
        ran = run_loaders(lambda rank: LakeLoader(packed(texts, rank=rank, **options)), world_size, state, steps)  # noqa: B023
        found += tokens_of(batch for batches in ran.batches for batch in batches)
        state = ran.state
        if state["epoch"]:
            break
    assert sorted(found) == EVERY


def test_ranks_without_tokens_get_no_sequence(texts: Path, job_store: Any) -> None:
    options = {"num_lanes": 2, "world_size": 2, "filters": [("id", "==", 7)], "labels": True}
    ran = run_loaders(lambda rank: LakeLoader(packed(texts, rank=rank, **options)), 2, None, None)
    assert len(tokens_of(batch for batches in ran.batches for batch in batches)) == 130
    idle = min(ran.batches, key=lambda batches: sum(batch.receipt.rows for batch in batches))
    assert len(idle) == 9 and all(batch["labels"].shape == (0, 8) for batch in idle)


def test_endless_streams_of_tokens_have_full_batches(texts: Path) -> None:
    loaders = [LakeLoader(packed(texts, rank=rank, world_size=2, endless=True, num_lanes=2)) for rank in range(2)]
    batches = [batch for loader in loaders for batch in some(loader, 60)]
    assert all(batch["loss_mask"].all() and batch["tokens"].shape == (2, 8) for batch in batches)
    state = merge_states([loader.state_dict() for loader in loaders])
    assert state["step"] == 60
    counts = np.bincount(tokens_of(batches))[EVERY]
    assert counts.min() >= 1


def test_another_tokenizer_or_length_is_refused_by_name(texts: Path) -> None:
    loader = LakeLoader(packed(texts))
    some(loader, 2)
    with pytest.raises(StateMismatch, match=r"tokenizer: '.*encode' in this dataset, '.*test_tokenizing\.tokenize' in"):
        LakeLoader(packed(texts, tokenizer=encode)).load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match=r"differ in length: 9 in this dataset, 8 in the state\. Open"):
        LakeLoader(packed(texts, length=9)).load_state_dict(loader.state_dict())
    with pytest.raises(
        StateMismatch, match=r"differ in packing: [^;]* between \(7,\) and \(\)\" in [^;]* state\. Open"
    ):
        LakeLoader(packed(texts, before=7)).load_state_dict(loader.state_dict())


class Added:
    """A tokenizer with a vocabulary that changes while its name stays: it adds a number to each token."""

    def __init__(self, number: int, *, draws: bool = False) -> None:
        self.number, self.draws = number, draws

    def __call__(self, text: str) -> list[int]:
        added = int(np.random.default_rng().integers(1 << 20)) if self.draws else self.number
        return [token + added for token in tokenize(text)]


@pytest.mark.parametrize("filters", [None, [("id", ">", 3)]])
def test_another_tokenizer_of_the_same_name_is_refused(texts: Path, filters: Any) -> None:
    def loader_of(number: int, **options: Any) -> LakeLoader:
        return LakeLoader(packed(texts, tokenizer=Added(number), filters=filters, **options))

    state = loader_of(0).state_dict()
    some(begun := loader_of(0), 3)
    for saved in (state, as_json(begun.state_dict())):
        loader_of(0).load_state_dict(saved)
        with pytest.raises(StateMismatch, match=r"differ in tokenizer: .*Added' has the fingerprint 'rows:\w{16}'"):
            loader_of(1).load_state_dict(saved)
        accepting = loader_of(1, accept_changes=["tokenizer"])
        accepting.load_state_dict(saved)
        assert {token % 1000 for token in tokens_of(accepting)} >= {2, 3}
        assert maker_of(accepting.state_dict()) == maker_of(loader_of(1).state_dict()) != maker_of(saved)


def test_a_tokenizer_that_draws_has_no_fingerprint(texts: Path) -> None:
    def loader_of() -> LakeLoader:
        return LakeLoader(packed(texts, tokenizer=Added(0, draws=True)))

    state = loader_of().state_dict()
    loader_of().load_state_dict(state)
    assert maker_of(state)[-1] == ""


def test_a_tokenizer_that_fails_fails_where_its_row_is_read(texts: Path) -> None:
    loader = LakeLoader(packed(texts, tokenizer=text_again))
    assert maker_of(loader.state_dict())[-1] == ""
    with pytest.raises(ConfigError, match="it returns a list or an array of tokens"):
        next(iter(loader))


def test_the_digest_of_rows_is_that_of_what_processors_agree_on() -> None:
    def digest(value: Any) -> str:
        return rows_digest([[value]])

    alike = [
        ({"a": np.float32([1, 2])}, {"a": np.float32([1, 3])}),
        ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.5])}),
        (1.0, 2.0),
    ]
    others = [
        ({"a": np.float32([1, 2])}, {"a": np.float32([1, 2, 3])}),
        ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([[1.0, 2.0]])}),
        ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])}),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1, 3]),
        ("a", "b"),
        (np.int32(1), np.int64(1)),
        (True, 1),
    ]
    assert all(digest(one) == digest(other) for one, other in alike)
    assert all(digest(one) != digest(other) for one, other in others)
    assert rows_digest([[1], [2]]) != rows_digest([[1, 2]]) != rows_digest([])
    assert rows_digest([[1] * 256, [2]]) == rows_digest([[1] * 256, [3]])


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"tokenizer": lambda text: [1]}, ConfigError, "a function with a name"),
        ({"tokenizer": [1] * 10_000}, ConfigError, r"got list: \[1, 1, .{,80}: a function's name"),
        ({"tokenizer": 3}, ConfigError, "a function with a name"),
        ({"column": "id"}, SchemaError, "'id' is int64, and a tokenizer needs texts"),
        ({"column": "nothing"}, SchemaError, "no column 'nothing' to pack"),
        ({"mask_ends": False}, ConfigError, "leave mask_ends=True"),
        ({"length": 0}, ConfigError, "length must be a positive integer"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(texts: Path, options: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        pack(LakeDataset(texts, batch_size=2), **{"length": 8, "column": "text", "tokenizer": tokenize, **options})


def test_a_mixture_is_not_packed_as_if_it_were_its_first_source(texts: Path) -> None:
    mixed = mix({"a": (LakeDataset(texts, batch_size=2), 0.5), "b": (LakeDataset(texts, batch_size=2), 0.5)})
    with pytest.raises(ConfigError, match="a tokenizer=: pack each source, and mix them then"):
        pack(mixed, length=8, column="text", tokenizer=tokenize)
    with pytest.raises(SchemaError, match="source 'a' of the mixture cannot be packed: column 'text' is string"):
        pack(mixed, length=8, column="text")


def text_again(text: str) -> Any:
    return text


def negative(text: str) -> Any:
    return [-1]


@pytest.mark.parametrize("tokenizer", [text_again, negative])
def test_what_is_no_token_is_refused_by_its_row(texts: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="it returns a list or an array of tokens") as caught:
        next(iter(LakeLoader(packed(texts, tokenizer=tokenizer))))
    assert caught.value.__notes__ == ["in the tokenizer, of the row at position 0 of epoch 0"]


def test_null_texts_are_refused_or_documents_without_tokens(texts: Path) -> None:
    def loader_of(nulls: Any) -> LakeLoader:
        dataset = LakeDataset(texts, batch_size=2, options=ReadOptions(nulls=nulls))
        return LakeLoader(pack(dataset, length=8, column="maybe", tokenizer=tokenize_or_nothing))

    with pytest.raises(NullValueError):
        list(loader_of("error"))
    assert len(tokens_of(loader_of("mask"))) == len(EVERY) - LENGTHS[1] + 1


def tokenize_or_nothing(text: str) -> list[int]:
    """As `tokenize`; no token of no text."""
    return tokenize(text) if text else []


BROKEN = {"calls": 0}


def tokenize_at_the_second_try(text: str) -> list[int]:
    BROKEN["calls"] += 1
    if BROKEN["calls"] == 5:
        raise OSError("the vocabulary is not there")
    return tokenize(text)


def test_an_error_of_peek_loses_no_token(texts: Path) -> None:
    loader = LakeLoader(packed(texts, tokenizer=tokenize_at_the_second_try, batch_size=20))
    loader.state_dict()
    BROKEN["calls"] = 0
    with pytest.raises(OSError, match="the vocabulary is not there"):
        loader.peek()
    assert sorted(tokens_of(loader)) == EVERY
