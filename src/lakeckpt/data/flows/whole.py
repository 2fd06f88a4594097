"""This module reads whole documents, packed into sequences, as a flow.

A position is a row group, and the first row group of a window yields the sequences of the whole window
(`lakeckpt.reading.packed.whole`). How many these are depends on the lengths of its documents, so the place of a lane is
(window, sequence). The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakeckpt.core.identity import Identity, Maker
from lakeckpt.core.receipts import Span
from lakeckpt.core.state import State
from lakeckpt.core.streams.lane_batches import LaneBatch
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.flows.tokens import given, no_sequences
from lakeckpt.reading.columns.gather import cut, join_rows
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.whole import COLUMN

__all__ = ["WholeSource"]


class WholeSource(FlowSource):
    """A `FlowSource` whose items are sequences of whole documents."""

    block = 1

    @property
    def _packing(self) -> Packing:
        assert self._selecting is not None and self._selecting.packing is not None
        return self._selecting.packing

    @property
    def maker(self) -> Maker:
        """How documents are packed."""
        return Maker(name="", how=str(self._packing), length=self._packing.length)

    def fingerprint(self, identity: Identity) -> str:
        """None is needed: nothing of a user's makes the sequences."""
        return ""

    def items(self, columns: Any, row: int, span: Span) -> Sequence[Any]:
        """Return the sequences of row ``row`` of ``columns``: of a window, or none."""
        found: Sequence[Any] = columns[COLUMN][row]
        return found

    def columns_of(self, made: LaneBatch) -> dict[str, Any] | None:
        """Return the sequences of a micro-batch; None if there are none."""
        names = self._packing.columns
        cuts: Any = [cut(window.columns(names), start, stop, _as_it_is) for window, start, stop in _windows(made)]
        columns: Any = join_rows(cuts) if cuts else None
        return None if columns is None else given(columns, self.output)

    def empty(self, state: State) -> dict[str, Any]:
        """Return the columns of a batch without sequences."""
        packing = self._packing
        dtype = packing.dtype_in(self._table.schema)
        return given(no_sequences(packing.length, packing.columns, dtype=dtype), self.output)


def _windows(made: LaneBatch) -> Any:
    return made.pieces


def _as_it_is(array: Any) -> Any:
    return array
