"""Checksums are taken behind the copy: of one generation as it is, never of two, and never in the way of a capture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.checkpoint.arena import checksums as module
from lakeckpt.checkpoint.arena.arena import Arena, HeldGeneration
from lakeckpt.checkpoint.arena.checksums import look_over
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests
from lakeckpt.recovery.facts import CutId

SIZE = 3 * LEAF_BYTES + 77
LAYOUT = ArenaLayout(
    identity=ArenaIdentity(run=b"r" * 16, rank=0, world=1),
    plan=b"p" * 16,
    data_bytes=SIZE,
    documents_bytes=300,
)


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(module, "PIECE_BYTES", LEAF_BYTES)
    with ArenaFolder(tmp_path / "arenas").create(LAYOUT) as made:
        yield made


@pytest.fixture
def agent(arena: Arena, tmp_path: Path) -> Iterator[Arena]:
    """The same arena, as an agent has opened it."""
    with ArenaFolder(tmp_path / "arenas").open(arena.name) as opened:
        yield opened


def capture(arena: Arena, step: int) -> bytes:
    """Capture a step, and return what was captured."""
    filling = arena.begin(common=step)
    assert filling is not None, "a capture was kept waiting"
    data = os.urandom(SIZE)
    filling.data[:] = data
    filling.complete(CutId(attempt=0, step=step), digest=bytes(16), documents=b"")
    return data


def checksums_in(arena: Arena, step: int) -> bytes | None:
    with arena.hold(step=step) as held:
        assert held is not None
        return held.checksums()


def test_the_newest_generation_gets_its_checksums_for_all_who_open_the_arena(arena: Arena, agent: Arena) -> None:
    look_over(agent, lambda: True)  # there is none yet
    for step in range(1, 7):
        data = capture(arena, step)
        assert checksums_in(arena, step) is None
        look_over(agent, lambda: True)
        assert checksums_in(arena, step) == checksums_in(agent, step) == leaf_digests(data, LEAF_BYTES)


def test_a_generation_that_is_begun_anew_meanwhile_keeps_no_capture_waiting_and_gets_none_of_its_checksums(
    arena: Arena, agent: Arena
) -> None:
    capture(arena, 1)
    steps = iter((2, 3, 4, 5))

    def train() -> bool:
        capture(arena, next(steps))
        return True

    look_over(agent, train)
    assert [one.cut.step for one in arena.complete()] == [4, 3, 2], "it was given up when its memory was taken"
    assert [checksums_in(arena, step) for step in (4, 3, 2)] == [None] * 3
    data = capture(arena, 5)
    look_over(agent, lambda: True)
    assert checksums_in(arena, 5) == leaf_digests(data, LEAF_BYTES)


def test_it_is_given_up_as_soon_as_there_is_something_else_to_do(arena: Arena, agent: Arena) -> None:
    capture(arena, 1)
    turns = iter((True, True, False))
    look_over(agent, lambda: next(turns))
    assert checksums_in(arena, 1) is None
    look_over(agent, lambda: True)
    assert checksums_in(arena, 1) is not None
    look_over(agent, lambda: pytest.fail("they are there already"))


def test_checksums_that_came_late_or_were_torn_are_none(arena: Arena, agent: Arena) -> None:
    """An agent that was stopped writes those of a generation whose memory holds another one by now."""
    capture(arena, 1)
    late = agent.newest()
    assert isinstance(late, HeldGeneration)
    for step in (2, 3, 4):
        data = capture(arena, step)
    late.put_checksums(b"x" * 64)
    look_over(agent, lambda: True)
    assert checksums_in(arena, 4) == leaf_digests(data, LEAF_BYTES)
    at = arena.layout.checksums_at(late.number)
    for torn in (20, 40):
        os.pwrite(agent._descriptor, b"torn", at + torn)
        assert checksums_in(arena, 4) is None
    look_over(agent, lambda: True)
    assert checksums_in(arena, 4) == leaf_digests(data, LEAF_BYTES)
