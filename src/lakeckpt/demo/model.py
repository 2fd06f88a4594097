"""This module defines the model that the demo trains: a small GPT over bytes.

A token attends to the earlier tokens of its own document. The output is tied to the embedding on purpose, because a
checkpoint must store a tied tensor once. No random number is drawn after `build`.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakeckpt import Batch
from lakeckpt.demo.scenario import LENGTH

__all__ = ["GPT", "build", "digest", "loss_sum"]

_VOCABULARY, _WIDTH, _HEADS, _LAYERS = 256, 64, 2, 2


class GPT(nn.Module):
    """Bytes, and places and documents as `lakeckpt.pack` numbers them: int[rows, LENGTH] each.

    Returns the scores of the next byte, float32[rows, LENGTH, 256].
    """

    later: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.place = nn.Embedding(LENGTH, _WIDTH)
        block = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, _LAYERS, nn.LayerNorm(_WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, text: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        hidden = self.later | (documents[:, :, None] != documents[:, None, :])
        x = self.embed(text) + self.place(places)
        return self.head(self.blocks(x, mask=hidden.repeat_interleave(_HEADS, 0), is_causal=False))  # type: ignore[no-any-return]


def build(seed: int) -> GPT:
    """Return the model with weights that follow from ``seed`` alone."""
    torch.manual_seed(seed)
    model = GPT()
    for table in (model.embed, model.place):
        nn.init.normal_(table.weight, std=0.02)
    return model


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a packed batch with labels, summed over its tokens (nats)."""
    scores = model(batch["tokens"] & 0xFF, batch["position_ids"], batch["document_ids"])
    labels = batch["labels"]
    targets = labels.where(labels < 0, labels & 0xFF)  # the end of a document has no next token: a negative label
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")


def digest(model: nn.Module) -> str:
    """Return a digest of the weights, which is equal only if the weights are bitwise equal."""
    total = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        total.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        total.update(value.numpy().tobytes())
    return total.hexdigest()
