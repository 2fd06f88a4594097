"""This module checks that each tranche of a growing table has the rows that the tranche before it left, and new files.

A tranche is recorded as an epoch over a table index of its own (`lakeckpt.data.position.following`). The account of an
epoch shows that its rows were consumed once, or left. Here the rows that are left are compared with the next index:
they must be exactly the rows that it has of files of earlier tranches. The other files must be new. If a filter
drops rows of a row group, rows can only be counted.

The module is pure. It never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lakeckpt.checkpoint.consumed.rows import GroupRows, RowOrder, name_rows, order_name
from lakeckpt.core.consumption import consumed
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State

__all__ = ["doubts_of_tranches"]

_Rows = dict[tuple[str, int], GroupRows]
"""(file, row group in it) → rows."""


def doubts_of_tranches(ends: Mapping[int, State], orders: Mapping[str, RowOrder]) -> Iterator[str]:
    """Yield what is wrong between the tranches whose last states are ``ends``, by epoch. Other epochs are skipped.

    ``orders`` has the orders of the tables by `order_name`; a table that is missing is doubted elsewhere.
    """
    known: set[str] = set()
    before: tuple[State, RowOrder] | None = None
    for epoch, state in sorted(ends.items()):
        order = orders.get(order_name(state.identity))
        if order is None:
            return
        if before is not None:
            yield from (f"tranche {epoch}: {text}" for text in _compared(_left(*before), before[1], order, known))
        if before is not None or state.identity.tail == "carry":
            known.update(order.index.paths)
            before = state, order


def _left(state: State, order: RowOrder) -> _Rows:
    """Return the rows of the tranche of ``state`` that are not consumed."""
    positions = Intervals.whole(state.identity.rows)
    positions = positions.difference(consumed(state).get(state.epoch, Intervals.empty()))
    return _by_group(order, order.table_rows(state.identity.spec, Plan(state).layout(state.epoch), positions))


def _by_group(order: RowOrder, rows: Intervals) -> _Rows:
    return {(one.file, one.row_group): one for one in name_rows(order, rows)}


def _compared(left: _Rows, before: RowOrder, order: RowOrder, known: set[str]) -> Iterator[str]:
    index, files = order.index, {path: file for file, path in enumerate(before.index.paths)}
    again: _Rows = {}
    for file, path in enumerate(index.paths):
        if path not in known:
            continue
        first, stop = (int(order.starts[one]) for one in index.first_group[file : file + 2])
        again |= _by_group(order, Intervals.of([(first, stop)]))
        if path in files and index.footer_digest(file) != before.index.footer_digest(files[path]):
            yield f"the file {path!r} is not the one that was read before"
    lost = sum(_size(one, again.get(place)) for place, one in left.items())
    repeated = sum(_size(one, left.get(place)) for place, one in again.items())
    if lost:
        yield f"{lost:,} rows that were left before are not part of it"
    if repeated:
        yield f"{repeated:,} rows that had been consumed before are part of it"


def _size(rows: GroupRows, others: GroupRows | None) -> int:
    """Return how many of ``rows`` are not among ``others``."""
    if others is None:
        return rows.rows.size
    if rows.stored and others.stored:
        return rows.rows.difference(others.rows).size
    return max(0, rows.rows.size - others.rows.size)
