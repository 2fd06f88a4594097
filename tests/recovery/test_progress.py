"""Deaths in a row without progress lead to higher levels; progress, and what is not the script's fault, does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.recovery.faults import FaultNote
from lakeckpt.recovery.progress import Level, level_of, own_deaths
from tests.recovery.deaths import batch_at, died

OTHER = died(what="SIGSEGV")


def does(*deaths: FaultNote) -> tuple[int, int | None, bool, bool]:
    """The level after these deaths: how many count, before which step it goes back, whether rows are blamed, whether it
    stops."""
    found = level_of(deaths)
    return found.deaths, found.go_back, found.poison is not None, found.stops


def test_one_and_two_deaths_change_nothing_that_is_restored() -> None:
    assert level_of([]) == Level()
    assert does(died()) == (1, None, False, False)
    assert does(died(), died()) == (2, None, False, False)


def test_a_micro_batch_that_kills_three_times_by_one_cause_is_named_and_the_job_stops() -> None:
    found = level_of([died(), died(), died(node="b")])
    assert (found.stops, found.poison, found.go_back) == (True, batch_at(8), None)
    assert "no restart helps" in found.said


def test_a_micro_batch_may_be_excluded_and_the_verdict_is_wrong_if_the_next_death_comes_all_the_same() -> None:
    found = level_of([died()] * 3, may_exclude=True)
    assert (found.excludes, found.stops, found.poison) == (True, False, batch_at(8)) and "excluded" in found.said
    wrong = level_of([*[died()] * 3, died(batch=batch_at(9))], may_exclude=True)
    assert wrong.stops and wrong.was_wrong and not wrong.excludes
    assert level_of([*[died()] * 3, died(9)], may_exclude=True) == Level(deaths=1)
    assert not level_of([died()] * 3).was_wrong
    assert not level_of([died(), OTHER, died()], may_exclude=True).excludes


def test_a_row_that_fails_two_times_of_three_is_never_named() -> None:
    for fails in product((True, False), repeat=7):
        deaths, row = [], 8
        for one in fails:
            deaths += [died(row)] if one else []
            row += 0 if one else 5  # it passed, and the next row of this kind comes later
        longest = max((len(run) for run in "".join("x" if one else " " for one in fails).split()), default=0)
        assert level_of(deaths).stops <= (longest > 2), fails


@pytest.mark.parametrize(
    "last",
    [
        died(what="KeyError"),
        OTHER,
        died(batch=batch_at(9)),
        died(batch=None),
        died(batch=batch_at(8, rank=1)),
        died(world=4),
    ],
)
def test_three_deaths_that_are_not_all_alike_make_the_cut_suspect(last: FaultNote) -> None:
    for deaths in ((died(), died(), last), (died(), last, died()), (last, died(), died())):
        assert does(*(replace(one, begun=7) for one in deaths)) == (3, 7, False, False)


def test_an_older_cut_is_no_progress_and_leads_to_the_checkpoint_before_and_then_to_the_end() -> None:
    deaths = [died(8), OTHER, died(8, begun=7), died(4, begun=3), died(6, begun=1)]
    assert [level_of(deaths[:count]).go_back for count in range(6)] == [None, None, None, 7, 3, None]
    assert does(*deaths) == (5, None, False, True)
    assert "the newest checkpoint before step 7 is restored" in level_of(deaths[:3]).said


def test_a_step_beyond_all_deaths_before_resets_everything() -> None:
    for count in range(1, 5):
        assert does(*[OTHER, died()][:1] * count, died(9)) == (1, None, False, False)
    assert does(died(8), died(4), died(5, begun=3)) == (3, 3, False, False)  # 5 is beyond 4, and not beyond 8


@pytest.mark.parametrize(
    "spared",
    [
        died(what="SIGTERM"),
        died(what="SIGINT"),
        died(what="KeyboardInterrupt"),
        died(cause="lost node"),
        died(cause="unknown", what=""),
        died(what="lakeckpt.errors.SaveFailed"),
        died(what="lakeckpt.errors.StorageError"),
        died(what="RuntimeError", text="Connection closed by peer [127.0.0.1]:4711"),
    ],
)
def test_deaths_by_orders_lost_nodes_and_storage_roll_back_nothing(spared: FaultNote) -> None:
    assert does(*[spared] * 9) == (0, None, False, False)
    assert does(died(), spared, died(), *[spared] * 3) == (2, None, False, False)


def test_a_spared_death_that_made_progress_resets_too() -> None:
    assert does(died(), died(), died(9, what="SIGTERM"), died(9)) == (1, None, False, False)


def on(node: str, what: str = "SIGSEGV", step: int = 8) -> FaultNote:
    return died(step, what=what, node=node, batch=None)


def test_a_node_with_three_of_the_last_four_deaths_leaves_if_enough_others_are_there() -> None:
    deaths = [on("b"), on("a"), on("b"), on("b")]
    assert level_of(deaths, nodes=3, least_nodes=2).leaves == "b"
    assert level_of(deaths, nodes=2, least_nodes=1).leaves == "b"
    assert level_of(deaths, nodes=2, least_nodes=2).leaves == ""
    assert level_of(deaths, nodes=3).leaves == ""
    assert level_of(deaths[:2], nodes=3, least_nodes=1).leaves == ""


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8), st.integers(1, 3))
def test_on_one_node_nothing_leaves(names: list[str], least: int) -> None:
    assert level_of([on(name) for name in names], nodes=1, least_nodes=least).leaves == ""


def test_exceptions_of_python_are_not_the_nodes_fault() -> None:
    deaths = [on("b"), on("b", what="ValueError"), on("b")]
    assert level_of(deaths, nodes=4, least_nodes=1).leaves == ""


def test_an_exception_whose_text_names_a_fault_of_the_node_is_the_nodes() -> None:
    damaged = died(what="RuntimeError", text="CUDA error: uncorrectable ECC error encountered", node="b", batch=None)
    assert level_of([on("b"), damaged, on("b")], nodes=4, least_nodes=1).leaves == "b"


NOTES = st.builds(
    died,
    st.integers(0, 12),
    st.sampled_from(["ValueError", "SIGSEGV", "SIGTERM", "StorageError"]),
    node=st.sampled_from("ab"),
)


@given(st.lists(NOTES, max_size=12))
def test_deaths_count_from_the_last_step_that_was_new(deaths: list[FaultNote]) -> None:
    new = [at for at, one in enumerate(deaths) if all(one.step > other.step for other in deaths[:at])]
    counted = [one for one in deaths[new[-1] :] if one.is_own] if new else []
    found = level_of(deaths)
    assert own_deaths(deaths) == counted and found.deaths == len(counted)
    assert found.stops or (found.go_back is not None) == (found.deaths in (3, 4))
    assert Level.from_text(found.to_text()) == found


@given(st.lists(NOTES, max_size=12), st.integers(13, 20))
def test_a_job_that_comes_on_is_never_rolled_back(deaths: list[FaultNote], step: int) -> None:
    assert level_of([*deaths, died(step)]).deaths == 1
