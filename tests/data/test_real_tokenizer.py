"""Texts become tokens by the `tokenizers` library, in workers and in process, and each token counts once."""

from __future__ import annotations

import os
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
