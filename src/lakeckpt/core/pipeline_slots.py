"""Where does a rank of a pipeline wait, and how long?  From the tables of what each rank does, in which order.

A table gives each rank's computations: forward (F), backward (B), or backward split into that of inputs (I) and of
weights (W), of one stage and micro-batch. A computation begins when its rank is done with the one before and what it
needs is there: F of stage s needs F of stage s-1, B and I of stage s need those of stage s+1 and its own F, W its own
I. Iterations follow each other without a barrier, so that a rank that is done early begins to wait in the next one: two
are run through, and the slots are those of the second.

Pure: no torch, no clock; how long each computation takes is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Computation", "Slot", "pipeline_slots"]

_ITERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One computation of one stage and micro-batch."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A rank waits for ``length_s`` between two of its computations; ``after`` is None before the first one."""

    after: Computation | None
    before: Computation
    length_s: float


def pipeline_slots(
    tables: Mapping[int, Sequence[Computation]],
    seconds: Callable[[Computation], float],
    *,
    between_s: float = 0.0,
) -> dict[int, tuple[Slot, ...]]:
    """The slots of every rank, in order, those of no length left out.

    ``tables``: rank → its computations in order. ``between_s``: what a rank does after its last computation (its
    optimizer) before the next iteration. `ValueError` where the tables wait for each other for ever.

    >>> one = lambda stage, kind: Computation(stage=stage, kind=kind, microbatch=0)
    >>> found = pipeline_slots({0: [one(0, "F"), one(0, "B")], 1: [one(1, "F"), one(1, "B")]}, lambda _: 1.0)
    >>> [(str(slot.after), slot.length_s) for slot in found[0]], [(str(slot.after), slot.length_s) for slot in found[1]]
    ([('0F0', 2.0)], [('None', 2.0)])
    """
    stages = 1 + max((one.stage for table in tables.values() for one in table), default=-1)
    free_s = dict.fromkeys(tables, 0.0)
    slots: dict[int, list[Slot]] = {}
    for _ in range(_ITERATIONS):
        slots = {rank: [] for rank in tables}
        _run(tables, seconds, stages, free_s, slots)
        for rank in free_s:
            free_s[rank] += between_s
    return {rank: tuple(found) for rank, found in slots.items()}


def _run(
    tables: Mapping[int, Sequence[Computation]],
    seconds: Callable[[Computation], float],
    stages: int,
    free_s: dict[int, float],
    slots: dict[int, list[Slot]],
) -> None:
    """One iteration: moves ``free_s`` (when each rank is done with what it has begun) and adds to ``slots``."""
    done_s: dict[tuple[int, str, int], float] = {}
    at = dict.fromkeys(tables, 0)
    while any(at[rank] < len(tables[rank]) for rank in tables):
        before = sum(at.values())
        for rank, table in tables.items():
            while at[rank] < len(table):
                one = table[at[rank]]
                there_s = _there_s(one, done_s, stages)
                if there_s is None:
                    break
                begin_s = max(free_s[rank], there_s)
                if begin_s > free_s[rank]:
                    after = table[at[rank] - 1] if at[rank] else None
                    slots[rank].append(Slot(after=after, before=one, length_s=begin_s - free_s[rank]))
                free_s[rank] = begin_s + seconds(one)
                done_s[one.stage, "B" if one.kind == "I" else one.kind, one.microbatch] = free_s[rank]
                at[rank] += 1
        if sum(at.values()) == before:
            stuck = {rank: str(table[at[rank]]) for rank, table in tables.items() if at[rank] < len(table)}
            raise ValueError(f"these computations wait for others that never come, by rank: {stuck}")


def _there_s(one: Computation, done_s: Mapping[tuple[int, str, int], float], stages: int) -> float | None:
    """When all that ``one`` needs is there; None where it is not known yet."""
    needs: list[tuple[int, str, int]] = []
    if one.kind == "F" and one.stage > 0:
        needs = [(one.stage - 1, "F", one.microbatch)]
    elif one.kind in ("B", "I"):
        needs = [(one.stage, "F", one.microbatch)]
        if one.stage < stages - 1:
            needs.append((one.stage + 1, "B", one.microbatch))
    elif one.kind == "W":
        needs = [(one.stage, "B", one.microbatch)]
    if any(need not in done_s for need in needs):
        return None
    return max((done_s[need] for need in needs), default=0.0)
