"""Of what does a capture consist, now?  The sources of all objects, looked at again at each cut, and the plan for them.

A plan is made anew only where what it is of has changed: other tensors, other memory, other sizes, or something that
was seen to move though it seemed still. Called by the training thread alone; copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lakeckpt.checkpoint.capturing.doubts import Doubts
from lakeckpt.checkpoint.capturing.filler import StillDigests
from lakeckpt.checkpoint.capturing.hooks import UpdateHooks
from lakeckpt.checkpoint.capturing.plan import CapturePlan, Parted, part, plan_capture
from lakeckpt.checkpoint.capturing.sources import Source, sources_of

__all__ = ["Planner"]


class Planner:
    """The plan for ``objects``, in slices of ``slice_bytes`` (None: of whatever size fits)."""

    __slots__ = ("_doubts", "_hooks", "_objects", "_plan", "_slice_bytes", "_sources", "digests", "planned_for")

    def __init__(
        self,
        objects: Mapping[str, Any],
        *,
        hooks: UpdateHooks,
        doubts: Doubts,
        slice_bytes: int | None,
    ) -> None:
        self.digests: StillDigests = {}
        """Of what is still, as captures of this plan found it first. One under way keeps those that it began with."""
        self.planned_for: frozenset[str] = frozenset()
        """What was known to move when the plan was made."""
        self._objects, self._hooks, self._doubts = objects, hooks, doubts
        self._slice_bytes = slice_bytes
        self._sources: list[Source] | None = None
        self._plan: CapturePlan | None = None

    def renewed(self) -> CapturePlan:
        """The plan for the state as it is now: the one before, where that fits."""
        moving = self._doubts.moving
        before, steady = self._plan, self.planned_for == moving
        self._plan = None  # where anything fails here, what was seen to change is not forgotten
        if self._sources is None:
            self._sources = sources_of(self._objects)
            steady = False
        else:
            changed = [one for one in self._sources if one.renew()]
            if not changed and steady and before is not None:
                self._plan = before
                return before
            steady = steady and all(one.changing.issuperset(one.tensors) for one in changed)
        parted = part(self._sources, self._hooks.optimizers, moving=moving)
        if before is not None and steady and parted.parts_as(before.parted):
            # The same mapping says that nothing of it has to be made ready again.
            parted = Parted(early=parted.early, late=before.parted.late, still=before.parted.still)
        else:
            self.forget()
        self._plan = plan_capture(parted, before=before, slice_bytes=self._slice_bytes)
        self.planned_for = moving
        return self._plan

    def forget(self) -> None:
        """The next capture says anew what is still."""
        self.digests = {}

    def trees(self) -> dict[str, Callable[[], bytes]]:
        """What makes the document of each object as it is now; for any thread, at any later time."""
        assert self._sources is not None
        return {one.name: one.document() for one in self._sources}
