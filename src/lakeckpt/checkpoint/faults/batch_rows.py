"""This module names the rows of a micro-batch that a live reader would read: those at which a job dies.

The reader has loaded the state of a cut before the micro-batch. The plan of that state says which positions are dealt
to a rank in a step, as `lakeckpt.checkpoint.ledger.explain` finds them. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lakeckpt.checkpoint.consumed.rows import GroupRows, RowOrder, name_rows, order_name
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State, depends_on_data
from lakeckpt.errors import LakeckptError
from lakeckpt.recovery.faults import BatchAt
from lakeckpt.tracking.readers import tables_of, versions_of

__all__ = ["rows_at", "say_rows"]

_MOST_GROUPS = 8


def rows_at(objects: Mapping[str, Any], batch: BatchAt) -> list[GroupRows]:
    """Return the rows of a micro-batch by file and row group; none if the readers' states do not tell them: a
    micro-batch of a later epoch, or of a reader whose consumption depends on the data."""
    reader = objects.get(batch.reader)
    try:
        plain = None if reader is None else reader.state_dict()
        if plain is None or depends_on_data(plain):
            return []
        state = State.from_plain(plain)
        if state.epoch != batch.epoch:
            return []
        if state.mixing is None:
            return _rows(state, reader, batch)
        tables = tables_of({"": reader})
        every = zip(range(len(state.mixing.names)), tables.values(), strict=True)
        return [row for at, table in every for row in _rows(state.of(at), table, batch)]
    except (LakeckptError, ValueError, AttributeError):
        return []


def _rows(state: State, reader: object, batch: BatchAt) -> list[GroupRows]:
    plan = Plan(state)
    assignment = plan.assignment(batch.step, batch.rank)
    keys = {key.epoch: key for key in assignment.layouts}
    receipt: Receipt = assignment.receipt
    found: list[GroupRows] = []
    for span in receipt.spans:
        identity = plan.state.order_of(span.epoch)
        for index, selection in versions_of(reader):
            order = RowOrder(index, selection)
            if order_name(identity) != (f"{index.digest}/{selection.digest}" if selection else index.digest):
                continue
            where = Intervals.of([(span.start, span.stop)])
            if order.unit > 1:
                found += order.tokens_of(order.layout(identity.spec, keys[span.epoch], identity.endless), where)
                continue
            rows = order.locate(identity.spec, keys[span.epoch], where).tolist()
            found += name_rows(order, Intervals.of(sorted((row, row + 1) for row in rows)))
    return found


def say_rows(found: Sequence[GroupRows]) -> str:
    """Return the names of rows for people, one line for each row group."""
    lines = [
        f"\n  {one.file}, row group {one.row_group}: rows "
        f"{', '.join(str(low) if high == low + 1 else f'{low}-{high - 1}' for low, high in one.rows.pairs())}"
        f"{one.how_counted}"
        for one in found[:_MOST_GROUPS]
    ]
    return "".join(lines) + (f"\n  and {len(found) - _MOST_GROUPS} more row groups" if len(found) > len(lines) else "")
