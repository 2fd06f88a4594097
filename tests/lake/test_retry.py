"""How long a call to a store is tried: until its time is over, and shorter while the store is known to be away."""

from __future__ import annotations

from typing import NoReturn

import pytest

from lakeckpt.errors import ObjectMissing, StorageError
from lakeckpt.lake.storage.retry import Deadlines, Retrier, Retryable


class Outage:
    """A store that refuses every connection at once until ``ends_s``, and a clock that moves only in pauses."""

    def __init__(self, ends_s: float) -> None:
        self.ends_s, self.now_s = ends_s, 0.0

    def attempt(self) -> int:
        if self.now_s < self.ends_s:
            raise Retryable("connection refused", errno=111)
        return 7

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def retrier(self, **deadlines: float) -> Retrier:
        limits = Deadlines(**deadlines)  # type: ignore[arg-type]
        return Retrier(limits, clock=lambda: self.now_s, sleep=self.sleep, draw=lambda: 1.0)


@pytest.mark.parametrize("length_s", [0.05, 6.0, 12.0, 50.0])
def test_a_call_outlasts_refused_connections_for_its_whole_time(length_s: float) -> None:
    outage = Outage(length_s)
    assert outage.retrier().call("cannot read", outage.attempt) == 7
    assert outage.now_s < length_s + 5.01


def test_a_call_ends_when_its_time_is_over() -> None:
    outage = Outage(1e9)
    with pytest.raises(StorageError, match=r"connection refused \(\d+ attempts in .* of 60.0 s\)"):
        outage.retrier().call("cannot read", outage.attempt)
    assert 55.0 <= outage.now_s <= 60.0


def test_calls_after_one_that_failed_take_at_most_a_ninth_of_the_time_since_and_the_time_of_one_attempt() -> None:
    outage = Outage(1e9)
    retrier = outage.retrier()
    for wait_s, most_s in ((0.0, 60.0), (0.0, 0.0), (9.0, 1.0), (63.0, 7.0), (300.0, 15.0), (900.0, 15.0)):
        outage.now_s += wait_s
        begun_s = outage.now_s
        with pytest.raises(StorageError):
            retrier.call("cannot read", outage.attempt)
        assert outage.now_s - begun_s <= most_s


def test_a_store_that_hangs_is_asked_once_by_calls_after_one_that_failed() -> None:
    outage = Outage(1e9)
    retrier, asked = outage.retrier(), list[float]()

    def hangs() -> NoReturn:
        asked.append(outage.now_s)
        outage.now_s += 15.0
        raise Retryable("no whole answer in time", errno=110)

    for wait_s, attempts in ((0.0, 4), (20.0, 1), (300.0, 1), (900.0, 1)):
        outage.now_s += wait_s
        before = len(asked)
        with pytest.raises(StorageError, match="no whole answer"):
            retrier.call("cannot read", hangs)
        assert len(asked) - before == attempts


@pytest.mark.parametrize("answer", ["a value", "a refusal"])
def test_a_store_that_has_answered_has_its_whole_time_again(answer: str) -> None:
    outage = Outage(70.0)
    retrier = outage.retrier()
    with pytest.raises(StorageError):
        retrier.call("cannot read", outage.attempt)

    def missing() -> NoReturn:
        raise ObjectMissing("no such object")

    outage.now_s = 70.0
    if answer == "a value":
        retrier.call("cannot read", outage.attempt)
    else:
        with pytest.raises(ObjectMissing):
            retrier.call("cannot read", missing)
    outage.ends_s = 110.0
    assert retrier.call("cannot read", outage.attempt) == 7
