"""This module finds the positions and the rows of a micro-batch at which a job dies, from a reader of this process.

The reader has loaded the state of a cut before the micro-batch. The plan of that state says which positions are dealt
to a rank in a step (`lakeckpt.checkpoint.consumed.exclusions.of_micro_batch`), and the table's index which rows these
are. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lakeckpt.checkpoint.consumed.exclusions import of_micro_batch
from lakeckpt.checkpoint.consumed.rows import GroupRows, RowOrder, name_rows, order_name
from lakeckpt.checkpoint.format.manifest import Exclusion
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import LakeckptError
from lakeckpt.recovery.faults import BatchAt
from lakeckpt.tracking.readers import tables_of, versions_of

__all__ = ["positions_at", "rows_of", "say_rows"]

_MOST_GROUPS = 8


def positions_at(
    objects: Mapping[str, Any], batch: BatchAt, *, attempt: int, step: int
) -> tuple[tuple[Exclusion, ...], str]:
    """Return what excludes a micro-batch, of which ``attempt`` died in optimizer step ``step``; or why the states of
    the readers among ``objects`` do not tell."""
    try:
        state = State.from_plain(objects[batch.reader].state_dict())
        if state.segment.world_size != batch.world:
            return (), f"the cut is of {state.segment.world_size} ranks, and the micro-batch is of {batch.world}"
        found = of_micro_batch(
            batch.reader,
            state,
            epoch=batch.epoch,
            loader_step=batch.step,
            rank=batch.rank,
            attempt=attempt,
            step=step,
        )
    except KeyError:
        return (), f"there is no reader {batch.reader!r} any more"
    except LakeckptError as error:
        return (), str(error)
    return found, ""


def rows_of(objects: Mapping[str, Any], positions: Iterable[Exclusion]) -> list[GroupRows]:
    """Return the rows at ``positions`` by file and row group."""
    found: list[GroupRows] = []
    for one in positions:
        reader = objects[one.reader]
        state = State.from_plain(reader.state_dict())
        if state.mixing is not None and one.source is not None:
            state = state.of(state.mixing.names.index(one.source))
        table = tables_of({"": reader})["" if one.source is None else f".{one.source}"]
        identity, key = state.order_of(one.epoch), Plan(state).layout(one.epoch)
        orders = [RowOrder(index, selection) for index, selection in versions_of(table)]
        for order in orders:
            selection = "" if order.selection is None else order.selection.digest
            if order_name(identity) != (f"{order.index.digest}/{selection}" if selection else order.index.digest):
                continue
            if order.unit > 1:
                found += order.tokens_of(order.layout(identity.spec, key, identity.endless), one.positions)
                continue
            rows = order.locate(identity.spec, key, one.positions).tolist()
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
