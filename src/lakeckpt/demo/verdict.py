"""This module judges the demo: each claim is a check with a yes or a no.

It gets plain values (what the ranks recorded, which faults happened, what the audit found) and returns plain values. A
check that could not be made counts as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.demo.records import Launch, RowCount, Step, count_rows, surviving_steps
from lakeckpt.demo.scenario import EPOCHS, NUM_LANES, DemoConfig
from lakeckpt.demo.supervise import Death
from lakeckpt.errors import CheckpointNotFound
from lakeckpt.lake.storage.open import open_storage

__all__ = ["Check", "Job", "Verdict", "audited", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One claim; ``seen`` is what was found, whether the claim holds or not."""

    claim: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, as it was run and recorded."""

    config: DemoConfig
    deaths: tuple[Death, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the demo found."""

    checks: tuple[Check, ...]
    rows: tuple[RowCount, ...]

    @property
    def green(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)


def audited(config: DemoConfig) -> Check:
    """Audit the checkpoints of a job, as ``lakeckpt audit`` does. All of its epochs must be complete, too."""
    claim = "By the audit of the ledger, every row counts exactly once per epoch"
    try:
        report = audit(open_storage(str(config.checkpoints)))
    except CheckpointNotFound as error:
        return Check(claim=claim, holds=False, seen=str(error))
    epochs = (epoch for reader in report.readers for epoch in reader.epochs)
    complete = {epoch.epoch for epoch in epochs if epoch.once == epoch.rows and not epoch.left}
    absent = sorted(set(range(EPOCHS)) - complete)
    seen = report.words
    if report.exactly_once and absent:
        seen += f"; but the ledger does not have all rows of epoch {', '.join(map(str, absent))}"
    return Check(claim=claim, holds=report.exactly_once and not absent, seen=seen)


def judge(reference: Job, faulted: Job, lake: npt.NDArray[np.int64], audit_check: Check) -> Verdict:
    """Compare the faulted run with the lake's ids (int64[rows]) and with the fault-free run.

    ``audit_check`` is the result of `audited` for the faulted run.
    """
    calm, calm_problem = _history(reference)
    rough, rough_problem = _history(faulted)
    sizes = {launch.launch: launch.world_size for launch in faulted.launches}
    unchanged = [step for step in rough if sizes[step.launch] == faulted.config.phases[0].world_size]
    stable = [step for step in rough[len(unchanged) :] if NUM_LANES % sizes[step.launch] == 0]
    rows = count_rows(rough, lake, EPOCHS)
    checks = (
        _all_happened(faulted),
        _once("By the ids that the loop recorded, every row counts exactly once per epoch", rows, rough_problem),
        audit_check,
        _bitwise(calm, unchanged),
        *([_same_rows(calm[len(unchanged) :], stable)] if stable else []),
        _once("The fault-free run is exact, too", count_rows(calm, lake, EPOCHS), calm_problem),
    )
    return Verdict(checks=checks, rows=tuple(rows))


def _history(job: Job) -> tuple[list[Step], str]:
    """Return the steps that survived, and why there are none where the records do not join."""
    try:
        return surviving_steps(job.launches), ""
    except ValueError as error:
        return [], f"the records do not join into one history: {error}"


def _all_happened(faulted: Job) -> Check:
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


def _once(claim: str, rows: Sequence[RowCount], problem: str) -> Check:
    seen = "; ".join(
        f"epoch {count.epoch}: {count.counted:,} counted, {count.lost:,} lost, {count.repeated:,} repeated"
        + (f", {count.unknown:,} not in the lake" if count.unknown else "")
        for count in rows
    )
    return Check(claim=claim, holds=not problem and all(count.exactly_once for count in rows), seen=problem or seen)


def _bitwise(calm: Sequence[Step], unchanged: Sequence[Step]) -> Check:
    def content(step: Step) -> tuple[object, ...]:
        return step.step, step.digest, step.loss, step.rows

    equal = sum(content(one) == content(other) for one, other in zip(calm, unchanged, strict=False))
    return Check(
        claim="While the topology is the same, weights and losses are bitwise those of the fault-free run",
        holds=0 < equal == len(unchanged),
        seen=f"{equal:,} of {len(unchanged):,} steps are equal, compared after every step",
    )


def _same_rows(calm: Sequence[Step], stable: Sequence[Step]) -> Check:
    pairs = list(zip(calm, stable, strict=False))
    same = sum(sorted(one.ids) == sorted(other.ids) for one, other in pairs)
    difference = max((abs(one.loss - other.loss) for one, other in pairs), default=float("nan"))
    return Check(
        claim="With ranks that divide the lanes, every step still has the rows of the fault-free run",
        holds=same == len(stable),
        seen=f"{same:,} of {len(stable):,} steps; losses differ by at most {difference:.1e}",
    )
