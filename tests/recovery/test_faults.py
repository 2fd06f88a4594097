"""One fault ends all ranks: the first cause is found among their notes, and the account adds up what faults cost."""

from __future__ import annotations

from itertools import permutations

import pytest

from lakeckpt.recovery.account import account_of
from lakeckpt.recovery.faults import PHASES, Fault, FaultNote, cut_off, first_cause, notes_from_text, notes_to_text
from tests.recovery.deaths import died

SYMPTOM = died(what="RuntimeError", text="[gloo] Connection closed by peer", rank=0, at_s=9.0)
TERM = died(what="SIGTERM", rank=2, at_s=9.5)
UNKNOWN = died(cause="unknown", what="", rank=3, at_s=8.0)


def test_the_first_cause_is_a_death_of_its_own_whatever_was_seen_first() -> None:
    killed = died(what="SIGKILL", rank=1, at_s=10.0)
    later = died(what="ValueError", rank=4, at_s=11.0)
    for notes in permutations((SYMPTOM, TERM, UNKNOWN, later, killed)):
        assert first_cause(notes) == killed
        assert first_cause(notes, missing=[7]) == killed


def test_without_a_cause_of_its_own_a_missing_rank_means_a_lost_node() -> None:
    found = first_cause([SYMPTOM, TERM], missing=[5, 6])
    assert (found.cause, found.rank, found.node, found.step) == ("lost node", 5, "", 8)
    assert "2 ranks" in found.text and "Connection closed by peer" in found.text and not found.is_own
    assert first_cause([SYMPTOM, TERM, UNKNOWN]) == UNKNOWN
    assert first_cause([SYMPTOM, TERM]) == TERM


@pytest.mark.parametrize(
    ("note", "is_symptom"),
    [
        (died(what="RuntimeError", text="NCCL error: remote process exited or there was a network error"), True),
        (died(what="lakeckpt.errors.MissingRanksError", text="rank 3 of 4 did not answer"), True),
        (died(what="lakeckpt.errors.SaveFailed", text="rank 1 has stopped: ValueError: x"), True),
        (died(what="torch.distributed.DistBackendError", text=""), True),
        (died(what="torch.distributed.DistBackendError", text="CUDA error: uncorrectable ECC error"), False),
        (died(what="SIGTERM"), True),
        (died(cause="exit", what="status 143"), True),
        (died(what="SystemExit", text="0"), True),
        (died(what="ValueError", text="a bad row"), False),
        (died(what="SIGSEGV"), False),
    ],
)
def test_symptoms_are_told_from_causes(note: FaultNote, is_symptom: bool) -> None:
    assert note.is_symptom == is_symptom


def test_notes_pass_as_documents_and_as_texts() -> None:
    notes = (SYMPTOM, died(batch=None), died(text="ü" * 3))
    assert notes_from_text(notes_to_text(notes)) == notes
    assert [FaultNote.from_bytes(one.to_bytes()) for one in notes] == list(notes)
    assert len(cut_off("x" * 10**6)) == 1000


def test_the_account_adds_up_phases_steps_done_again_and_saves() -> None:
    phases = {name: float(2**at) for at, name in enumerate(PHASES)}
    first = Fault(first=died(step_s=0.5, stalled_s=3.0), phases=phases, steps_again=4)
    second = Fault(first=died(), phases={"processes": 1.0})
    found = account_of([first, second], elapsed_s=1000.0)
    assert (found.perception_s, found.scheduling_s) == (1.0, 2.0 + 1.0)
    assert (found.initialization_s, found.recompute_s, found.saving_s) == (4 + 8 + 16 + 32 + 64, 2.0, 3.0)
    assert found.causes == {"code": 2}
    assert found.invalid_s == 1 + 3 + 124 + 2 + 3 and found.effective == pytest.approx(1 - 0.133)
    assert found.to_plain()["effective"] == found.effective
    stalled = account_of([first, second], elapsed_s=1000.0, stalled_s=50.0)
    assert stalled.invalid_s == found.invalid_s + 50


def test_a_run_without_time_or_faults_was_all_training() -> None:
    assert account_of([], elapsed_s=0.0).effective == account_of([], elapsed_s=9.0).effective == 1.0
