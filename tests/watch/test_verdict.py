"""The verdict on looks: each rule names the right ranks, the kind and the reason, and nobody who moves is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.watch.looks import GpuLook, ProcessLook, RankLook
from lakeckpt.watch.verdict import StallVerdict, judge
from tests.watch.made import entered, in_script, job, looked


def judged(looks: dict[int, RankLook], before: dict[int, RankLook] | None = None, **options: Any) -> StallVerdict:
    verdict = judge(before or looks, looks, world=4, **options)
    assert verdict is not None
    return verdict


def process(state: str = "S", **changes: Any) -> ProcessLook:
    return ProcessLook(pid=102, name="python", state=state, **changes)


def test_ranks_that_move_between_two_looks_stand_still_for_nobody() -> None:
    first = job()
    assert judge(first, {**first, 1: replace(first[1], beats=8)}, world=4) is None


@given(moving=st.integers(0, 3), odd=st.integers(0, 3), stopped=st.booleans())
def test_nobody_is_blamed_while_any_rank_moves(moving: int, odd: int, stopped: bool) -> None:
    looks = job()
    looks[odd] = replace(looks[odd], threads=in_script(), process=process("T" if stopped else "S"))
    assert judge({**looks, moving: replace(looks[moving], beats=6)}, looks, world=4) is None


def test_the_first_to_die_is_to_blame() -> None:
    looks = job(_1={"ended": 30.0}, _2={"ended": 20.0, "error": "signal SIGKILL"}, _3={"ended": 40.0})
    verdict = judged(looks)
    assert (verdict.ranks, verdict.kind, verdict.certainty) == ((2,), "dead", "certain")
    assert verdict.reason == "rank 2 was the first to end: signal SIGKILL"


def test_a_rank_whose_page_is_gone_has_left() -> None:
    looks = job()
    del looks[3]
    verdict = judged(looks, here=range(4))
    assert (verdict.ranks, verdict.kind) == ((3,), "out of step")


def test_a_node_that_says_nothing_is_named_by_its_ranks() -> None:
    looks = job()
    del looks[2], looks[3]
    verdict = judged(looks, here=(0, 1))
    assert (verdict.ranks, verdict.kind, verdict.certainty) == ((2, 3), "network", "still")


def test_a_stopped_rank_is_named_and_a_job_that_is_stopped_or_debugged_is_paused() -> None:
    one = judged(job(_2={"process": process("T")}))
    assert (one.ranks, one.kind, one.certainty) == ((2,), "stopped", "certain")
    every = judged({rank: looked(rank, process=process("T")) for rank in range(4)})
    debugged = judged(job(_2={"process": process("t", tracer=77)}))
    assert (every.ranks, every.certainty) == (debugged.ranks, debugged.certainty) == ((), "paused")


@pytest.mark.parametrize("phase", ["data", "save", "closing"])
def test_a_wait_of_all_ranks_for_data_and_a_long_save_are_work(phase: str) -> None:
    odd = {"phase": phase, "threads": in_script(), "process": process(waits="sleep")}
    verdict = judged({rank: looked(rank, **odd) for rank in range(4)})
    assert (verdict.ranks, verdict.certainty) == (
        (0, 1, 2, 3),
        "works",
    ) and f"all ranks are in {phase}" in verdict.reason
    one = judged({rank: looked(rank, **(odd if rank == 1 else {})) for rank in range(4)})
    assert one.ranks == (1,) and one.certainty != "works"


def test_the_log_and_the_gpu_of_the_culprit_are_told() -> None:
    before = replace(process(waits="sleep"), log="/logs/2/stderr.log", log_bytes=7)
    odd: dict[str, Any] = {"threads": in_script(), "gpu": GpuLook(index=2, use_percent=0, watts=61)}
    for size, how in ((7, "does not grow"), (8, "grows")):
        first, second = (job(_2={**odd, "process": replace(before, log_bytes=one)}) for one in (7, size))
        verdict = judge(first, second, world=4)
        assert verdict is not None and (verdict.ranks, verdict.kind) == ((2,), "sleep")
        assert verdict.reason.endswith(f"; its log /logs/2/stderr.log {how}; its GPU 2 is used at 0 %, with 61 W")


def test_if_all_ranks_do_the_same_outside_of_a_collective_none_of_them_holds_up_the_others() -> None:
    odd = {"threads": in_script(), "process": process(waits="sleep")}
    verdict = judged({rank: looked(rank, **odd) for rank in range(4)})
    assert (verdict.ranks, verdict.kind, verdict.certainty) == ((0, 1, 2, 3), "sleep", "works")


def test_a_rank_that_saves_for_the_last_time_has_left_its_loop() -> None:
    verdict = judged(job(_0={"phase": "closing"}))
    assert (verdict.ranks, verdict.kind, verdict.certainty) == ((0,), "out of step", "certain")


@pytest.mark.parametrize(
    ("taken", "culprits"),
    [
        ([(1, 1), (2, 2), (3, 4), (4, 5), (5, 6)], (2,)),  # one more, from step 3 on
        ([(1, 1), (2, 2), (3, 4), (4, 5)], ()),  # not for three steps yet
        ([(1, 9), (2, 10), (3, 11), (4, 12), (5, 13)], ()),  # always so many more
        ([(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)], ()),  # two a step, by design
    ],
)
def test_a_rank_that_takes_a_micro_batch_more_is_out_of_step(
    taken: list[tuple[int, int]], culprits: tuple[int, ...]
) -> None:
    usual = tuple((step, step) for step, _ in taken)
    looks = {rank: looked(rank, taken=usual) for rank in range(4)}
    looks[2] = replace(looks[2], taken=tuple(taken))
    verdict = judged(looks)
    assert (verdict.ranks if verdict.kind == "out of step" else ()) == culprits


def test_ranks_that_lack_a_collective_hold_up_those_in_it_and_one_in_another_does_not_match() -> None:
    looks = {rank: looked(rank, recorded=entered(9)) for rank in range(4)}
    looks[1] = replace(looks[1], recorded=entered(8, done=True), threads=in_script(), process=process(waits="sleep"))
    held = judged(looks)
    assert (held.ranks, held.kind) == ((1,), "sleep") and "all_reduce no. 9" in held.reason
    looks[1] = replace(looks[1], recorded=entered(9, "all_gather", "[[3]]"))
    other = judged(looks)
    assert (other.ranks, other.kind, other.certainty) == ((1,), "mismatch", "certain")
    assert "rank 1 is in all_gather [[3]] no. 9, the others in all_reduce [[8]] no. 9" in other.reason


def test_ranks_that_wait_for_each_other_in_different_groups_are_a_cycle() -> None:
    looks = {rank: looked(rank) for rank in range(4)}
    for rank, ahead in ((0, "a"), (1, "b")):
        recorded = tuple(replace(entered(9 if group == ahead else 8)[0], group=group) for group in ("a", "b"))
        looks[rank] = replace(looks[rank], recorded=tuple(replace(one, members=(0, 1)) for one in recorded))
    verdict = judged(looks)
    assert (verdict.ranks, verdict.kind, verdict.certainty) == ((0, 1), "cycle", "certain")


def test_all_ranks_in_one_collective_blame_the_network_and_no_rank() -> None:
    for looks in (job(), {rank: looked(rank, recorded=entered(9)) for rank in range(4)}):
        verdict = judged(looks)
        assert (verdict.ranks, verdict.kind) == ((), "network")


@pytest.mark.parametrize(
    ("seen", "kind", "reason"),
    [
        ({"waits": "socket", "waits_on": "10.0.0.7:443"}, "socket", "waits for 10.0.0.7:443"),
        ({"waits": "pipe", "waits_on": "pipe:[9]"}, "pipe", "waits for pipe:[9]"),
        ({"waits": "lock", "waits_on": "a lock on /a, held by process 9"}, "file", "waits for a lock on /a"),
        ({"waits": "sleep"}, "sleep", "sleeps"),
        ({"waits": "child"}, "child", "waits for a child process"),
        ({"waits": "futex"}, "lock", "waits for a lock"),
        ({"state": "D", "waits": "disk", "waits_on": "io_schedule"}, "disk", "waits for a disk (io_schedule)"),
        ({"state": "R"}, "loop", "computes"),
    ],
)
def test_the_reason_of_a_rank_in_its_script_comes_from_its_process(
    seen: dict[str, Any], kind: str, reason: str
) -> None:
    verdict = judged(job(_2={"threads": in_script(), "process": process(**{"state": "S", **seen})}))
    assert (verdict.ranks, verdict.kind) == ((2,), kind)
    assert verdict.certainty == ("works" if kind == "loop" else "still")
    assert f"rank 2 {reason}" in verdict.reason and "at fetch (/home/me/train.py:7) in compute" in verdict.reason


def test_a_rank_that_waits_while_its_child_has_ended_is_told_so() -> None:
    dead = ProcessLook(pid=55, name="worker", state="Z")
    odd = {"threads": in_script(), "process": process(waits="futex"), "children": (dead,)}
    assert judged(job(_2=odd)).kind == "child"
    assert judged(job(_2={**odd, "phase": "data"})).kind == "worker"


def test_a_rank_that_switches_often_between_the_looks_works() -> None:
    first = job(_2={"threads": in_script(), "process": process(waits="socket", waits_on="a:1", switches=5)})
    second = {**first, 2: replace(first[2], process=process(waits="socket", waits_on="a:1", switches=400))}
    assert judged(second, first).certainty == "works"
    assert judged(first, first).certainty == "still"


def test_another_line_in_a_collective_than_the_others_does_not_match() -> None:
    looks = job()
    thread = looks[2].threads[0]
    other = replace(thread.frames[0], function="all_gather", line=70)
    looks[2] = replace(looks[2], threads=(replace(thread, frames=(other, *thread.frames[1:])),))
    verdict = judged(looks)
    assert (verdict.ranks, verdict.kind, verdict.certainty) == ((2,), "mismatch", "certain")


def test_without_stacks_the_rank_that_computes_is_named() -> None:
    looks = {rank: looked(rank, threads=()) for rank in range(4)}
    looks[3] = replace(looks[3], process=process("R"))
    assert judged(looks).ranks == (3,)
