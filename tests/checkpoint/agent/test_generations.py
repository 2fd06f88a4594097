"""Generations are found by their step and by whose they are."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from lakeckpt.checkpoint.agent.generations import Generations, digest_of_run, identity_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.agent.rig import DIGEST, fill, make_arena
from tests.checkpoint.rig import MemoryStorage


def test_a_step_that_two_attempts_have_captured_is_found_for_each(tmp_path: Path) -> None:
    """An attempt that goes on from a step in memory, and ends at once, captures that step again."""
    generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=1))
    with make_arena(tmp_path) as arena:
        for attempt in (0, 1):
            fill(arena, 6, attempt=attempt, common=5)
        cuts = [CutId(attempt=attempt, step=6) for attempt in (0, 1, 2)]
        for cut in cuts[:2]:
            with generations.hold(cut) as held:
                assert held is not None and held.record.cut == cut
        with generations.hold(cuts[2]) as held:
            assert held is None
        assert generations.cuts().keys() == set(cuts[:2])
    generations.close()


def test_an_arena_that_was_made_anew_is_looked_at_instead_of_the_one_before(tmp_path: Path) -> None:
    """A state outgrew its arena, and the same step was captured into the next one."""
    generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=1))
    with make_arena(tmp_path) as outgrown:
        fill(outgrown, 5), fill(outgrown, 6)
    assert generations.steps() == [5, 6]
    with make_arena(tmp_path) as arena:
        assert generations.steps() == []
        fill(arena, 6)
        for step, is_there in ((6, True), (5, False)):
            with generations.hold(CutId(attempt=0, step=step)) as held:
                assert (held is not None) == is_there
    generations.close()


def test_an_arena_of_another_number_of_ranks_is_none_of_ours(tmp_path: Path) -> None:
    with make_arena(tmp_path, 0, 2) as arena:
        fill(arena, 5)
    for world_size, steps in ((1, []), (2, [5])):
        generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=world_size))
        assert generations.steps() == steps
        generations.close()


def test_steps_are_told_by_attempt(tmp_path: Path) -> None:
    generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=1))
    with make_arena(tmp_path) as arena, make_arena(tmp_path, 1, 2) as others:
        fill(arena, 6, attempt=0)
        fill(arena, 7, attempt=2)
        fill(others, 8, attempt=3)  # another rank's
    assert (generations.steps(), generations.steps(0), generations.steps(2)) == ([6, 7], [6], [7])
    generations.close()


def test_what_nobody_fills_is_removed_and_what_a_trainer_fills_stays(tmp_path: Path) -> None:
    folder = ArenaFolder(tmp_path)
    generations = Generations(folder, identity_of(DIGEST, rank=0, world_size=1))
    make_arena(tmp_path).close()
    with make_arena(tmp_path) as arena, make_arena(tmp_path, 1, 2) as others:
        fill(arena, 6)
        others.close()
        generations.remove()
        assert {one.name for one in folder.found()} == {arena.name, others.name}
        with generations.hold(CutId(attempt=0, step=6)) as held:
            assert held is not None
    generations.remove()
    assert {one.name for one in folder.found()} == {others.name} and generations.steps() == []


@pytest.mark.parametrize("how", ["close", "remove", "look again"])
def test_an_arena_that_is_gone_or_let_go_of_is_kept_open_by_nobody(tmp_path: Path, how: str) -> None:
    generations = Generations(ArenaFolder(tmp_path), identity_of(DIGEST, rank=0, world_size=1))
    with make_arena(tmp_path) as arena:
        fill(arena, 6)
    path = f"{ArenaFolder(tmp_path).path}/{arena.name}"

    def times_open() -> int:
        every = (os.path.realpath(one) for one in glob.glob("/proc/self/fd/*"))
        return sum(one.startswith(path) for one in every)

    before = times_open()
    assert generations.steps() == [6] and times_open() > before
    if how == "close":
        generations.close()
        assert generations.steps() == [6]  # it is opened again
        generations.close()
    elif how == "remove":
        generations.remove()
    else:
        os.unlink(path)
        assert generations.steps() == []
    assert times_open() == before


def test_a_run_is_known_by_its_id_and_its_place_however_that_is_spelled(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    places = [LocalStorage(tmp_path / name) for name in ("run", "link", "copy")]
    run, link, copy = (digest_of_run("a", place) for place in places)
    assert run == link and len({run, copy, digest_of_run("b", places[0])}) == 3
    store, other = MemoryStorage(), MemoryStorage()
    store.name, other.name = "s3://bucket/run", "s3://bucket/link/../run"  # names of a store are as they are
    assert digest_of_run("a", store) != digest_of_run("a", other)
