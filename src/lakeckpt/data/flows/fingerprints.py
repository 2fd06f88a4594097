"""This module takes fingerprints of tokenizers and transforms, by which a restart knows another one.

A tokenizer that can be serialised has the digest of its serialised form. Everything else has the digest of what it
makes of a few rows of the table: of numbers, texts and integer arrays the values, of arrays of floats only dtype and
shape, because their last bits differ between processors. Users of the README meet it: the name of a tokenizer stays
when its vocabulary changes, and a state then names tokens that are others. The module starts no threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

__all__ = ["encoder_of", "form_of", "rows_digest"]

_ENOUGH = 256
"""Items of which a digest is made, at least, if the rows have as many."""


def encoder_of(tokenizer: Any) -> Callable[[str], Any] | None:
    """Return what gives the tokens of a text: ``encode`` of a tokenizer of the ``tokenizers`` library, of Hugging Face
    and of others that cannot be called themselves; else ``tokenizer`` itself. None if it is neither."""
    if not callable(tokenizer) or hasattr(tokenizer, "convert_ids_to_tokens"):
        found = getattr(tokenizer, "encode", None)
        return found if callable(found) else None
    return tokenizer  # type: ignore[no-any-return]


def form_of(tokenizer: Any) -> str:
    """Return the fingerprint of the serialised form of ``tokenizer`` (or of the tokenizer that it is a method of);
    empty if it has none."""
    owner = getattr(tokenizer, "__self__", tokenizer)
    behind = getattr(owner, "backend_tokenizer", None)
    to_str = getattr(owner if behind is None else behind, "to_str", None)
    if not callable(to_str):
        return ""
    form = json.loads(to_str())
    if behind is not None:  # Hugging Face sets these two anew at each call
        form |= {"truncation": None, "padding": None}
    return f"form:{blake2b(json.dumps(form, sort_keys=True).encode(), digest_size=8).hexdigest()}"


def rows_digest(made: Iterable[Sequence[Any]]) -> str:
    """Return the fingerprint of the items that each row gives. Rows are taken until they gave 256 items."""
    digest, count = blake2b(digest_size=8), 0
    for items in made:
        _enter(digest, items)
        count += len(items)
        if count >= _ENOUGH:
            break
    return f"rows:{digest.hexdigest()}"


def _enter(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        floats = value.is_floating_point() or value.is_complex()
        value = f"{value.dtype}{tuple(value.shape)}" if floats else value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        exact = value.dtype.kind in "iubSUMm"
        digest.update(f"{value.dtype}{value.shape}".encode() + (value.tobytes() if exact else b""))
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"{name}:".encode())
            _enter(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} ".encode())
        for one in value:
            _enter(digest, one)
    else:
        is_exact = isinstance(value, str | bytes | int | bool)
        digest.update(f"{type(value).__name__} {value if is_exact else ''};".encode())
