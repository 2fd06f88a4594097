"""A tokenizer of Hugging Face is taken as it is, and a run goes on with the same one only."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import LakeDataset, LakeLoader, pack
from lakeckpt.errors import ConfigError, StateMismatch

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [f"text {number} of {'x' * (number % 7)}" for number in range(60)]


def loader_of(folder: Path, tokenizer: Any) -> LakeLoader:
    return LakeLoader(pack(LakeDataset(folder, batch_size=2), length=16, column="text", tokenizer=tokenizer))


def test_a_hugging_face_tokenizer_is_taken_as_it_is_and_known_again(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=200, show_progress=False))
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    loader = loader_of(tmp_path, own)
    tokens = [token for batch in loader for token in batch["tokens"][batch["loss_mask"]].tolist()]
    assert sorted(tokens) == sorted(token for text in TEXTS for token in own.encode(text))
    state = loader.state_dict()
    own(TEXTS[0], truncation=True, max_length=3)  # which the tokenizer behind it remembers
    for same in (own, pickle.loads(pickle.dumps(own)), own.encode):
        loader_of(tmp_path, same).load_state_dict(state)
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    other.add_tokens(["text 3"])
    with pytest.raises(StateMismatch, match="differ in tokenizer: ") as caught:
        loader_of(tmp_path, other).load_state_dict(state)
    assert len(str(caught.value)) < 600
    with pytest.raises(ConfigError, match="length must be a positive integer") as wrong:
        pack(LakeDataset(tmp_path, batch_size=2), length=own, column="text", tokenizer=own)
    assert len(str(wrong.value)) < 600
