"""What happened to a reader between two cuts, whichever of them become checkpoints?  Legs, which join end to end.

A manifest records what was consumed since its parent. Which commit that will be is not known when a cut is handed over
to be persisted: an earlier one may still be on its way, may fail, or be left out for a newer one. So a rank hands over
*legs*, each from one cut that was handed over to the next, and keeps handing them over until a commit has them;
`joined` makes the record of those since the parent.

Pure values and their documents. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lakeckpt.checkpoint.fields import fields_of, number
from lakeckpt.checkpoint.manifest import ReaderRecord, reader_from_plain, reader_to_plain
from lakeckpt.core.read_ahead import BASES, Basis
from lakeckpt.core.skips import SkipList
from lakeckpt.errors import WireDamaged
from lakeckpt.tracking.steps import StepRecord
from lakeckpt.wire.codec import dumps, loads

__all__ = ["Leg", "joined", "legs_from_bytes", "legs_to_bytes", "since", "skipped", "weakest"]

_KIND, _VERSION = "legs", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """From the cut after optimizer step ``first`` to that after ``step``. In ``record``, state and skips are this
    rank's own."""

    first: int
    step: int
    record: ReaderRecord

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.step:
            raise WireDamaged(f"a leg goes from step {self.first} to {self.step}")


def since(legs: Sequence[Leg], recorded: int) -> tuple[Leg, ...]:
    """Those of ``legs`` that no commit up to step ``recorded`` has; the last of them ends at the cut. Where a commit
    has the cut itself, that is one leg on which nothing was consumed.

    `WireDamaged` where they do not follow one another from there: something was consumed that nobody recorded.
    """
    left = tuple(leg for leg in legs if leg.first >= recorded)
    at = recorded
    for leg in left:
        if leg.first != at:
            raise WireDamaged(f"what was consumed between the steps {at} and {leg.first} is recorded nowhere")
        at = leg.step
    if not left and legs and legs[-1].step == recorded:
        record = replace(legs[-1].record, stretches=(), steps=StepRecord(runs=()), skips=SkipList())
        return (Leg(first=recorded, step=recorded, record=record),)
    if not left or (legs and legs[-1].step != at):
        raise WireDamaged(f"nothing is known of what was consumed after step {recorded}")
    return left


def weakest(legs: Sequence[Leg]) -> tuple[Basis, str]:
    """The weakest basis on which rows of ``legs`` count as used, and why it is suspected."""
    every = [(one.basis, one.reason) for leg in legs for one in leg.record.stretches]
    return max(every, key=lambda one: BASES.index(one[0]), default=("stated", ""))


def joined(
    legs: Sequence[Leg],
    *,
    state: Mapping[str, Any],
    skips: SkipList,
    others: tuple[Basis, str] = ("stated", ""),
) -> ReaderRecord:
    """The record of ``legs`` together; ``state`` and ``skips`` are those of the whole job at the last one's end, and
    ``others`` the weakest basis of other ranks."""
    basis, reason = others
    stretches = tuple(
        replace(one, basis=basis, reason=reason) if BASES.index(one.basis) < BASES.index(basis) else one
        for leg in legs
        for one in leg.record.stretches
    )
    return ReaderRecord(
        state=state,
        stretches=stretches,
        steps=StepRecord(runs=tuple(run for leg in legs for run in leg.record.steps.runs)),
        index=legs[-1].record.index,
        skips=skips,
    )


def skipped(legs: Sequence[Leg]) -> SkipList:
    """What this rank had to skip on ``legs``."""
    return SkipList().union(*(leg.record.skips for leg in legs))


def legs_to_bytes(legs: Sequence[Leg]) -> bytes:
    """The document of the legs of one reader."""
    rows = [{"first": leg.first, "step": leg.step, "record": reader_to_plain(leg.record)} for leg in legs]
    return dumps(rows, kind=_KIND, version=_VERSION)


def legs_from_bytes(data: bytes) -> tuple[Leg, ...]:
    """The legs of which ``data`` is the document. `WireError`."""
    rows = loads(data, kind=_KIND, supported=_VERSION).value
    if not isinstance(rows, list):
        raise WireDamaged(f"legs are a list, got {rows!r:.80}")
    plains = [fields_of(row, "a leg") for row in rows]
    return tuple(
        Leg(
            first=number(plain, "first"),
            step=number(plain, "step"),
            record=reader_from_plain(fields_of(plain.get("record"), "the record of a leg")),
        )
        for plain in plains
    )
