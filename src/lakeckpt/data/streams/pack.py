"""This module defines `lakeckpt.pack`: the documents of a table, packed into sequences of equal length.

A position of a packed dataset is a sequence, so that lanes, steps, states and the audit count sequences. Everything
else is as in `lakeckpt.LakeDataset`. The module reads nothing and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from lakeckpt.data.base.options import flag, one_of, positive
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.flows.tokens import Tokenizing, check_text
from lakeckpt.errors import ConfigError, shown
from lakeckpt.reading.packed.packing import COLUMNS, DTYPES, Packing

__all__ = ["cumulative_lengths", "pack"]

_MOST = 1 << 24
"""The longest sequence, in tokens."""


def pack(
    dataset: LakeDataset,
    *,
    length: int,
    column: str = "tokens",
    before: int | Sequence[int] | None = None,
    after: int | Sequence[int] | None = None,
    labels: bool = False,
    mask_ends: bool = True,
    padding: int = 0,
    columns: Sequence[str] | None = None,
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None,
    tokenizer: Any = None,
    documents: Literal["cut", "whole"] = "cut",
    too_long: Literal["cut", "drop"] = "cut",
) -> LakeDataset:
    """Return a dataset of sequences of ``length`` tokens, made of the documents that ``dataset`` reads.

    A document is one row of the list column ``column``. The documents of an epoch stand one after another, and are cut
    every ``length`` tokens: each token is in exactly one sequence, and only the last sequence of an epoch is padded.
    With ``shuffle``, documents are permuted within each window of row groups, and the sequences of the window again, so
    that a long document does not fill a batch. A document is cut where a sequence ends, where a window ends, and where
    a lane ends. A micro-batch has the ``batch_size`` of ``dataset``, in sequences, and holds

    * ``tokens``: int32, or int64 if the column's type needs it, shape (batch, length);
    * ``position_ids``: int32, the place of a token in its document, counted from 0 anew in each sequence;
    * ``document_ids``: int32, the number of a token's document within its sequence, counted from 0;
    * ``loss_mask``: bool, False for padding;
    * ``labels`` (with ``labels=True``): int64, the next token of the document, also if a sequence
      or a lane cuts it; -100, torch's ``ignore_index``, for padding;
    * ``cu_seqlens`` (if ``columns`` names it): where the documents begin, if the sequences of the batch stand one after
      another, and their end: int32, shape (documents + 1,), as ``flash_attn_varlen_func`` takes it. A sequence begins a
      document, and padding counts as one.

    Args:
        dataset: a `LakeDataset` with a ``batch_size``. It is left as it is. Its ``columns`` do not count; its filter,
            transform (of packed batches) and options do.
        length: tokens of a sequence, at least 2.
        column: the column that holds a document's tokens: lists of integers, or with ``dtype`` their bytes. Empty rows
            and nulls are documents without tokens. A null token is refused, `NullValueError`, when its row group is
            read.
        before, after: tokens that are put before and after each document that has tokens, such as the ids of
            beginning and end of a text.
        labels: deliver ``labels``.
        mask_ends: the last token of a document has the label -100. False: its label is the next token of its sequence;
            of a sequence's last token, the first token of the document that follows in the row group, if any.
        padding: the token that fills up the last sequence of an epoch.
        columns: which of the columns above a batch has, ``"tokens"`` among them. None: the first four, and ``labels``
            with ``labels=True``. Fewer columns are read faster: varlen attention needs ``tokens`` and ``cu_seqlens``.
        dtype: ``column`` is of bytes (binary, large or of fixed size), which are little-endian integers of this type.
            They decode several times as fast as lists. Tokens come as int32 (uint16, int32) or int64 (uint32, int64). A
            row that is no whole number of tokens is refused by file and row, `DataFileDamaged`, when it is read.
        tokenizer: a ``tokenizers.Tokenizer`` or a tokenizer of Hugging Face (whose ``encode`` gives the tokens, with
            those that it adds itself), or a function with a name, from a text to its tokens: a list, an array, or what
            has them as ``ids``. ``column`` is of texts then, whose tokens are made where they are read. A state has
            its fingerprint, and another one is refused: the digest of its serialised form, or of what it makes of a
            few rows.
        documents: ``"cut"``: as above. ``"whole"``: no document is cut that fits into a sequence. The documents of each
            window are given to sequences by best fit decreasing, and what is left of each sequence is padding.
        too_long: with ``documents="whole"``: documents longer than ``length`` (with ``before`` and ``after``) are cut
            every ``length`` tokens, or dropped. How many are dropped of each window is logged, as "lakeckpt", at INFO.

    With ``documents="whole"``, consumption depends on the documents' lengths, as with ``LakeDataset(…, rows="many")``:
    the state has a place (window, sequence) for each lane, and ranks agree on the end of an epoch. Lanes consist of
    whole row groups, and the last batch of each lane may be smaller. Refused are ``mask_ends=False``, a ``tokenizer=``,
    and of the dataset ``transform=``, ``drop_last`` and ``consumed=``.

    With a ``tokenizer``, consumption depends on the data, as with ``LakeDataset(…, rows="many")``: the state has a
    place (row, token) for each lane, ranks agree on the end of an epoch, and ``receipt.rows`` counts tokens. Documents
    are permuted, sequences are not, so a long document may fill a batch. The last sequence of each lane is padded. A
    batch has int32 tokens; ``mask_ends=False``, and a ``transform=`` of the dataset, are refused.

    Without one, how many tokens a row group has is read from its footer; data are read for it only where rows are
    deleted or filtered, or the footer has no statistics. Of bytes, the integer column ``num_tokens`` of the table has
    the tokens of each row, if there is one; else the bytes are read once. A run keeps the counts. Raises
    `ConfigError`, `SchemaError`.
    """
    _check(dataset, length)
    one_of("documents", documents, ("cut", "whole"))
    one_of("too_long", too_long, ("cut", "drop"))
    if dtype is not None:
        one_of("dtype", dtype, DTYPES)
    if documents == "cut" and too_long == "drop":
        raise ConfigError('too_long="drop" is of whole documents: give documents="whole", too')
    packing = Packing(
        column=column,
        length=length,
        before=_tokens("before", before),
        after=_tokens("after", after),
        columns=_columns(columns, labels=flag("labels", labels)),
        dtype=dtype,
        masks_ends=flag("mask_ends", mask_ends),
        padding=_token(padding),
        whole=documents == "whole",
        drops_long=too_long == "drop",
    )
    if tokenizer is None and not packing.whole:
        pinned = replace(dataset._versions.at_hand, columns=[column], packing=packing)
        return dataset._remade(pinned, dataset._source.transform)
    if tokenizer is not None and dtype is not None:
        raise ConfigError("dtype= is of a column of bytes, and tokenizer= takes a column of texts: leave one out")
    name = 'documents="whole"' if packing.whole else "a tokenizer="
    if not mask_ends:
        raise ConfigError(f"with {name}, the last token of a document has no label: leave mask_ends=True")
    if tokenizer is None:
        return _whole_documents(dataset, packing)
    if packing.whole:
        raise ConfigError('documents="whole" needs tokens, and tokenizer= makes them of texts: make them in advance')
    return _tokenized(dataset, _tokenizing(packing, tokenizer))


def _check(dataset: Any, length: Any) -> None:
    """Raise `ConfigError` where ``dataset`` cannot be packed into sequences of ``length`` tokens."""
    if hasattr(dataset, "sources"):
        raise ConfigError("pack takes one dataset, and this is a mixture: pack its sources, and mix them then")
    if not isinstance(dataset, LakeDataset):
        raise ConfigError(f"pack takes a lakeckpt.LakeDataset, got {type(dataset).__name__}")
    dataset._check_not_followed()
    if dataset.yields_many:
        raise ConfigError('pack takes documents as rows of a table, and this dataset has a transform with rows="many"')
    if dataset.row_wise:
        raise ConfigError("packed sequences come in micro-batches: give the dataset a batch_size, in sequences")
    if dataset.output == "arrow":
        raise ConfigError('packed sequences are tensors or arrays: give the dataset output="torch" or "numpy"')
    if not 2 <= positive("length", length) <= _MOST:
        raise ConfigError(f"length must be at least 2 (a token, and the next one) and at most {_MOST}, got {length}")


def _tokenizing(packing: Packing, tokenizer: Any) -> Tokenizing:
    return Tokenizing(
        tokenizer=tokenizer,
        column=packing.column,
        length=packing.length,
        before=packing.before,
        after=packing.after,
        columns=packing.columns,
        padding=packing.padding,
    )


def _tokenized(dataset: LakeDataset, tokenizing: Tokenizing) -> LakeDataset:
    """Return a dataset of sequences of tokens of the texts that ``dataset`` reads. `ConfigError`, `SchemaError`."""
    pinned = dataset._versions.at_hand
    check_text(pinned.table.schema, tokenizing.column)
    if dataset.has_transform or dataset.options.text != "str":
        raise ConfigError('pack with a tokenizer= needs a dataset without transform=, and ReadOptions(text="str")')
    return dataset._remade(replace(pinned, columns=[tokenizing.column]), tokenizing, many='rows="many"')


def _whole_documents(dataset: LakeDataset, packing: Packing) -> LakeDataset:
    """Return a dataset of sequences of whole documents that ``dataset`` reads. `ConfigError`, `SchemaError`."""
    if dataset.has_transform:
        raise ConfigError(
            'documents="whole" needs a dataset without transform=: a state would not say what was made of a sequence'
        )
    pinned = replace(dataset._versions.at_hand, columns=[packing.column], packing=packing)
    return dataset._remade(pinned, None, many='documents="whole"')


def _columns(columns: Any, *, labels: bool) -> tuple[str, ...]:
    """Return the names of a batch's columns, checked."""
    if columns is None:
        return COLUMNS[: 5 if labels else 4]
    found = () if isinstance(columns, str) or not isinstance(columns, Iterable) else tuple(columns)
    if "tokens" not in found or len(set(found)) < len(found) or not set(found) <= set(COLUMNS):
        raise ConfigError(
            f"columns takes a list of some of {', '.join(COLUMNS)}, each once, and 'tokens' among them, got "
            f"{shown(columns)}"
        )
    if labels and "labels" not in found:
        raise ConfigError(f"labels=True, and columns={list(found)} does not name 'labels': name it, or leave one out")
    return found


def _tokens(name: str, tokens: int | Sequence[int] | None) -> tuple[int, ...]:
    found = () if tokens is None else tuple(tokens) if isinstance(tokens, Iterable) else (tokens,)
    if any(not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < 2**31 for one in found):
        raise ConfigError(f"{name} takes tokens from 0 to 2**31 - 1, got {shown(tokens)}")
    return found


def _token(padding: int) -> int:
    if not isinstance(padding, int) or len(found := _tokens("padding", padding)) != 1:
        raise ConfigError(f"padding takes a token from 0 to 2**31 - 1, got {shown(padding)}")
    return found[0]


def cumulative_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where the documents of a packed batch begin, and its end: int32, shape (documents + 1,).

    ``position_ids`` is the column of a batch, shape (batch, length); sequences count as if they stood one after
    another. It is ``cu_seqlens`` of flash-attention's ``flash_attn_varlen_func``.

    >>> cumulative_lengths(torch.tensor([[0, 1, 0], [0, 1, 2]])).tolist()
    [0, 2, 3, 6]
    """
    begins = (position_ids.reshape(-1) == 0).nonzero().reshape(-1).to(torch.int32)
    return torch.cat([begins, begins.new_tensor([position_ids.numel()])])
