"""Which model does the demo train? A small GPT over bytes: enough to learn, small enough for two CPU cores.

How: pre-norm blocks of causal attention and a GELU layer, learned places, the output tied to the embedding (a tied
tensor on purpose: a checkpoint must store it once). Each row is cropped in the loader's workers, at a place that
follows from the seed that the loader gives each row, so the same rows give the same batch on every topology.

Never: it draws no random number after `build`, and holds nothing that is not a parameter or a buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakeckpt import Batch, TransformContext

__all__ = ["GPT", "Crop", "ModelShape", "build", "crop", "digest", "loss_sum"]

_VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of the model; ``context`` is in bytes of text."""

    width: int = 64
    heads: int = 2
    layers: int = 2
    context: int = 64

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width} and heads={self.heads}")

    def to_plain(self) -> dict[str, int]:
        return asdict(self)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = F.gelu(self.up(self.before_mlp(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """int64[rows, length] bytes in, float32[rows, length, 256] scores of the next byte out."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def build(shape: ModelShape, seed: int) -> GPT:
    """The model with weights that follow from ``seed`` alone."""
    torch.manual_seed(seed)
    model = GPT(shape)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.head:  # the head is the embedding, set below
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for table in (model.embed, model.place):
        nn.init.normal_(table.weight, std=0.02)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """A transform: of each row's ``tokens``, uint8[rows, block], keep a ``stretch``, int64[rows, length + 1].

    Its place is random, and follows from the loader's seed of the row: the same on every topology, after every restore.
    """

    length: int

    def __call__(self, batch: Batch, context: TransformContext) -> Batch:
        batch["stretch"] = crop(batch.pop("tokens"), context.row_seeds, self.length)
        return batch


def crop(tokens: Tensor, seeds: npt.NDArray[np.uint64], length: int) -> Tensor:
    """uint8[rows, block] → int64[rows, length + 1], from the place that each row's seed (uint64[rows]) says."""
    room = tokens.shape[1] - length
    start = torch.from_numpy((seeds % np.uint64(room)).astype(np.int64))
    return tokens.gather(1, start[:, None] + torch.arange(length + 1)).long()


def loss_sum(model: nn.Module, stretch: Tensor) -> Tensor:
    """The loss summed over rows, each row's loss being the mean over its bytes (nats); 0 rows give 0."""
    scores = model(stretch[:, :-1])
    each = F.cross_entropy(scores.flatten(0, 1), stretch[:, 1:].flatten(), reduction="sum")
    return each / (stretch.shape[1] - 1)


def digest(state: Mapping[str, object]) -> str:
    """A digest of every tensor in a state dict, by name, type, shape and bytes: equal only when bitwise equal."""
    total = hashlib.blake2b(digest_size=16)
    for name, value in sorted(_leaves(state)):
        total.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        total.update(value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _leaves(value: object, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}/{key}")]
    if isinstance(value, (list, tuple)):
        return [leaf for number, item in enumerate(value) for leaf in _leaves(item, f"{path}/{number}")]
    return []
