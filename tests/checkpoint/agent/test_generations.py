"""Generations are found by their step and by whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from tests.checkpoint.agent.rig import DIGEST, fill, make_arena


def test_a_step_that_two_attempts_have_captured_is_found_for_each(tmp_path: Path) -> None:
    """An attempt that goes on from a step in memory, and ends at once, captures that step again."""
    generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=1))
    with make_arena(tmp_path) as arena:
        for attempt in (0, 1):
            fill(arena, 6, attempt=attempt, common=5)
        for attempt in ("0", "1"):
            with generations.hold(6, attempt) as held:
                assert held is not None and held.record.attempt == attempt
        with generations.hold(6, "2") as held:
            assert held is None
        assert generations.cuts("0").keys() == generations.cuts("1").keys() == {6} and generations.cuts("2") == {}
    generations.close()


@pytest.mark.parametrize("number", range(8))  # arenas have random names, and neither order of them may matter
def test_of_a_step_in_two_arenas_that_which_is_filled_now_counts(tmp_path: Path, number: int) -> None:
    """A state outgrew its arena, and the same step was captured into the next one."""
    generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=1))
    with make_arena(tmp_path) as outgrown:
        fill(outgrown, 6)
    with make_arena(tmp_path) as arena:
        fill(arena, 6)
        with generations.hold(6, "0") as held:
            assert held is not None and held.arena.name == arena.name
    generations.close()
