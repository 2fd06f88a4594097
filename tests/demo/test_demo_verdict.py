"""The verdict is green for an exact history and red for each way in which one can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from lakeckpt.checkpoint.ledger.audit_report import AuditReport, EpochAudit, ReaderAudit
from lakeckpt.demo.records import Launch, Packed, RecordedStep
from lakeckpt.demo.scenario import LENGTH, DemoConfig, Phase, PlannedFault
from lakeckpt.demo.supervise import Death
from lakeckpt.demo.verdict import RecordedJob, Verdict, judge

LAKE = {"code": np.arange(48 * LENGTH)}


def audited(*once: int, doubts: tuple[str, ...] = ()) -> AuditReport:
    """The report of an audit by which ``once`` sequences counted once in each epoch."""
    zero = dict.fromkeys(("repeated", "again", "surplus", "lost", "dropped", "left", "before"), 0)
    epochs = [EpochAudit(epoch=e, status="complete", rows=n, once=n, **zero) for e, n in enumerate(once)]
    reader = ReaderAudit(
        name="reader.code",
        table="",
        tail="short",
        endless=True,
        topologies=(),
        epochs=tuple(epochs),
        findings=(),
        doubts=doubts,
    )
    none: dict[str, Any] = dict.fromkeys(("branches", "doubts", "notes", "trusted"), ())
    return AuditReport(run="", step=26, slot=1, checkpoints=1, attempts=1, readers=(reader,), **none)


PROVED = audited(48, 48, 8)


def step(number: int, launch: int, ranks: int) -> RecordedStep:
    """Step ``number``: four sequences of an epoch of 48, dealt to ``ranks`` ranks."""
    epoch, turn = divmod(number - 1, 12)
    firsts = range(turn * 4 * LENGTH, (turn + 1) * 4 * LENGTH, LENGTH)
    sequences: list[Packed] = [("code", epoch, tuple(range(first, first + LENGTH))) for first in firsts]
    return RecordedStep(
        launch=launch,
        step=number,
        used={rank: tuple(sequences[rank::ranks]) for rank in range(ranks)},
        loss=5.0 - number / 10 + (1e-7 if ranks > 2 else 0.0),
        digest=f"digest {number}",
    )


def launch(number: int, ranks: int, restored: int, last: int, *, ended: bool = False) -> Launch:
    steps = {n: step(n, number, ranks) for n in range(restored + 1, last + 1)}
    return Launch(
        launch=number,
        world_size=ranks,
        restored=restored,
        steps=steps,
        ended=ended,
    )


def job(launches: Sequence[Launch], faults: Sequence[PlannedFault]) -> RecordedJob:
    phases = [
        Phase(world_size=one.world_size, workers=1, fault=fault)
        for one, fault in zip(launches, [*faults, None], strict=True)
    ]
    config = DemoConfig(lake="lake", folder="folder", steps=26, save_every=4, phases=tuple(phases))
    deaths = tuple(Death(fault=fault, processes=1) for fault in faults)
    return RecordedJob(config=config, deaths=deaths, launches=tuple(launches))


FAULTS = (PlannedFault(rank=1, step=7, point="before-update"), PlannedFault(rank=0, step=15, point="before-cut"))


def calm() -> RecordedJob:
    return job([launch(0, 2, 0, 26, ended=True)], [])


def rough() -> RecordedJob:
    return job([launch(0, 2, 0, 6), launch(1, 2, 5, 15), launch(2, 4, 14, 26, ended=True)], FAULTS)


def with_launch(facts: RecordedJob, number: int, change: Callable[[Launch], Launch]) -> RecordedJob:
    launches = [change(one) if one.launch == number else one for one in facts.launches]
    return dataclasses.replace(facts, launches=tuple(launches))


def with_step(number: int, change: Callable[[RecordedStep], RecordedStep]) -> Callable[[Launch], Launch]:
    return lambda one: dataclasses.replace(one, steps={**one.steps, number: change(one.steps[number])})


def failed(verdict: Verdict) -> list[str]:
    return [check.claim for check in verdict.checks if not check.holds]


def test_an_exact_history_is_green() -> None:
    verdict = judge(calm(), rough(), LAKE, PROVED)
    assert failed(verdict) == []
    assert verdict.green
    assert any("14 of 14 steps are equal" in check.seen for check in verdict.checks)
    assert any("differ by at most 1.0e-07" in check.seen for check in verdict.checks)


def lost_a_token(facts: RecordedJob) -> RecordedJob:
    less = with_step(3, lambda one: dataclasses.replace(one, used={**one.used, 1: one.used[1][1:]}))
    return with_launch(facts, 0, less)


def repeated(number: int) -> Callable[[RecordedJob], RecordedJob]:
    def twice(one: RecordedStep) -> RecordedStep:
        return dataclasses.replace(one, used={**one.used, 0: (*one.used[0], one.used[0][0])})

    return lambda facts: with_launch(facts, 2, with_step(number, twice))


def a_token_of_no_table(facts: RecordedJob) -> RecordedJob:
    other = with_step(3, lambda one: dataclasses.replace(one, used={**one.used, 1: (("code", 0, (4000,)),)}))
    return with_launch(facts, 0, other)


def no_complete_epoch(facts: RecordedJob) -> RecordedJob:
    return job([launch(0, 2, 0, 6), launch(1, 2, 4, 15), launch(2, 4, 6, 8, ended=True)], FAULTS)


def other_weights(facts: RecordedJob) -> RecordedJob:
    return with_launch(facts, 1, with_step(11, lambda one: dataclasses.replace(one, digest="other")))


def other_loss(facts: RecordedJob) -> RecordedJob:
    return with_launch(facts, 1, with_step(11, lambda one: dataclasses.replace(one, loss=one.loss * (1 + 1e-15))))


def tokens_in_another_order(facts: RecordedJob) -> RecordedJob:
    swapped = with_step(11, lambda one: dataclasses.replace(one, used={0: one.used[1], 1: one.used[0]}))
    return with_launch(facts, 1, swapped)


def other_tokens_in_a_stable_step(facts: RecordedJob) -> RecordedJob:
    a, b = (facts.launches[2].steps[number] for number in (20, 21))
    facts = with_launch(facts, 2, with_step(20, lambda one: dataclasses.replace(one, used=b.used)))
    return with_launch(facts, 2, with_step(21, lambda one: dataclasses.replace(one, used=a.used)))


def a_step_nobody_made(facts: RecordedJob) -> RecordedJob:
    return with_launch(
        facts,
        1,
        lambda one: dataclasses.replace(
            one, steps=MappingProxyType({number: value for number, value in one.steps.items() if number != 9})
        ),
    )


def a_fault_that_never_struck(facts: RecordedJob) -> RecordedJob:
    return dataclasses.replace(facts, deaths=facts.deaths[:1])


def two_steps_again(facts: RecordedJob) -> RecordedJob:
    return with_launch(facts, 2, lambda one: launch(2, 4, 13, 26, ended=True))


def an_end_that_never_came(facts: RecordedJob) -> RecordedJob:
    return with_launch(facts, 2, lambda one: dataclasses.replace(one, ended=False))


@pytest.mark.parametrize(
    ("damage", "claim"),
    [
        (lost_a_token, "By the loop's records"),
        (lost_a_token, "audit"),
        (repeated(20), "By the loop's records"),
        (repeated(26), "By the loop's records"),
        (a_token_of_no_table, "By the loop's records"),
        (no_complete_epoch, "By the loop's records"),
        (other_weights, "bitwise"),
        (other_loss, "bitwise"),
        (tokens_in_another_order, "bitwise"),
        (other_tokens_in_a_stable_step, "divide the lanes"),
        (a_step_nobody_made, "By the loop's records"),
        (a_fault_that_never_struck, "Every fault happened"),
        (an_end_that_never_came, "Every fault happened"),
        (two_steps_again, "at most one step again"),
    ],
)
def test_each_way_to_be_wrong_is_red_and_named(damage: Callable[[RecordedJob], RecordedJob], claim: str) -> None:
    verdict = judge(calm(), damage(rough()), LAKE, PROVED)
    assert not verdict.green
    assert any(claim in one for one in failed(verdict)), failed(verdict)


def test_a_reference_that_is_not_exact_is_red() -> None:
    verdict = judge(lost_a_token(calm()), rough(), LAKE, PROVED)
    assert any("fault-free run is exact" in one for one in failed(verdict))


@pytest.mark.parametrize(
    "report",
    [
        audited(48, 48, 8, doubts=("no",)),
        audited(48, 47, 8),
        audited(48, 48, 8, 1),
        audited(),
    ],
)
def test_an_audit_that_objects_or_counts_otherwise_is_red(report: AuditReport) -> None:
    (claim,) = failed(judge(calm(), rough(), LAKE, report))
    assert claim.startswith("The audit")


def test_a_history_with_a_hole_is_told_as_such() -> None:
    verdict = judge(calm(), a_step_nobody_made(rough()), LAKE, PROVED)
    seen = next(check.seen for check in verdict.checks if check.claim.startswith("By the loop's"))
    assert "step 9 survived, but not every rank recorded it" in seen


def test_a_run_without_any_launch_is_red() -> None:
    facts = dataclasses.replace(rough(), launches=())
    assert not judge(calm(), facts, LAKE, PROVED).green


def test_the_verdict_is_plain_json() -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(judge(calm(), rough(), LAKE, PROVED))))
    assert len(plain["checks"]) == 7 and len(plain["tokens"]) == 3
