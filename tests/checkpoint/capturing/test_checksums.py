"""Each slice gets its own checksums, from the agent or from the copier."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lakeckpt.checkpoint.arena.slices import plan_slices
from lakeckpt.checkpoint.capture.slice_copier import Checksums
from lakeckpt.errors import AgentError

SLICES = plan_slices({"one": 60, "other": 164}, slice_bytes=128)  # the first slice holds some of both


class Filling:
    """A generation of two slices."""

    def __init__(self) -> None:
        self.data = memoryview(bytearray(SLICES.data_bytes))
        self.checksums: dict[int, bytes] = {}
        self.here: list[int] = []

    bounds = staticmethod(SLICES.bounds)

    def summed(self, number: int, checksums: bytes) -> None:
        self.checksums[number] = checksums

    def filled(self, number: int) -> None:
        self.here.append(number)


class Summer:
    """Answers with what it was asked, until it is lost."""

    is_lost = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        if self.is_lost:
            raise AgentError("it died")
        self.asked += bounds

    def take(self) -> bytes:
        if self.is_lost:
            raise AgentError("it died")
        return str(self.asked.pop(0)).encode()


def checksums_of(filling: Filling, summer: Summer | None) -> Checksums:
    return Checksums(filling, summer)  # type: ignore[arg-type]


@pytest.mark.parametrize("from_device", [True, False])
@pytest.mark.parametrize("summer", [Summer(), None])
def test_each_slice_gets_its_own_checksums_from_the_agent_or_from_the_copier(
    summer: Summer | None, *, from_device: bool
) -> None:
    filling = Filling()
    checksums = checksums_of(filling, summer)
    checksums.take([0, 1], from_device=from_device)
    checksums.wait()
    if summer is not None and from_device:
        assert filling.checksums == {0: b"(0, 128)", 1: b"(128, 228)"} and not filling.here
    else:
        assert filling.here == [0, 1] and not filling.checksums


def test_an_agent_that_ends_is_an_error_and_an_abort_none() -> None:
    filling, summer = Filling(), Summer()
    checksums = checksums_of(filling, summer)
    checksums.take([1], from_device=True)
    summer.is_lost = True
    with pytest.raises(AgentError, match="it died"):
        checksums.wait()
    with pytest.raises(AgentError, match="it died"):
        checksums.take([0], from_device=True)
    checksums.abort()
    assert not filling.checksums and not filling.here


def test_an_aborted_capture_takes_its_answers_with_it() -> None:
    filling, summer = Filling(), Summer()
    aborted = checksums_of(Filling(), summer)
    aborted.take([1], from_device=True)
    aborted.abort()
    checksums = checksums_of(filling, summer)
    checksums.take([1], from_device=True)
    checksums.wait()
    assert filling.checksums == {1: b"(128, 228)"} and not summer.asked
