"""This module reads rows that hold the tokens of a document, as a flow whose items are tokens.

A packed mixture (`lakeckpt.data.streams.packed_mixture`) reads each of its sources so, and makes sequences of their
documents. How many tokens a document has is known only when its row is read, so the place of a lane is (row, token).
The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.core.identity import Identity, Maker
from lakeckpt.core.receipts import Span
from lakeckpt.core.streams.lane_batches import LaneBatch
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.source import Output
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.flows.tokens import given, sequences_of
from lakeckpt.errors import DataFileDamaged, NullValueError
from lakeckpt.reading.packed.documents import documents_of
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.token_counts import place_of
from lakeckpt.reading.windows.positions import Opened, PositionReader

__all__ = ["DocumentSource"]


class DocumentSource(FlowSource):
    """A `FlowSource` whose items are tokens that rows hold; its micro-batches are sequences. Its transform is the
    `Packing`."""

    block = 64

    def __init__(self, pinned: Pinned, *, output: Output, **given: Any) -> None:
        super().__init__(pinned, output="arrow", **given)
        self._delivers: Output = output

    @property
    def _packing(self) -> Packing:
        found: Any = self._transform
        assert isinstance(found, Packing)
        return found

    @property
    def maker(self) -> Maker:
        """How sequences are made of documents."""
        packing = self._packing
        kind = "" if packing.dtype is None else f" as {packing.dtype}"
        added = f" between {packing.before} and {packing.after}" if packing.added else ""
        return Maker(name="documents", how=f"tokens of {packing.column!r}{kind}{added}", length=packing.length)

    def fingerprint(self, identity: Identity) -> str:
        """None is needed: nothing of a user's makes the tokens."""
        return ""

    def columns(self, reader: PositionReader, opened: Opened, *, raw: bool = False) -> Any:
        """Return the tokens of each row that ``reader`` has opened."""
        table = super().columns(reader, opened, raw=raw)
        try:
            found = documents_of(table, self._packing, ("", 0))
        except (NullValueError, DataFileDamaged):
            self._name_row(table, opened)
            raise
        items = [found.tokens[:0]] * table.num_rows
        for row, start, stop in zip(found.rows.tolist(), found.ends[:-1], found.ends[1:], strict=True):
            items[row] = found.tokens[start:stop]
        return items

    def _name_row(self, table: pa.Table, opened: Opened) -> None:
        """Raise the error of the first row of ``table`` that has one, with the row's file and row group."""
        at = 0
        for window, start, stop in opened.parts:
            positions = window.window.start + np.arange(start, stop, dtype=np.int64)
            for group, row in zip(*(one.tolist() for one in window.layout.locate(positions)), strict=True):
                place = place_of(self._table.index, group)
                documents_of(table.slice(at, 1), self._packing, place, first=row)
                at += 1

    def items(self, columns: Any, row: int, span: Span) -> Sequence[Any]:
        """Return the tokens of row ``row`` of ``columns``."""
        found: Sequence[Any] = columns[row]
        return found

    @property
    def items_of_row(self) -> int:
        """The tokens of a sequence."""
        return self._packing.length

    def columns_of(self, made: LaneBatch) -> dict[str, Any] | None:
        """Return the tokens of a micro-batch as sequences; None where there are none."""
        dtype = self._packing.dtype_in(self._table.schema)
        return given(sequences_of(made, self._packing, dtype), self._delivers) if made.count else None
