"""Texts become tokens by the `tokenizers` library, in workers and in process, and each token counts once."""

from __future__ import annotations

import functools
import os
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lakeckpt import LakeDataset, LakeLoader, ReadOptions, pack
from lakeckpt.demo.lake import prose
from lakeckpt.errors import ConfigError, SchemaError, StateMismatch
from tests.data.flow_jobs import job_store, run_loaders

__all__ = ["job_store"]

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are forked after it was used
END = 0
TEXTS = [one.decode() for one in prose()]
"""The demo's own prose."""
TOKENIZER = Tokenizer(models.BPE())


def encode(text: str) -> Any:
    """The encoding of a text."""
    return TOKENIZER.encode(text)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of ``TEXTS``, on which the tokenizer is trained."""
    TOKENIZER.pre_tokenizer, TOKENIZER.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>"], show_progress=False)
    TOKENIZER.train_from_iterator(TEXTS, trainer)
    folder = tmp_path_factory.mktemp("prose")
    pq.write_table(pa.table({"text": TEXTS}), folder / "prose.parquet", row_group_size=50)
    return folder


def loader_of(texts: Path, *, num_workers: int = 0, lanes: int = 2, **given: Any) -> LakeLoader:
    options = ReadOptions(num_lanes=lanes)
    dataset = LakeDataset(texts, batch_size=2, shuffle=True, options=options, **given)
    packed = pack(dataset, length=128, column="text", tokenizer=encode, after=END, padding=END)
    return LakeLoader(packed, num_workers=num_workers)


def counted(batches: Iterable[Any]) -> Counter[int]:
    return Counter(token for batch in batches for token in batch["tokens"][batch["loss_mask"]].tolist())


def every_token() -> Counter[int]:
    return Counter(token for text in TEXTS for token in (*encode(text).ids, END))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_token_of_an_epoch_is_delivered(texts: Path, num_workers: int) -> None:
    batches = list(loader_of(texts, num_workers=num_workers))
    assert counted(batches) == every_token()
    lane = [row for batch in batches if batch.receipt.lane == 0 for row in batch["tokens"].tolist()]
    found = TOKENIZER.decode([token for row in lane for token in row], skip_special_tokens=False).split("<end>")
    documents = {one.lstrip() for one in found} - {""}  # padding stands behind the last one
    assert len(documents) > 20 and documents <= {one.lstrip() for one in TEXTS}


def test_each_token_counts_once_over_restarts_on_other_ranks_and_workers(texts: Path, job_store: Any) -> None:
    found, state = Counter[int](), None
    for world_size, workers, lanes, steps in ((1, 2, 2, 7), (2, 0, 2, 9), (3, 0, 3, 5), (1, 1, 3, None)):

        def make(rank: int) -> LakeLoader:
            return loader_of(texts, num_workers=workers, lanes=lanes, rank=rank, world_size=world_size)  # noqa: B023

        ran = run_loaders(make, world_size, state, steps)
        found += counted(batch for batches in ran.batches for batch in batches)
        state = ran.state
    assert found == every_token()


class Fast:
    """As Hugging Face's fast tokenizers are: called, it returns a mapping; ``encode`` sets truncation and padding anew
    and returns the tokens. (tests/frameworks has the real ones.)"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer

    def __call__(self, text: str) -> Any:
        raise AssertionError(f"{text:.20} is given to encode")

    def encode(self, text: str) -> list[int]:
        self.backend_tokenizer.no_truncation()
        return self.backend_tokenizer.encode(text).ids

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.backend_tokenizer.id_to_token(one) for one in ids]


class Slow:
    """As Hugging Face's slow tokenizers are: without a serialised form."""

    def __init__(self, added: int) -> None:
        self.added = added

    def __call__(self, text: str) -> Any:
        raise AssertionError(f"{text:.20} is given to encode")

    def encode(self, text: str) -> list[int]:
        return [self.added + ord(one) for one in text]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(one - self.added) for one in ids]


@functools.cache
def trained(size: int) -> Tokenizer:
    """A tokenizer of so many tokens, at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:100], trainer)
    return tokenizer


def of(texts: Path, tokenizer: Any, **given: Any) -> LakeLoader:
    dataset = LakeDataset(texts, batch_size=2, options=ReadOptions(num_lanes=2, **given.pop("read", {})))
    return LakeLoader(pack(dataset, length=64, column="text", tokenizer=tokenizer), **given)


@pytest.mark.parametrize("kind", [lambda one: one, Fast, lambda one: one.encode, lambda one: Fast(one).encode])
def test_tokenizers_are_taken_as_they_are_and_another_vocabulary_is_refused(texts: Path, kind: Any) -> None:
    first, other = trained(400), trained(401)
    loader = of(texts, kind(first))
    assert counted(loader) == Counter(token for text in TEXTS for token in first.encode(text).ids)
    state = loader.state_dict()
    again = Tokenizer.from_str(first.to_str())
    of(texts, kind(again)).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"differ in tokenizer: .* has the fingerprint 'form:") as caught:
        of(texts, kind(other)).load_state_dict(state)
    assert len(str(caught.value)) < 600
    of(texts, kind(other), read={"accept_changes": ["tokenizer"]}).load_state_dict(state)


def test_what_hugging_face_sets_at_each_call_is_no_part_of_the_fingerprint(texts: Path) -> None:
    tokenizer = Tokenizer.from_str(trained(400).to_str())
    state = of(texts, Fast(tokenizer)).state_dict()
    tokenizer.enable_truncation(5)
    of(texts, Fast(tokenizer)).load_state_dict(state)
    plain = of(texts, tokenizer).state_dict()
    tokenizer.no_truncation()
    with pytest.raises(StateMismatch, match="tokenizer: "):  # it would give other tokens
        of(texts, tokenizer).load_state_dict(plain)


def test_a_tokenizer_without_a_serialised_form_is_known_by_what_it_gives(texts: Path) -> None:
    state = of(texts, Slow(0)).state_dict()
    of(texts, Slow(0)).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"Slow' has the fingerprint 'rows:"):
        of(texts, Slow(1)).load_state_dict(state)


def test_tokenizers_go_to_workers_that_are_not_forked(texts: Path) -> None:
    loader = of(texts, trained(400), num_workers=1, multiprocessing_context="forkserver")
    assert counted(loader) == Counter(token for text in TEXTS for token in trained(400).encode(text).ids)
    copied = pickle.loads(pickle.dumps(of(texts, Fast(trained(400))).dataset))
    LakeLoader(copied).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("argument", ["tokenizer", "length", "column", "after", "padding", "labels", "documents"])
def test_no_error_holds_a_vocabulary(texts: Path, argument: str) -> None:
    wrong = trained(400) if argument != "tokenizer" else {str(one): one for one in range(10_000)}
    options = {"length": 8, "column": "text", "tokenizer": encode, argument: wrong}
    with pytest.raises((ConfigError, SchemaError)) as caught:
        pack(LakeDataset(texts, batch_size=2), **options)
    assert len(str(caught.value)) < 600
