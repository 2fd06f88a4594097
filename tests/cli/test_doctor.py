"""doctor says what runs keep on a node, and reclaims what nobody uses, and nothing else."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.agent.leftovers import kept_in, reclaim, remove_log
from lakeckpt.checkpoint.agent.logs import log_path, open_log
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from tests.checkpoint.agent.rig import DIGEST, fill, make_arena

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]


def reclaimed(plain: dict[str, Any]) -> list[str]:
    return [one["name"] for one in plain["arenas"] if one["use"] == "removed"]


@pytest.fixture
def arenas(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


@pytest.fixture
def left(arenas: Path) -> str:
    """The name of an arena with the steps 3 and 4, whose trainer has ended, beside the log of its agent."""
    with make_arena(arenas) as arena:
        fill(arena, 3)
        fill(arena, 4)
    Path(log_path(str(arenas), DIGEST.hex(), 0)).write_text(f"2026-11-24 12:00:00Z [{os.getpid()}] begins: rank 0\n")
    return arena.name


@pytest.fixture
def filled(arenas: Path) -> Iterator[Arena]:
    """An arena whose trainer lives."""
    with make_arena(arenas, rank=1, world_size=2) as arena:
        fill(arena, 5)
        yield arena


@pytest.fixture
def agent(arenas: Path, left: str) -> Iterator[int]:
    """An agent of rank 0 of the run: the process that holds its log."""
    log = open_log(log_path(str(arenas), DIGEST.hex(), 0))
    yield os.getpid()
    os.close(log)


def test_a_node_on_which_nothing_is_kept_is_clean(arenas: Path, ask: Ask, show: Show) -> None:
    arenas.mkdir(mode=0o700)
    assert ask("doctor", "--arenas", arenas) == (0, {"folder": str(arenas), "arenas": [], "logs": 0})
    status, told = show("doctor", "--arenas", arenas)
    assert status == 0 and "CLEAN" in told and not list(arenas.iterdir())


def test_what_is_left_of_a_run_is_found_and_reclaimed_only_when_asked(
    arenas: Path, left: str, ask: Ask, show: Show
) -> None:
    status, plain = ask("doctor", "--arenas", arenas)
    (arena,) = plain["arenas"]
    assert (status, arena["agents"], plain["logs"]) == (1, [], 1)
    assert (arena["name"], arena["steps"], arena["use"]) == (left, [4, 3], "left")
    assert arena["size_bytes"] == (arenas / left).stat().st_size
    status, told = show("doctor", "--arenas", arenas)
    assert status == 1 and "left" in told and "--reclaim" in told and (arenas / left).exists()
    status, plain = ask("doctor", "--arenas", arenas, "--reclaim")
    assert (status, reclaimed(plain)) == (0, [left])
    assert list(arenas.iterdir()) == []
    assert ask("doctor", "--arenas", arenas)[0] == 0


def test_an_arena_that_a_trainer_fills_stays(arenas: Path, left: str, filled: Arena, ask: Ask, show: Show) -> None:
    assert "filled" in show("doctor", "--arenas", arenas)[1]
    status, plain = ask("doctor", "--arenas", arenas, "--reclaim")
    assert (status, reclaimed(plain)) == (0, [left])
    assert (arenas / filled.name).exists() and not Path(log_path(str(arenas), DIGEST.hex(), 0)).exists()


def test_arenas_that_an_agent_keeps_stay(arenas: Path, left: str, agent: int, ask: Ask, show: Show) -> None:
    status, plain = ask("doctor", "--arenas", arenas, "--reclaim")
    (arena,) = plain["arenas"]
    assert (status, arena["agents"], arena["use"]) == (0, [agent], "kept by its agent")
    assert (arenas / left).exists()
    status, told = show("doctor", "--arenas", arenas)
    assert status == 0 and str(agent) in told and "kept by its agent" in told


def test_copies_of_other_nodes_are_shown_and_stay_while_an_agent_of_their_run_lives(
    arenas: Path, left: str, agent: int, ask: Ask, show: Show
) -> None:
    with make_arena(arenas, 3, 4, generations=2, kind="copy") as copy:
        fill(copy, 4)
    status, plain = ask("doctor", "--arenas", arenas, "--reclaim")
    assert [(one["rank"], one["kind"], one["use"]) for one in plain["arenas"]] == [
        (0, "own", "kept by its agent"),
        (3, "copy", "kept by its agent"),
    ]
    assert status == 0 and reclaimed(plain) == []
    assert "a copy of 3 of 4" in show("doctor", "--arenas", arenas)[1]
    Path(log_path(str(arenas), DIGEST.hex(), 0)).unlink()
    assert [one["use"] for one in ask("doctor", "--arenas", arenas)[1]["arenas"]] == ["left", "left"]


def test_what_came_into_use_after_it_was_looked_at_stays(arenas: Path, left: str) -> None:
    folder = ArenaFolder(arenas)
    looked_at = kept_in(folder)
    path = log_path(str(arenas), DIGEST.hex(), 0)
    log = open_log(path)
    remove_log(path)
    assert reclaim(folder, looked_at) == set() and Path(path).exists()
    os.close(log)
    with folder.open(left, writes=True):
        assert reclaim(folder, looked_at) == set()
    assert reclaim(folder, looked_at) == {left}


def test_a_log_that_is_removed_before_it_is_locked_is_opened_anew(
    arenas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas.mkdir(mode=0o700)
    path = log_path(str(arenas), DIGEST.hex(), 0)
    lock, removed = fcntl.flock, []

    def removed_meanwhile(descriptor: int, how: int) -> None:
        if not removed:
            os.unlink(path)
            removed.append(descriptor)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    log = open_log(path)
    assert removed and os.path.samestat(os.fstat(log), os.stat(path))
    os.close(log)


def test_a_damaged_arena_is_named_and_reclaimed(arenas: Path, left: str, ask: Ask, show: Show) -> None:
    os.truncate(arenas / left, 1000)
    link = arenas / f"{'0' * 32}.arena"
    link.symlink_to("/etc/hostname")
    status, told = show("doctor", "--arenas", arenas)
    assert status == 1 and told.count("✗") == 2 and "damaged" in told
    status, plain = ask("doctor", "--arenas", arenas, "--reclaim")
    assert status == 0 and sorted(reclaimed(plain)) == sorted([left, link.name])
    assert not link.is_symlink() and Path("/etc/hostname").exists()


def test_an_arena_that_is_being_made_is_not_taken_for_a_damaged_one(
    arenas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    whole = ArenaFolder._fill

    def looked_at_meanwhile(folder: ArenaFolder, descriptor: int, *rest: Any) -> None:
        found.append(folder.found())
        whole(folder, descriptor, *rest)

    monkeypatch.setattr(ArenaFolder, "_fill", looked_at_meanwhile)
    make_arena(arenas).close()
    assert found == [[]] and len(ArenaFolder(arenas).found()) == 1


def test_a_folder_that_others_can_open_is_refused(arenas: Path, ask: Ask) -> None:
    arenas.mkdir(mode=0o755)
    arenas.chmod(0o755)
    status, plain = ask("doctor", "--arenas", arenas)
    assert status == 2 and "must be this user's alone" in plain["error"]["message"]


@pytest.mark.parametrize("more", [[], ["--reclaim"]])
def test_a_folder_that_is_not_there_is_not_clean(
    more: list[str], tmp_path: Path, show: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "file").touch()
    for name in ("nope", "file"):
        status, told = show("doctor", "--arenas", tmp_path / name, *more)
        assert status == 2 and told.startswith("lakeckpt: there is no folder ") and told.count("\n") == 1
