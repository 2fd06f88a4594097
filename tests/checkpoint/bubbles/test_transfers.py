"""A thread is told of its own waits, as long as it asks to be; then torch's function is torch's own again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from lakeckpt.checkpoint.bubbles import transfers
from lakeckpt.checkpoint.bubbles.transfers import can_be_told, told_of_waits


class Work:
    """Knows whether it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def telling(told: list[str], name: str) -> Callable[[Callable[[], Any]], Any]:
    def tell(wait: Callable[[], Any]) -> Any:
        told.append(f"{name} begins")
        found = wait()
        told.append(f"{name} ends")
        return found

    return tell


def test_the_wait_happens_within_what_is_told() -> None:
    assert can_be_told()
    original, work, told = schedules._wait_batch_p2p, Work(), list[str]()
    with told_of_waits(telling(told, "one")):
        schedules._wait_batch_p2p([work])
    assert (work.waited, told) == (1, ["one begins", "one ends"])
    assert schedules._wait_batch_p2p is original
    schedules._wait_batch_p2p([work])
    assert (work.waited, len(told)) == (2, 2)


def test_nothing_is_told_where_there_is_nothing_to_wait_for() -> None:
    told = list[str]()
    with told_of_waits(telling(told, "one")):
        schedules._wait_batch_p2p([])
    assert told == []


def test_another_thread_is_not_told_and_waits_all_the_same() -> None:
    work, told = Work(), list[str]()
    with told_of_waits(telling(told, "one")):
        thread = threading.Thread(target=lambda: schedules._wait_batch_p2p([work]))
        thread.start()
        thread.join()
    assert (work.waited, told) == (1, [])


def test_of_two_watches_of_a_thread_the_inner_one_is_told() -> None:
    told, work = list[str](), Work()
    with told_of_waits(telling(told, "outer")):
        with told_of_waits(telling(told, "inner")):
            schedules._wait_batch_p2p([work])
        schedules._wait_batch_p2p([work])
    assert told == ["inner begins", "inner ends", "outer begins", "outer ends"]


def test_a_wait_that_fails_leaves_torch_as_it_was() -> None:
    class Fails(Work):
        def wait(self) -> None:
            raise RuntimeError("the neighbour is gone")

    original = schedules._wait_batch_p2p
    with pytest.raises(RuntimeError, match="gone"), told_of_waits(telling([], "one")):
        schedules._wait_batch_p2p([Fails()])
    assert schedules._wait_batch_p2p is original


def test_what_somebody_else_put_in_its_place_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_wait_batch_p2p", schedules._wait_batch_p2p)  # puts it back at the end

    def theirs(work: Any) -> None:
        """Another one's."""

    with told_of_waits(telling([], "one")):
        schedules._wait_batch_p2p = theirs
    assert schedules._wait_batch_p2p is theirs


def test_a_torch_without_the_function_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_WAIT", "_no_such_function")
    assert not can_be_told()
