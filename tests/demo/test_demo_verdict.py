"""The verdict is green for an exact history and red for each way in which one can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from lakeckpt.cli.demo.facts import facts_of
from lakeckpt.cli.demo.lake import LakeFacts
from lakeckpt.cli.demo.page import write_page
from lakeckpt.cli.demo.picture import draw
from lakeckpt.cli.demo.records import Launch, Step
from lakeckpt.cli.demo.scenario import DemoConfig, Fault, Phase
from lakeckpt.cli.demo.supervise import Death, Outcome
from lakeckpt.cli.demo.verdict import Audit, JobFacts, Verdict, judge

ROWS = 96
LAKE = np.arange(ROWS, dtype=np.int64)
CLEAN = Audit(exactly_once=True, lost=0, repeated=0, words="")


def step(number: int, launch: int, ranks: int, *, per_step: int = 8, at: float = 0.0) -> Step:
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
        began=at,
        ended=at + 0.5,
        digest=f"digest {number}",
    )


def launch(number: int, ranks: int, restored: int, last: int, *, final: bool = False) -> Launch:
    steps = {n: step(n, number, ranks, at=100.0 * number + n) for n in range(restored + 1, last + 1)}
    return Launch(
        launch=number,
        world_size=ranks,
        workers=1,
        restored=restored,
        ready=100.0 * number,
        steps=steps,
        furthest=last,
        cut_seconds=dict.fromkeys(steps, 0.01),
        final={"loss": 2.5, "step": last, "parameters": 10, "weights": "w"} if final else None,
    )


def job(launches: Sequence[Launch], faults: Sequence[Fault], audit: Audit = CLEAN) -> JobFacts:
    phases = [
        Phase(world_size=one.world_size, workers=one.workers, fault=fault)
        for one, fault in zip(launches, [*faults, None], strict=True)
    ]
    config = DemoConfig(
        lake="lake",
        checkpoints="checkpoints",
        records="records",
        epochs=2,
        batch_size=2,
        save_every=4,
        num_lanes=8,
        seed=7,
        learning_rate=0.01,
        steps_per_epoch=12,
        phases=tuple(phases),
    )
    deaths = tuple(
        Death(launch=number, fault=fault, killed=90.0 + 100 * number, noticed=91.0 + 100 * number, processes=1)
        for number, fault in enumerate(faults)
    )
    launched = tuple(100.0 * number - 5 for number in range(len(launches)))
    outcome = Outcome(deaths=deaths, launched=launched, began=-5.0, ended=100.0 * len(launches))
    return JobFacts(config=config, outcome=outcome, launches=tuple(launches), audit=audit)


FAULTS = (Fault(rank=1, step=7, point="before-update"), Fault(rank=0, step=15, point="before-cut"))


def calm() -> JobFacts:
    return job([launch(0, 2, 0, 24, final=True)], [])


def rough() -> JobFacts:
    return job([launch(0, 2, 0, 6), launch(1, 2, 4, 15), launch(2, 4, 12, 24, final=True)], FAULTS)


def with_launch(facts: JobFacts, number: int, change: Callable[[Launch], Launch]) -> JobFacts:
    launches = [change(one) if one.launch == number else one for one in facts.launches]
    return dataclasses.replace(facts, launches=tuple(launches))


def with_step(number: int, change: Callable[[Step], Step]) -> Callable[[Launch], Launch]:
    return lambda one: dataclasses.replace(one, steps={**one.steps, number: change(one.steps[number])})


def failed(verdict: Verdict) -> list[str]:
    return [check.claim for check in verdict.checks if not check.holds]


def test_an_exact_history_is_green() -> None:
    verdict = judge(calm(), rough(), LAKE)
    assert failed(verdict) == []
    assert verdict.green
    assert (verdict.equal_steps, verdict.unchanged_steps) == (12, 12)
    assert verdict.loss_difference_stable == pytest.approx(1e-7)


def test_costs_are_told_fault_by_fault() -> None:
    first, second = judge(calm(), rough(), LAKE).faults
    assert (first.restored, first.recomputed_steps, second.restored, second.recomputed_steps) == (4, 2, 12, 3)
    assert (first.notice_s, first.restart_s, first.recompute_s) == (1.0, 9.0, 6.5)
    assert first.lost_s == 16.5
    assert (second.before, second.after) == ("2 ranks × 1 worker", "4 ranks × 1 worker")


def test_overhead_is_the_cuts_share_of_the_rest() -> None:
    verdict = judge(calm(), rough(), LAKE)
    assert (verdict.saves, round(verdict.training_s, 6)) == (6, 24.51)
    assert verdict.overhead == pytest.approx(0.24 / (24.51 - 0.24))


def lost_a_row(facts: JobFacts) -> JobFacts:
    less = with_step(3, lambda one: dataclasses.replace(one, rows={**one.rows, 1: one.rows[1][1:]}))
    return with_launch(facts, 0, less)


def repeated_a_row(facts: JobFacts) -> JobFacts:
    twice = with_step(20, lambda one: dataclasses.replace(one, rows={**one.rows, 0: (*one.rows[0], one.rows[0][0])}))
    return with_launch(facts, 2, twice)


def other_weights(facts: JobFacts) -> JobFacts:
    return with_launch(facts, 1, with_step(11, lambda one: dataclasses.replace(one, digest="other")))


def other_loss(facts: JobFacts) -> JobFacts:
    return with_launch(facts, 1, with_step(11, lambda one: dataclasses.replace(one, loss=one.loss * (1 + 1e-15))))


def rows_in_another_order(facts: JobFacts) -> JobFacts:
    swapped = with_step(11, lambda one: dataclasses.replace(one, rows={0: one.rows[1], 1: one.rows[0]}))
    return with_launch(facts, 1, swapped)


def other_rows_in_a_stable_step(facts: JobFacts) -> JobFacts:
    a, b = (facts.launches[2].steps[number] for number in (20, 21))
    facts = with_launch(facts, 2, with_step(20, lambda one: dataclasses.replace(one, rows=b.rows)))
    return with_launch(facts, 2, with_step(21, lambda one: dataclasses.replace(one, rows=a.rows)))


def a_step_nobody_made(facts: JobFacts) -> JobFacts:
    return with_launch(
        facts,
        1,
        lambda one: dataclasses.replace(
            one, steps=MappingProxyType({number: value for number, value in one.steps.items() if number != 9})
        ),
    )


def a_fault_that_never_struck(facts: JobFacts) -> JobFacts:
    return dataclasses.replace(facts, outcome=dataclasses.replace(facts.outcome, deaths=facts.outcome.deaths[:1]))


def an_end_that_never_came(facts: JobFacts) -> JobFacts:
    return with_launch(facts, 2, lambda one: dataclasses.replace(one, final=None))


def an_audit_that_objects(facts: JobFacts) -> JobFacts:
    return dataclasses.replace(facts, audit=Audit(exactly_once=False, lost=0, repeated=3, words=""))


@pytest.mark.parametrize(
    ("damage", "claim"),
    [
        (lost_a_row, "Ids that the training loop itself recorded"),
        (repeated_a_row, "Ids that the training loop itself recorded"),
        (other_weights, "bitwise"),
        (other_loss, "bitwise"),
        (rows_in_another_order, "bitwise"),
        (other_rows_in_a_stable_step, "divide the lanes"),
        (a_step_nobody_made, "Ids that the training loop itself recorded"),
        (a_fault_that_never_struck, "Every fault struck"),
        (an_end_that_never_came, "Every fault struck"),
        (an_audit_that_objects, "Audit of the ledger"),
    ],
)
def test_each_way_to_be_wrong_is_red_and_named(damage: Callable[[JobFacts], JobFacts], claim: str) -> None:
    verdict = judge(calm(), damage(rough()), LAKE)
    assert not verdict.green
    assert any(claim in one for one in failed(verdict)), failed(verdict)


def test_a_reference_that_is_not_exact_is_red() -> None:
    verdict = judge(lost_a_row(calm()), rough(), LAKE)
    assert any("fault-free run, that all this is compared with" in one for one in failed(verdict))


def test_a_history_with_a_hole_is_told_as_such() -> None:
    verdict = judge(calm(), a_step_nobody_made(rough()), LAKE)
    seen = next(check.seen for check in verdict.checks if check.claim.startswith("Ids that"))
    assert "step 9 survived, but not every rank recorded it" in seen


def test_a_run_without_any_launch_is_red() -> None:
    facts = dataclasses.replace(rough(), launches=())
    assert not judge(calm(), facts, LAKE).green


@pytest.mark.parametrize("damage", [None, lost_a_row, an_end_that_never_came])
def test_the_page_needs_nothing_else_and_says_the_verdict(
    damage: Callable[[JobFacts], JobFacts] | None, tmp_path: Path
) -> None:
    reference, faulted = calm(), rough() if damage is None else damage(rough())
    verdict = judge(reference, faulted, LAKE)
    assert draw(tmp_path / "loss.png", reference, faulted, verdict.faults, ROWS)
    lake = LakeFacts(
        folder=tmp_path,
        sources=3,
        text_bytes=100,
        rows=ROWS,
        block=1,
        files=2,
        row_groups=4,
        smallest_group=1,
        largest_group=50,
        file_bytes=200,
    )
    facts = dataclasses.replace(facts_of(lake, faulted, verdict, 12.0), summary="<script>&")
    write_page(tmp_path / "index.html", tmp_path / "loss.png", verdict, facts, faulted)
    page = (tmp_path / "index.html").read_text()
    assert ("Verdict: green" in page) == verdict.green == (damage is None)
    assert "&lt;script&gt;&amp;" in page
    assert not any(word in page for word in ("<script", "http://", "https://", "@import", "url("))
    assert page.count("<circle") == len(faulted.outcome.deaths)


def test_no_picture_is_drawn_of_runs_that_left_no_history(tmp_path: Path) -> None:
    assert not draw(tmp_path / "loss.png", calm(), a_step_nobody_made(rough()), (), ROWS)
    assert not (tmp_path / "loss.png").exists()


def test_the_verdict_is_plain_json() -> None:
    plain = json.loads(json.dumps(judge(calm(), rough(), LAKE).to_plain()))
    assert plain["green"] is True and len(plain["faults"]) == 2
