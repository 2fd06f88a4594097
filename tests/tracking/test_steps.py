"""The run-length record of frontiers gives back every one of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.tracking.steps import Frontier, StepRecord, StepRecorder, StepRun, frontier_after

FRONTIERS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6)).map(lambda t: Frontier(*t)),
    max_size=30,
)


@given(FRONTIERS, st.integers(0, 5), st.data())
def test_every_frontier_comes_back_whatever_was_forgotten(
    frontiers: list[Frontier], first: int, data: st.DataObject
) -> None:
    recorder = StepRecorder()
    for at, frontier in enumerate(frontiers):
        recorder.note(first + 1 + at, frontier)
    forgotten = data.draw(st.integers(0, len(frontiers)))
    upto = data.draw(st.integers(forgotten, len(frontiers)))
    recorder.forget(first + forgotten)
    record = recorder.record(first + upto)
    assert StepRecord.from_plain(record.to_plain()) == record
    for at, frontier in enumerate(frontiers):
        inside = forgotten <= at < upto
        assert record.frontier(first + 1 + at) == (frontier if inside else None)


def test_thousands_of_steps_in_lockstep_are_one_run() -> None:
    recorder = StepRecorder()
    for step in range(1, 5001):
        recorder.note(step, Frontier(0, 4 * step))
    assert len(recorder.record(5000).runs) == 1
    recorder.note(5001, Frontier(1, 4))
    assert len(recorder.record(5001).runs) == 2
    assert recorder.record(5001).frontier(4321) == Frontier(0, 4 * 4321)


def test_a_frontier_lies_behind_its_receipt() -> None:
    span = Span(epoch=2, start=0, stop=8)
    receipt = Receipt(epoch=2, micro_batch=5, lane=0, step=5, rank=0, world_size=1, spans=(span,), step_rows=8)
    assert frontier_after(receipt) == Frontier(2, 6)


def test_steps_of_other_processes_are_not_known_one_by_one() -> None:
    recorder = StepRecorder()
    for step in (1, 2):
        recorder.note(step, Frontier(0, step))
    recorder.jump(9, Frontier(0, 20))
    for step in (10, 11):
        recorder.note(step, Frontier(0, 11 + step))
    record = recorder.record(11)
    assert StepRecord.from_plain(record.to_plain()) == record
    assert [step for step in range(1, 12) if not record.is_known(step)] == list(range(3, 10))
    assert [record.frontier(step) for step in (2, 8, 9, 11)] == [(0, 2), None, (0, 20), (0, 22)]
    recorder.forget(9)
    assert recorder.record(11).is_known(10)


def test_a_reader_that_goes_back_by_a_step_is_no_jump() -> None:
    recorder = StepRecorder()
    recorder.note(1, Frontier(0, 5))
    recorder.note(2, Frontier(0, 4))
    recorder.forget(1)
    assert recorder.record(2).is_known(2)


def test_malformed_records_are_refused() -> None:
    with pytest.raises(ValueError, match="five integers"):
        StepRecord.from_plain([[1, 2, 3]])
    with pytest.raises(ValueError, match="follow one another"):
        StepRecord(
            runs=(
                StepRun(first=1, count=2, start=Frontier(0, 1), stride=1),
                StepRun(first=5, count=1, start=Frontier(0, 9), stride=0),
            )
        )
    with pytest.raises(ValueError, match="not a run"):
        StepRun(first=0, count=1, start=Frontier(0, 0), stride=0)
