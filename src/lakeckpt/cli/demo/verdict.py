"""Did the promise hold? Every claim of the demo as a check with a yes or a no, and what the faults cost.

How: plain values in (what the ranks recorded, what the supervisor did, what the audit found), plain values out. A check
that could not be made counts as failed.

Never: it runs nothing, prints nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.cli.demo.records import Launch, RowCount, Step, count_rows, surviving_steps
from lakeckpt.cli.demo.scenario import WHAT_HAPPENS, DemoConfig
from lakeckpt.cli.demo.supervise import Outcome

__all__ = ["Audit", "Check", "FaultCost", "JobFacts", "Verdict", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What lakeckpt's own ledger says of a run, over all epochs: rows lost, how many times too many rows counted, and
    the audit's words."""

    exactly_once: bool
    lost: int
    repeated: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job, as it was run and recorded."""

    config: DemoConfig
    outcome: Outcome
    launches: tuple[Launch, ...]
    audit: Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One claim; ``seen`` says what was found, whether it holds or not."""

    claim: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCost:
    """One fault and its price: seconds until noticed, until restored, and until back at the step that was lost."""

    number: int
    who: str
    where: str
    step: int
    before: str
    after: str
    restored: int
    recomputed_steps: int
    notice_s: float
    restart_s: float
    recompute_s: float

    @property
    def lost_s(self) -> float:
        return self.notice_s + self.restart_s + self.recompute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All that the demo found out. ``green`` only if every check holds."""

    checks: tuple[Check, ...]
    faults: tuple[FaultCost, ...]
    rows: tuple[RowCount, ...]
    audit: Audit
    equal_steps: int
    unchanged_steps: int
    loss_reference: float
    loss_faulted: float
    loss_difference_stable: float | None
    overhead: float
    save_ms: float
    saves: int
    training_s: float

    @property
    def green(self) -> bool:
        return all(check.holds for check in self.checks)

    def to_plain(self) -> dict[str, Any]:
        """For ``verdict.json``."""
        return {"green": self.green, **asdict(self)}


def judge(reference: JobFacts, faulted: JobFacts, lake: npt.NDArray[np.int64]) -> Verdict:
    """Hold the faulted run against the lake's ids (int64[rows]) and against the fault-free run."""
    epochs = faulted.config.epochs
    histories, problems = [], []
    for facts, name in ((reference, "fault-free"), (faulted, "faulted")):
        try:
            histories.append(surviving_steps(facts.launches))
        except ValueError as error:
            histories.append([])
            problems.append(f"the {name} run's records do not join into one history: {error}")
    calm, rough = histories
    rows = tuple(count_rows(rough, lake, epochs))
    stretch = _Comparison(calm, rough, faulted)
    checks = [
        _struck(faulted),
        _once(
            "Ids that the training loop itself recorded: every row exactly once per epoch", rows, len(lake), problems
        ),
        Check(
            claim="Audit of the ledger: every row exactly once per epoch",
            holds=faulted.audit.exactly_once,
            seen=faulted.audit.words,
        ),
        stretch.bitwise(),
        *stretch.stable(),
        _calm_check(reference, calm, lake, epochs),
    ]
    training, saving, saves = _overhead(reference)
    return Verdict(
        checks=tuple(checks),
        faults=tuple(_costs(faulted)),
        rows=rows,
        audit=faulted.audit,
        equal_steps=stretch.equal,
        unchanged_steps=stretch.unchanged,
        loss_reference=_final(reference, "loss"),
        loss_faulted=_final(faulted, "loss"),
        loss_difference_stable=stretch.stable_difference,
        overhead=saving / max(1e-9, training - saving),
        save_ms=1000 * saving / max(1, saves),
        saves=saves,
        training_s=training,
    )


def _struck(faulted: JobFacts) -> Check:
    planned = [phase.fault for phase in faulted.config.phases if phase.fault is not None]
    met = [death.fault for death in faulted.outcome.deaths]
    killed = sum(death.processes for death in faulted.outcome.deaths)
    ended = bool(faulted.launches) and faulted.launches[-1].final is not None
    end = "training came to its end" if ended else "training did not come to its end"
    return Check(
        claim="Every fault struck where it was meant to, and the job came back each time",
        holds=met == planned and ended,
        seen=f"{len(met)} of {len(planned)} faults, {killed} processes killed; {end}",
    )


def _once(claim: str, rows: Sequence[RowCount], table: int, problems: Sequence[str]) -> Check:
    if problems:
        return Check(claim=claim, holds=False, seen="; ".join(problems))
    seen = "; ".join(
        f"epoch {count.epoch}: {count.counted:,} of {table:,} counted, {count.lost:,} lost, {count.repeated:,} repeated"
        + (f", {count.unknown:,} not in the lake" if count.unknown else "")
        for count in rows
    )
    return Check(claim=claim, holds=bool(rows) and all(count.exactly_once for count in rows), seen=seen)


def _calm_check(reference: JobFacts, calm: Sequence[Step], lake: npt.NDArray[np.int64], epochs: int) -> Check:
    rows = count_rows(calm, lake, epochs)
    lost, repeated = sum(count.lost for count in rows), sum(count.repeated for count in rows)
    audit = reference.audit
    return Check(
        claim="The fault-free run, that all this is compared with, is exact too",
        holds=all(count.exactly_once for count in rows) and audit.exactly_once,
        seen=f"by ids {lost} lost, {repeated} repeated; by the audit, {audit.words}",
    )


class _Comparison:
    """The surviving history beside the fault-free one, step by step."""

    def __init__(self, calm: Sequence[Step], rough: Sequence[Step], faulted: JobFacts) -> None:
        sizes = {launch.launch: launch.world_size for launch in faulted.launches}
        first = sizes[min(sizes)] if sizes else 0
        lanes = faulted.config.num_lanes
        moved = [step for step in rough if sizes[step.launch] != first]
        self.unchanged = (moved[0].step - 1) if moved else len(rough)
        recut = [step for step in rough if lanes % sizes[step.launch]]
        stable_end = (recut[0].step - 1) if recut else len(rough)
        pairs = list(zip(calm, rough, strict=False))
        self.equal = 0
        for one, other in pairs[: self.unchanged]:
            if (one.step, one.digest, one.loss, one.rows) != (other.step, other.digest, other.loss, other.rows):
                break
            self.equal += 1
        self._stable = pairs[self.unchanged : stable_end]
        self._sizes = sorted({sizes[other.launch] for _, other in self._stable})

    @property
    def stable_difference(self) -> float | None:
        return max((abs(one.loss - other.loss) for one, other in self._stable), default=None)

    def bitwise(self) -> Check:
        return Check(
            claim="Where the topology did not change, weights and losses are bitwise those of the fault-free run",
            holds=0 < self.equal == self.unchanged,
            seen=f"{self.equal:,} of {self.unchanged:,} steps equal, compared after every step",
        )

    def stable(self) -> list[Check]:
        """With ranks that divide the lanes: the same rows in each step, whoever reads them."""
        if not self._stable:
            return []
        same = sum(sorted(one.ids) == sorted(other.ids) for one, other in self._stable)
        who = " and ".join(map(str, self._sizes))
        return [
            Check(
                claim=f"With {who} ranks, which divide the lanes, every step still had the fault-free run's rows",
                holds=same == len(self._stable),
                seen=f"{same:,} of {len(self._stable):,} steps; losses differ by at most {self.stable_difference:.1e}",
            )
        ]


def _costs(faulted: JobFacts) -> list[FaultCost]:
    launches = {launch.launch: launch for launch in faulted.launches}
    phases = faulted.config.phases
    costs = []
    for number, death in enumerate(faulted.outcome.deaths, start=1):
        lost, back = launches.get(death.launch), launches.get(death.launch + 1)
        if lost is None or back is None:
            continue
        reached = max(lost.steps, default=lost.restored)
        caught_up = _when_past(back, reached)
        costs.append(
            FaultCost(
                number=number,
                who="whole job" if death.fault.whole_job else f"rank {death.fault.rank}",
                where=WHAT_HAPPENS[death.fault.point],
                step=death.fault.step,
                before=phases[death.launch].topology,
                after=phases[death.launch + 1].topology,
                restored=back.restored,
                recomputed_steps=max(0, reached - back.restored),
                notice_s=death.noticed - death.killed,
                restart_s=back.ready - death.noticed,
                recompute_s=caught_up - back.ready,
            )
        )
    return costs


def _when_past(launch: Launch, reached: int) -> float:
    """When the launch had made step ``reached`` again, or the last before it that it made."""
    done = [step.ended for number, step in launch.steps.items() if number <= reached]
    return max(done, default=launch.ready)


def _overhead(facts: JobFacts) -> tuple[float, float, int]:
    """(seconds of training with saving, seconds of it inside the cut, saves) over all launches."""
    training = saving = 0.0
    saves = 0
    for launch in facts.launches:
        if launch.steps:
            last = max(launch.steps)
            training += launch.steps[last].ended - launch.ready + launch.cut_seconds.get(last, 0.0)
            saving += sum(launch.cut_seconds.values())
            saves += sum(1 for step in launch.cut_seconds if step % facts.config.save_every == 0)
    return training, saving, saves


def _final(facts: JobFacts, name: str) -> float:
    final: Mapping[str, Any] | None = facts.launches[-1].final if facts.launches else None
    return float(final[name]) if final is not None else float("nan")
