"""What if a row group cannot be read?  Decide whether to go on without it, and remember that, for as long as it counts.

What is tried is a *stretch*: the rows of one row group in one window. A stretch that was found damaged, here or (by the
skip list that comes with an assignment) in what the run goes on from, is not tried again in that epoch, though it may
have healed since: what was told of it stays true. Only damage is gone around (`DataFileDamaged`): a store that fails, a
file that is gone or was written again, values that do not fit, a row group that is too large are raised as ever.

It reads nothing, and holds no rows. Threads may ask what is known; one tells it.
"""

from __future__ import annotations

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import EpochLayout, Fragment, Window
from lakeckpt.core.skips import MOST_SKIPPED, Skip, SkipList, SkippedGroup
from lakeckpt.errors import DataFileDamaged
from lakeckpt.lake.index import TableIndex

__all__ = ["Skipper"]


class Skipper:
    """Goes around damaged row groups of the table of ``index``; ``selection`` is the digest of the rows selected of it.

    ``finds_more``: whether damage that is not on the list yet is added to it; else it is raised.
    """

    def __init__(self, index: TableIndex, *, selection: str, finds_more: bool) -> None:
        self.known = SkipList()
        """What is not tried."""
        self._index = index
        self._table = f"{index.digest}/{selection}" if selection else index.digest
        self._finds_more = finds_more

    def learn(self, known: SkipList) -> bool:
        """Add what others found; tell whether any of it is new."""
        before = self.known
        self.known = before.union(known)
        return self.known != before

    def knows(self, layout: EpochLayout, window: Window, fragment: Fragment) -> bool:
        """Whether ``fragment`` is to be skipped, untried."""
        whole = self._entry(layout, fragment.group, window.start, window.stop, "")
        return self.known.reason(whole) is not None

    def found(self, error: DataFileDamaged, layout: EpochLayout, window: Window, fragment: Fragment) -> None:
        """Note that ``fragment``, which is needed now, is damaged; raise ``error`` where it is not to be skipped."""
        if not self._finds_more:
            raise error
        known = self.known.since(max(0, layout.epoch - 1))  # of epochs that are over nothing is read any more
        count = sum(one.epoch == layout.epoch for one in known)
        if count >= MOST_SKIPPED:
            error.add_note(f"{count} row groups were skipped in this epoch: that is more than odd damage")
            raise error
        found = self._entry(layout, fragment.group, window.start, window.stop, str(error))
        self.known = known.union(SkipList([found]))

    def skip(self, layout: EpochLayout, group: int, start: int, stop: int, rows: int) -> Skip:
        """Return that ``rows`` rows of ``group`` did not come, which stand between positions [start, stop)."""
        entry = self._entry(layout, group, start, stop, "")
        return Skip(group=self._entry(layout, group, start, stop, self.known.reason(entry) or ""), rows=rows)

    def _entry(self, layout: EpochLayout, group: int, start: int, stop: int, reason: str) -> SkippedGroup:
        file, row_group = self._index.group(group)
        return SkippedGroup(
            table=self._table,
            epoch=layout.epoch,
            num_lanes=layout.num_lanes,
            rotation=layout.rotation,
            group=group,
            file=self._index.paths[file],
            row_group=row_group,
            reason=" ".join(reason.split())[:300],
            positions=Intervals.of([(start, stop)]),
        )
