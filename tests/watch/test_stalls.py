"""Stalls are documents, and a node whose ranks had to be ended twice in a day is to be avoided."""

from __future__ import annotations

from dataclasses import replace

from lakeckpt.watch.stalls import NodeLooks, Stall, nodes_to_avoid
from lakeckpt.watch.verdict import StallVerdict
from tests.watch.made import looked


def stall(began_s: float, *ranks: int, acted: bool = True) -> Stall:
    verdict = StallVerdict(ranks=ranks, kind="socket", reason="it waits", certainty="still")
    looks = tuple(looked(rank, node="ab"[rank // 2]) for rank in range(4))
    times = {"began_s": began_s, "perceived_s": began_s + 4, "ended_s": began_s + 9}
    return Stall(attempt=1, verdict=verdict, step=12, acted=acted, looks=looks, **times)


def test_a_stall_and_looks_come_back_from_their_documents() -> None:
    one = stall(100.0, 2)
    assert Stall.from_bytes(one.to_bytes()) == one and one.length_s == 9
    assert one.to_plain("watch/x")["ranks"] == [2] and one.to_plain("watch/x")["evidence"] == "watch/x"
    looks = NodeLooks(here=(0, 1), step=12, first=one.looks, second=one.looks)
    assert NodeLooks.from_bytes(looks.to_bytes()) == looks


def test_a_node_is_avoided_after_two_acts_in_a_day_on_ranks_of_its_own() -> None:
    day = 86_400.0
    found = nodes_to_avoid([stall(day, 2), stall(day + 50, 3)], now_s=day + 90)
    assert list(found) == ["b"] and "2 times in a day: it waits" in found["b"]
    for others in (
        [stall(day, 2)],
        [stall(day, 2), stall(day, 0)],
        [stall(day, 2), stall(day + 50, 3, acted=False)],
        [stall(day, 1, 2), stall(day + 50, 1, 2)],
        [stall(5.0, 2), replace(stall(day, 3), began_s=day)],
    ):
        assert nodes_to_avoid(others, now_s=day + 90) == {}
