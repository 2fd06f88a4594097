"""This module judges the demo: each claim is a check with a yes or a no.

It gets plain values (what the ranks recorded, which faults happened, what the audit found) and returns plain values. A
check that could not be made counts as failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.demo.records import Launch, RecordedStep, TokenCount, count_tokens, surviving_steps
from lakeckpt.demo.scenario import LENGTH, NUM_LANES, DemoConfig
from lakeckpt.demo.supervise import Death

__all__ = ["Check", "RecordedJob", "Verdict", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One claim; ``seen`` is what was found, whether the claim holds or not."""

    claim: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """One job, as it was run and recorded."""

    config: DemoConfig
    deaths: tuple[Death, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The findings of the demo."""

    checks: tuple[Check, ...]
    tokens: tuple[TokenCount, ...]

    @property
    def green(self) -> bool:
        """True if every check holds."""
        return all(check.holds for check in self.checks)


def judge(
    reference: RecordedJob, faulted: RecordedJob, lake: Mapping[str, npt.NDArray[np.int64]], report: AuditReport
) -> Verdict:
    """Compare the faulted run with the numbers of each source's tokens (int64[tokens]) and with the fault-free run.

    ``report`` is the audit of the faulted run.
    """
    calm, calm_problem = _history(reference)
    rough, rough_problem = _history(faulted)
    sizes = {launch.launch: launch.world_size for launch in faulted.launches}
    unchanged = [step for step in rough if sizes[step.launch] == faulted.config.phases[0].world_size]
    stable = [step for step in rough[len(unchanged) :] if NUM_LANES % sizes[step.launch] == 0]
    counts = count_tokens(rough, lake)
    checks = (
        _all_happened(faulted),
        _at_most_one_again(faulted),
        _once("By the loop's records, every token counts exactly once per epoch of its source", counts, rough_problem),
        _agrees(report, counts),
        _bitwise(calm, unchanged),
        *([_same_tokens(calm[len(unchanged) :], stable)] if stable else []),
        _once("The fault-free run is exact, too", count_tokens(calm, lake), calm_problem),
    )
    return Verdict(checks=checks, tokens=tuple(counts))


def _history(job: RecordedJob) -> tuple[list[RecordedStep], str]:
    """Return the steps that survived, and why there are none if the records do not join."""
    try:
        return surviving_steps(job.launches), ""
    except ValueError as error:
        return [], f"the records do not join into one history: {error}"


def _all_happened(faulted: RecordedJob) -> Check:
    planned = [phase.fault for phase in faulted.config.phases if phase.fault is not None]
    happened = [death.fault for death in faulted.deaths]
    killed = sum(death.processes for death in faulted.deaths)
    ended = bool(faulted.launches) and faulted.launches[-1].ended
    return Check(
        claim="Every fault happened where it was meant to, and the job came back each time",
        holds=happened == planned and ended,
        seen=f"{len(happened)} of {len(planned)} faults, {killed} processes killed; training "
        f"{'came' if ended else 'did not come'} to its end",
    )


def _at_most_one_again(faulted: RecordedJob) -> Check:
    pairs = list(itertools.pairwise(faulted.launches))
    again = [max(one.steps, default=one.restored) - other.restored for one, other in pairs]
    back = [one.began_s - death.at_s for one, death in zip(faulted.launches[1:], faulted.deaths, strict=False)]
    return Check(
        claim="Each time, the job went on from memory, and did at most one step again",
        holds=len(again) == len(faulted.deaths) and all(0 <= steps <= 1 for steps in again),
        seen=f"steps done again: {', '.join(map(str, again)) or 'none'}; from the kill to the next step: "
        f"{', '.join(f'{seconds:.1f}' for seconds in back) or 'no'} s",
    )


def _once(claim: str, counts: Sequence[TokenCount], problem: str) -> Check:
    """All counts must be exact, and each source must have come to the end of an epoch."""
    sources = [list(found) for _, found in itertools.groupby(counts, key=lambda one: one.source)]
    exact = all(epochs[0].complete and not any(one.lost or one.repeated for one in epochs) for epochs in sources)
    return Check(claim=claim, holds=exact and not problem, seen=problem or "\n  ".join(map(_words, sources)))


def _words(epochs: Sequence[TokenCount]) -> str:
    *complete, begun = epochs
    return (
        f"{begun.source}: {sum(one.counted for one in complete):,} tokens in {len(complete)} complete "
        f"epoch{'' if len(complete) == 1 else 's'}, {begun.counted:,} in the next; "
        f"{sum(one.lost for one in epochs):,} lost, {sum(one.repeated for one in epochs):,} repeated"
    )


def _agrees(report: AuditReport, counts: Sequence[TokenCount]) -> Check:
    audited = {
        (reader.name.removeprefix("reader."), one.epoch): one.once * LENGTH
        for reader in report.readers
        for one in reader.epochs
    }
    recorded = {(one.source, one.epoch): one.counted for one in counts}
    return Check(
        claim="The audit of the ledger proves the same, with as many tokens in each epoch",
        holds=report.exactly_once and audited == recorded,
        seen=f"{report.words} (rows are sequences: {sum(audited.values()):,} tokens, and {sum(recorded.values()):,} "
        "by the loop's records)",
    )


def _bitwise(calm: Sequence[RecordedStep], unchanged: Sequence[RecordedStep]) -> Check:
    def content(step: RecordedStep) -> tuple[object, ...]:
        return step.step, step.digest, step.loss, step.used

    equal = sum(content(one) == content(other) for one, other in zip(calm, unchanged, strict=False))
    return Check(
        claim="While the topology is the same, weights and losses are bitwise those of the fault-free run",
        holds=0 < equal == len(unchanged),
        seen=f"{equal:,} of {len(unchanged):,} steps are equal, compared after every step",
    )


def _same_tokens(calm: Sequence[RecordedStep], stable: Sequence[RecordedStep]) -> Check:
    pairs = list(zip(calm, stable, strict=False))
    same = sum(sorted(one.sequences) == sorted(other.sequences) for one, other in pairs)
    difference = max((abs(one.loss - other.loss) for one, other in pairs), default=float("nan"))
    return Check(
        claim="With ranks that divide the lanes, every step still has the tokens of the fault-free run",
        holds=same == len(stable),
        seen=f"{same:,} of {len(stable):,} steps; losses differ by at most {difference:.1e}",
    )
