"""This module packs texts into sequences of tokens, which are made of each text where it is read.

The documents of a lane stand one after another, and are cut every ``length`` tokens. How many tokens a text has is
known only when its row is read, so the place of a lane is (row, token): a restart makes the tokens of the row that had
begun again, and skips those that were consumed. The tokenizer runs in the process that reads, and must be a pure
function of the text. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lakeckpt.core.identity import Maker
from lakeckpt.core.receipts import Span
from lakeckpt.core.state import State
from lakeckpt.core.streams.lane_batches import LaneBatch
from lakeckpt.data.base.transform import maker_of
from lakeckpt.data.flows.fingerprints import encoder_of, form_of
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.errors import ConfigError, SchemaError, shown
from lakeckpt.lake.table.schema import check_agreed
from lakeckpt.reading.columns.gather import cut
from lakeckpt.reading.columns.ragged import map_column
from lakeckpt.reading.packed.packing import COLUMNS
from lakeckpt.reading.packed.sequences import NO_LABEL, Sequences, with_ends

__all__ = ["TokenSource", "Tokenizing", "check_text", "given", "no_sequences"]

_MOST_TOKEN = 2**31

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizing:
    """How texts become tokens, and tokens sequences; picklable if the tokenizer is."""

    tokenizer: Any
    column: str
    length: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    padding: int = 0
    columns: tuple[str, ...] = COLUMNS[:4]
    """The columns of a batch, as in `lakeckpt.reading.packed.packing.Packing`."""

    def __post_init__(self) -> None:
        if encoder_of(self.tokenizer) is None or "<" in maker_of(self.tokenizer):
            raise ConfigError(
                "tokenizer= takes a tokenizer of the tokenizers library or of Hugging Face, or a function with a name, "
                f"from a text to its tokens, got {shown(self.tokenizer)}: a function's name is part of the state, so "
                "define it by def at the top of a module"
            )

    @property
    def maker(self) -> Maker:
        """The name of the tokenizer, how sequences are made of its tokens, and the digest of its serialised form."""
        added = f" between {self.before} and {self.after}" if self.before or self.after else ""
        how, form = f"tokens of {self.column!r}{added}", form_of(self.tokenizer)
        return Maker(name=maker_of(self.tokenizer), how=how, length=self.length, fingerprint=form)

    def tokens(self, text: str, where: str) -> Int32Array:
        """Return the tokens of a document: int32, shape (n,); none, and none added, for a text that yields none.

        Raises what the tokenizer does, with a note that says where; ConfigError if it returns no tokens.
        """
        try:
            found = encoder_of(self.tokenizer)(text)  # type: ignore[misc]
            ids = np.asarray(getattr(found, "ids", found))
            if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= _MOST_TOKEN):
                raise ConfigError(
                    f"the tokenizer returned {found!r:.80}: it returns a list or an array of tokens from 0 to 2**31 - 1"
                )
        except Exception as error:
            error.add_note(f"in the tokenizer, {where}")
            raise
        parts = (self.before, ids, self.after) if ids.size else ()
        return np.concatenate([np.asarray(part, np.int32) for part in (*parts, ())])


def check_text(schema: pa.Schema, column: str) -> None:
    """Raise `SchemaError` if ``column`` is no column of texts."""
    if column not in schema.names:
        raise SchemaError(f"the table has no column {shown(column)} to pack; it has {', '.join(schema.names[:10])}")
    check_agreed(schema, [column])
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise SchemaError(
            f"column {column!r} is {kind}, and a tokenizer needs texts: name a column of strings, column="
        )


class TokenSource(FlowSource):
    """A `FlowSource` whose items are tokens; its micro-batches are sequences."""

    @property
    def _tokenizing(self) -> Tokenizing:
        found: Any = self._transform
        assert isinstance(found, Tokenizing)
        return found

    @property
    def maker(self) -> Maker:
        """The tokenizer, and how sequences are made of its tokens."""
        return self._tokenizing.maker

    def items(self, columns: Any, row: int, span: Span) -> Sequence[Any]:
        """Return the tokens of row ``row`` of ``columns``, which stands at the position of ``span``."""
        tokenizing = self._tokenizing
        where = f"of the row at position {span.start} of epoch {span.epoch}"
        found: Any = tokenizing.tokens(columns[tokenizing.column][row], where)
        return found  # type: ignore[no-any-return]

    @property
    def items_of_row(self) -> int:
        """The tokens of a sequence."""
        return self._tokenizing.length

    def columns_of(self, made: LaneBatch) -> dict[str, Any] | None:
        """Return the tokens of a micro-batch as sequences; None where there are none."""
        return given(_sequences(made, self._tokenizing), self.output) if made.count else None

    def empty(self, state: State) -> dict[str, Any]:
        """Return the columns of a batch without sequences."""
        tokenizing = self._tokenizing
        return given(no_sequences(tokenizing.length, tokenizing.columns), self.output)


def given(columns: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Return arrays as what ``output`` says: "torch" makes tensors of them."""
    return {name: map_column(one, torch.from_numpy) if output == "torch" else one for name, one in columns.items()}


def no_sequences(length: int, columns: Sequence[str], *, dtype: Any = np.int32) -> dict[str, npt.NDArray[Any]]:
    """Return the ``columns`` of a batch without sequences, whose tokens are of ``dtype``."""
    nothing = np.arange(0)
    found = Sequences(np.zeros((0, length), dtype), np.zeros(1, np.int64), paddings=nothing, follows=nothing)
    return with_ends(cut(found.columns(columns), 0, 0, lambda array: array))


def _sequences(made: LaneBatch, tokenizing: Tokenizing) -> dict[str, Any]:
    """Return the pieces of documents in ``made``, one after another, cut into sequences; padding is one more piece.

    ``cu_seqlens`` has the lengths of the pieces in each sequence.
    """
    length, count = tokenizing.length, made.count
    rows = -(-count // length)
    padding = np.full(rows * length - count, tokenizing.padding)
    tokens = np.concatenate([*(ids[start:stop] for ids, start, stop in made.pieces), padding]).astype(np.int32)
    ends = np.cumsum([stop - start for _, start, stop in made.pieces])
    bounds = np.union1d(np.append(ends, 0), np.arange(rows + 1) * length)
    follows = None
    if "labels" in tokenizing.columns:
        labels = np.concatenate([*(_labels(*piece) for piece in made.pieces), np.full(len(padding), NO_LABEL)])
        follows = labels[bounds[1:] - 1]
    paddings = np.searchsorted(bounds, [count] * (len(padding) > 0))
    found = Sequences(tokens.reshape(rows, length), bounds, paddings=paddings, follows=follows)
    return cut(found.columns(tokenizing.columns), 0, rows, lambda array: array)


def _labels(ids: Any, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return the next token of the document for each of its tokens [start, stop); none for its last one."""
    following = np.append(ids[start + 1 : stop + 1], [] if stop < len(ids) else [NO_LABEL])
    return following.astype(np.int64)
