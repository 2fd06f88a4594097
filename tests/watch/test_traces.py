"""The traces of virtual time are what their module says: pure, in order, with every kind of gap in its range."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict

import pytest

from tests.watch.traces import DAY_S, HANG_S, LONGEST_STALL_S, Gap, Why, gaps, jobs


@pytest.fixture(scope="module")
def traces() -> list[list[Gap]]:
    return [list(gaps(job, block_s=600)) for job in jobs()]


def test_a_seed_gives_the_same_jobs_and_gaps_again_and_another_seed_others() -> None:
    one, same, other = jobs(3), jobs(3), jobs(3, seed=1)
    assert one == same and one != other
    assert jobs(5)[:3] == one
    assert list(gaps(one[0], seconds=3600)) == list(gaps(same[0], seconds=3600)) != list(gaps(other[0], seconds=3600))


def test_fifty_jobs_have_steps_from_a_tenth_of_a_second_to_a_minute() -> None:
    steps = [job.step_s for job in jobs()]
    assert len(steps) == 50
    assert 0.1 <= min(steps) < 0.3 and 20 < max(steps) <= 60


def test_gaps_follow_each_other_for_a_day(traces: list[list[Gap]]) -> None:
    for trace in traces:
        assert trace[0].at == 0 and trace[0].why is Why.COMPILE
        assert all(before.end <= after.at + 1e-6 for before, after in itertools.pairwise(trace))
        assert trace[-1].at < DAY_S and trace[-1].end > DAY_S - 1_300


def test_every_kind_of_gap_happens_and_lies_in_its_range(traces: list[list[Gap]]) -> None:
    lengths = defaultdict(list)
    for gap in (gap for trace in traces for gap in trace):
        lengths[gap.why].append(gap.length)
        assert gap.length > 0
    assert set(lengths) == set(Why)
    first = [trace[0].length for trace in traces]
    assert min(first) >= 40 and 300 < max(first) <= 600
    assert max(lengths[Why.EVALUATE]) <= 2_400 and min(lengths[Why.EVALUATE]) > 10
    assert max(lengths[Why.COLLECTION]) <= 2
    assert max(lengths[Why.TABLE]) <= 900
    assert max(lengths[Why.SUSPEND]) <= 14_400
    assert max(lengths[Why.STALL]) <= LONGEST_STALL_S


def test_stalls_have_a_heavy_tail_with_some_longer_than_300_seconds(traces: list[list[Gap]]) -> None:
    stalls = [gap.length for trace in traces for gap in trace if gap.why is Why.STALL]
    assert 4 * 50 < len(stalls) < 60 * 50
    assert statistics.median(stalls) < 3
    assert any(length > 300 for length in stalls) and any(60 < length < 300 for length in stalls)


def test_only_a_hang_does_not_heal_and_the_job_compiles_again_after_it(traces: list[list[Gap]]) -> None:
    hung = [trace for trace in traces if any(not gap.heals for gap in trace)]
    assert 3 <= len(hung) <= 20
    for trace in hung:
        [at] = [index for index, gap in enumerate(trace) if not gap.heals]
        assert trace[at].why is Why.HANG and trace[at].length == HANG_S and trace[at].attempt == 0
        assert trace[at + 1].why is Why.COMPILE and trace[at + 1].attempt == 1 and trace[-1].attempt == 1


def test_a_first_evaluation_is_longer_than_any_gap_of_its_phase_before(traces: list[list[Gap]]) -> None:
    longer = 0
    for trace in traces:
        first = next(index for index, gap in enumerate(trace) if gap.why is Why.EVALUATE)
        before = [gap.length for gap in trace[:first] if gap.phase == trace[first].phase]
        longer += trace[first].length > 3 * max(before, default=0.0)
    assert longer > 40


def test_thinned_steps_keep_the_median_and_the_longest_gap() -> None:
    job = jobs()[0]
    kept = {block: _ordinary(list(gaps(job, seconds=20_000, block_s=block))) for block in (0, 60)}
    assert len(kept[60]) < len(kept[0]) or job.step_s > 30
    assert max(kept[60]) == pytest.approx(max(kept[0]), rel=0.25)
    assert statistics.median(kept[60][:-1:2]) == pytest.approx(statistics.median(kept[0]), rel=0.1)


def _ordinary(trace: list[Gap]) -> list[float]:
    return [gap.length for gap in trace if gap.why is Why.STEP and gap.phase == "backward"]


def test_a_trace_holds_each_phase_in_equal_number(traces: list[list[Gap]]) -> None:
    for trace in traces:
        steps = Counter(gap.phase for gap in trace if gap.why in (Why.STEP, Why.STRAGGLER))
        assert len(steps) == 5 and max(steps.values()) - min(steps.values()) <= 1  # the last step may be cut
