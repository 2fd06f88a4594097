"""What do positions that a state names mean, and which of them did no rank get?

Pure. Imports without torch.
"""

from __future__ import annotations

from lakeckpt.checkpoint.epoch_account import Piece
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan
from lakeckpt.core.state import ReaderState

__all__ = ["piece_of", "undealt"]


def piece_of(state: ReaderState, epoch: int, positions: Intervals, manifest: Manifest) -> Piece:
    """Positions of ``epoch`` in the layout that ``state`` has it in."""
    num_lanes, rotation = state.segment.num_lanes, 0
    if state.identity.endless or epoch == state.epoch:
        try:
            num_lanes, rotation = Plan(state).deal.layout(epoch)
        except ValueError:
            pass  # an epoch that is over: all of it, in whatever order
    key = LayoutKey(epoch=epoch, num_lanes=num_lanes, rotation=rotation)
    return Piece(identity=state.identity, key=key, positions=positions, manifest=manifest)


def undealt(end: ReaderState, epoch: int) -> Intervals:
    """With ``tail="even"``: the rows of the epoch's last step that no rank got, though they lie below the frontier."""
    if end.identity.tail != "even" or end.identity.endless or epoch != end.epoch:
        return Intervals.empty()
    plan = Plan(end)
    if plan.steps is None or end.step < plan.steps or plan.steps == end.segment.step:
        return Intervals.empty()
    last = plan.steps - 1
    first, stop = plan.micro_batch(last), plan.micro_batch(last + 1)
    if stop - first == end.segment.world_size:
        return Intervals.empty()
    dealt = [span for number in range(first, stop) for span in plan.deal.spans(number)]
    given = [span for rank in range(end.segment.world_size) for span in plan.assignment(last, rank).receipt.spans]
    every, got = (Intervals.of([(span.start, span.stop) for span in spans]) for spans in (dealt, given))
    return every.difference(got)
