"""What is known of one cut on its way through the copier, and what did its capture cost?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lakeckpt.checkpoint.arena.contents import Documents
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.capturing.capture import Capture
from lakeckpt.checkpoint.capturing.plan import CapturePlan
from lakeckpt.checkpoint.capturing.witnesses import Taken, Witnesses

__all__ = ["CaptureRecord", "Facts", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """What a capture cost, and when. Times are of ``time.perf_counter``."""

    step: int
    size_bytes: int
    """What did not have to be taken at the cut."""
    fenced_bytes: int
    """How much of that moved at the fence, when training was about to change it."""
    cut_s: float
    """How long the training thread was in `CaptureEngine.cut`."""
    fence_s: float
    """How long it was in the fence."""
    begin_s: float
    end_s: float
    """When the generation was complete, or given up."""
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What whoever makes a cut says of it."""

    step: int
    attempt: str
    cut: bytes
    """Its digest (16 bytes), the same on every rank."""
    readers: Mapping[str, bytes]
    extra: Mapping[str, bytes]


@dataclass(slots=True, kw_only=True)
class Job:
    """A capture on its way through the copier."""

    facts: Facts
    plan: CapturePlan
    filling: Filling
    capture: Capture
    witnesses: Witnesses
    taken: Taken | None
    """What witnesses have kept."""
    planned_for: frozenset[str]
    """What was known to move when the plan was made."""
    trees: Mapping[str, Callable[[], bytes]]
    begin_s: float
    cut_s: float = 0.0

    def documents(self) -> bytes:
        """The document of the generation."""
        return Documents(
            trees={name: document() for name, document in self.trees.items()},
            table=self.plan.table,
            readers=self.facts.readers,
            extra=self.facts.extra,
        ).to_bytes()

    def witnessed(self) -> frozenset[str]:
        """The keys of what witnesses saw change under the capture."""
        return self.witnesses.changed(self.taken, self.filling.data)

    def changed(self) -> frozenset[str]:
        """The keys of what torch saw change under the capture."""
        keys = list(self.plan.parted.late)
        return frozenset(keys[number] for number in self.capture.changed)

    def complete(self, documents: bytes) -> None:
        """Complete the generation."""
        facts = self.facts
        self.filling.complete(step=facts.step, attempt=facts.attempt, cut=facts.cut, documents=documents)

    def record(self, end_s: float, *, complete: bool) -> CaptureRecord:
        """What it cost."""
        return CaptureRecord(
            step=self.facts.step,
            size_bytes=self.plan.late_bytes,
            fenced_bytes=self.capture.fenced_bytes,
            cut_s=self.cut_s,
            fence_s=self.capture.fence_s,
            begin_s=self.begin_s,
            end_s=end_s,
            complete=complete,
        )
