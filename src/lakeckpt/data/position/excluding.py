"""This module finds what a reader excludes if a table goes on without some of its row groups in mid-epoch.

Rows of one window cannot be told apart without reading it: its documents, or rows, are permuted together. So what is
left of each window that holds such a row group is excluded, in the epochs that have begun. Epochs that begin later are
laid out without these row groups. The module reads no rows, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left
from lakeckpt.core.order import EpochLayout
from lakeckpt.core.plan import LayoutKey, Plan
from lakeckpt.core.state import State
from lakeckpt.data.base.identity import Pinned

__all__ = ["going_on_without"]


def going_on_without(
    state: State, pinned: Pinned, at: Callable[[Identity], Pinned]
) -> tuple[Identity, dict[int, Intervals]]:
    """Return the order of epochs that begin after ``state``, and epoch → the positions that are excluded of the others.

    ``pinned`` is the version of the state without the row groups that are excluded now. ``at`` returns the version that
    an order of the state is of.
    """
    its = state.identity
    order = _order_without(its, at(its), pinned)
    if state.is_start:
        return order, {}
    rest = Plan(state).left
    excluded = {left.epoch: _in_windows(left, state.order_of(left.epoch), pinned, at) for left in rest.begun}
    if its.endless and its.unit > 1:
        # The last sequence of an epoch has the first tokens of the next epoch.
        taken = _layout(at(its), its, rest.next_epoch).taken_before(_others(pinned, at(its)))
        order = replace(order, phase=(taken + rest.next_epoch * order.tokens) % order.unit)
    return order, {epoch: positions for epoch, positions in excluded.items() if positions}


def _order_without(its: Identity, before: Pinned, pinned: Pinned) -> Identity:
    """Return the order ``its``, which is of the version ``before``, in ``pinned``, the same with other row groups."""
    index, counted = pinned.table.index, before.selection
    if counted is not None and set(before.table.index.excluded) <= set(index.excluded):
        pinned.offer(counted.of_index(index.digest, index.group_rows))
    maker = its.maker
    if maker is not None and maker.fingerprint.startswith("rows:"):  # of rows that may be excluded now
        maker = replace(maker, fingerprint="")
    return replace(its.of_version(pinned.identity()), maker=maker)


def _in_windows(left: Left, order: Identity, pinned: Pinned, at: Callable[[Identity], Pinned]) -> Intervals:
    """Return the positions that are ``left``, in ``order``, in windows with rows that ``pinned`` excludes."""
    before = at(order)
    layout = _layout(before, order, left.epoch, left.num_lanes, left.rotation)
    holding = layout.holding(_others(pinned, before))
    return left.positions.intersection(Intervals.of(holding))


def _others(pinned: Pinned, before: Pinned) -> set[int]:
    """Return the row groups that ``pinned`` excludes and ``before`` does not."""
    return set(pinned.table.index.excluded).difference(before.table.index.excluded)


def _layout(pinned: Pinned, order: Identity, epoch: int, num_lanes: int = 1, rotation: int = 0) -> EpochLayout:
    """Return the layout of ``epoch`` in ``order``, which is of the version ``pinned``."""
    key = LayoutKey(epoch=epoch, num_lanes=num_lanes, rotation=rotation, phase=order.phase)
    return key.layout(order.spec, *pinned.counted, endless=order.endless)
