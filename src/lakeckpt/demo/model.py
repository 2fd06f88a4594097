"""This module defines the model that the demo trains: a small GPT over bytes.

The output is tied to the embedding on purpose, because a checkpoint must store a tied tensor once. Each row is cropped
in the loader's workers, at a place that follows from the seed that the loader gives the row, so the same rows give the
same batch on every topology. No random number is drawn after `build`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakeckpt import Batch, TransformContext

__all__ = ["CONTEXT", "GPT", "Crop", "build", "digest", "loss_sum"]

CONTEXT = 64
"""Bytes of text that the model sees."""
_VOCABULARY, _WIDTH, _HEADS, _LAYERS = 256, 64, 2, 2


class GPT(nn.Module):
    """int64[rows, length] bytes in, float32[rows, length, 256] scores of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.place = nn.Embedding(CONTEXT, _WIDTH)
        block = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, _LAYERS, nn.LayerNorm(_WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(tokens) + self.place.weight[:length]
        return self.head(self.blocks(x, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def build(seed: int) -> GPT:
    """Return the model with weights that follow from ``seed`` alone."""
    torch.manual_seed(seed)
    model = GPT()
    for table in (model.embed, model.place):
        nn.init.normal_(table.weight, std=0.02)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """A transform that replaces ``tokens``, uint8[rows, block], by a ``stretch`` of it, int64[rows, length + 1].

    The place of the stretch follows from the loader's seed of the row: the same on every topology, after every restore.
    """

    length: int

    def __call__(self, batch: Batch, context: TransformContext) -> Batch:
        tokens = batch.pop("tokens")
        room = tokens.shape[1] - self.length
        start = torch.from_numpy((context.row_seeds % np.uint64(room)).astype(np.int64))
        batch["stretch"] = tokens.gather(1, start[:, None] + torch.arange(self.length + 1)).long()
        return batch


def loss_sum(model: nn.Module, stretch: Tensor) -> Tensor:
    """Return the loss summed over rows; the loss of a row is the mean over its bytes (nats). 0 rows give 0."""
    scores = model(stretch[:, :-1])
    each = F.cross_entropy(scores.flatten(0, 1), stretch[:, 1:].flatten(), reduction="sum")
    return each / (stretch.shape[1] - 1)


def digest(model: nn.Module) -> str:
    """Return a digest of the weights, which is equal only where the weights are bitwise equal."""
    total = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        total.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        total.update(value.numpy().tobytes())
    return total.hexdigest()
