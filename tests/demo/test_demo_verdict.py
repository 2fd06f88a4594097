"""The verdict is green for an exact history and red for each way in which one can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from types import MappingProxyType

import numpy as np
import pytest

from lakeckpt.demo.records import Launch, Step
from lakeckpt.demo.scenario import DemoConfig, Fault, Phase
from lakeckpt.demo.supervise import Death
from lakeckpt.demo.verdict import Check, Job, Verdict, judge

ROWS = 96
LAKE = np.arange(ROWS, dtype=np.int64)
CLEAN = Check(claim="By the audit", holds=True, seen="")


def step(number: int, launch: int, ranks: int, *, per_step: int = 8) -> Step:
    """Step ``number`` of an epoch of 12 steps of 8 rows, dealt to ``ranks`` ranks."""
    first = (number - 1) * per_step
    ids = [(first + i) % ROWS for i in range(per_step)]
    rows = {rank: tuple(ids[rank::ranks]) for rank in range(ranks)}
    loss = 5.0 - number / 10 + (1e-7 if ranks > 2 else 0.0)
    return Step(
        launch=launch,
        step=number,
        epoch=first // ROWS,
        rows=rows,
        loss=loss,
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


def job(launches: Sequence[Launch], faults: Sequence[Fault]) -> Job:
    phases = [
        Phase(world_size=one.world_size, workers=1, fault=fault)
        for one, fault in zip(launches, [*faults, None], strict=True)
    ]
    config = DemoConfig(lake="lake", folder="folder", steps_per_epoch=12, save_every=4, phases=tuple(phases))
    deaths = tuple(Death(fault=fault, processes=1) for fault in faults)
    return Job(config=config, deaths=deaths, launches=tuple(launches))


FAULTS = (Fault(rank=1, step=7, point="before-update"), Fault(rank=0, step=15, point="before-cut"))


def calm() -> Job:
    return job([launch(0, 2, 0, 24, ended=True)], [])


def rough() -> Job:
    return job([launch(0, 2, 0, 6), launch(1, 2, 4, 15), launch(2, 4, 12, 24, ended=True)], FAULTS)


def with_launch(facts: Job, number: int, change: Callable[[Launch], Launch]) -> Job:
    launches = [change(one) if one.launch == number else one for one in facts.launches]
    return dataclasses.replace(facts, launches=tuple(launches))


def with_step(number: int, change: Callable[[Step], Step]) -> Callable[[Launch], Launch]:
    return lambda one: dataclasses.replace(one, steps={**one.steps, number: change(one.steps[number])})


def failed(verdict: Verdict) -> list[str]:
    return [check.claim for check in verdict.checks if not check.holds]


def test_an_exact_history_is_green() -> None:
    verdict = judge(calm(), rough(), LAKE, CLEAN)
    assert failed(verdict) == []
    assert verdict.green
    assert any("12 of 12 steps are equal" in check.seen for check in verdict.checks)
    assert any("differ by at most 1.0e-07" in check.seen for check in verdict.checks)


def lost_a_row(facts: Job) -> Job:
    less = with_step(3, lambda one: dataclasses.replace(one, rows={**one.rows, 1: one.rows[1][1:]}))
    return with_launch(facts, 0, less)


def repeated_a_row(facts: Job) -> Job:
    twice = with_step(20, lambda one: dataclasses.replace(one, rows={**one.rows, 0: (*one.rows[0], one.rows[0][0])}))
    return with_launch(facts, 2, twice)


def other_weights(facts: Job) -> Job:
    return with_launch(facts, 1, with_step(11, lambda one: dataclasses.replace(one, digest="other")))


def other_loss(facts: Job) -> Job:
    return with_launch(facts, 1, with_step(11, lambda one: dataclasses.replace(one, loss=one.loss * (1 + 1e-15))))


def rows_in_another_order(facts: Job) -> Job:
    swapped = with_step(11, lambda one: dataclasses.replace(one, rows={0: one.rows[1], 1: one.rows[0]}))
    return with_launch(facts, 1, swapped)


def other_rows_in_a_stable_step(facts: Job) -> Job:
    a, b = (facts.launches[2].steps[number] for number in (20, 21))
    facts = with_launch(facts, 2, with_step(20, lambda one: dataclasses.replace(one, rows=b.rows)))
    return with_launch(facts, 2, with_step(21, lambda one: dataclasses.replace(one, rows=a.rows)))


def a_step_nobody_made(facts: Job) -> Job:
    return with_launch(
        facts,
        1,
        lambda one: dataclasses.replace(
            one, steps=MappingProxyType({number: value for number, value in one.steps.items() if number != 9})
        ),
    )


def a_fault_that_never_struck(facts: Job) -> Job:
    return dataclasses.replace(facts, deaths=facts.deaths[:1])


def an_end_that_never_came(facts: Job) -> Job:
    return with_launch(facts, 2, lambda one: dataclasses.replace(one, ended=False))


@pytest.mark.parametrize(
    ("damage", "claim"),
    [
        (lost_a_row, "By the ids"),
        (repeated_a_row, "By the ids"),
        (other_weights, "bitwise"),
        (other_loss, "bitwise"),
        (rows_in_another_order, "bitwise"),
        (other_rows_in_a_stable_step, "divide the lanes"),
        (a_step_nobody_made, "By the ids"),
        (a_fault_that_never_struck, "Every fault happened"),
        (an_end_that_never_came, "Every fault happened"),
    ],
)
def test_each_way_to_be_wrong_is_red_and_named(damage: Callable[[Job], Job], claim: str) -> None:
    verdict = judge(calm(), damage(rough()), LAKE, CLEAN)
    assert not verdict.green
    assert any(claim in one for one in failed(verdict)), failed(verdict)


def test_a_reference_that_is_not_exact_is_red() -> None:
    verdict = judge(lost_a_row(calm()), rough(), LAKE, CLEAN)
    assert any("fault-free run is exact" in one for one in failed(verdict))


def test_an_audit_that_objects_is_red() -> None:
    objection = dataclasses.replace(CLEAN, holds=False)
    assert failed(judge(calm(), rough(), LAKE, objection)) == ["By the audit"]


def test_a_history_with_a_hole_is_told_as_such() -> None:
    verdict = judge(calm(), a_step_nobody_made(rough()), LAKE, CLEAN)
    seen = next(check.seen for check in verdict.checks if check.claim.startswith("By the ids"))
    assert "step 9 survived, but not every rank recorded it" in seen


def test_a_run_without_any_launch_is_red() -> None:
    facts = dataclasses.replace(rough(), launches=())
    assert not judge(calm(), facts, LAKE, CLEAN).green


def test_the_verdict_is_plain_json() -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(judge(calm(), rough(), LAKE, CLEAN))))
    assert len(plain["checks"]) == 6 and len(plain["rows"]) == 2
