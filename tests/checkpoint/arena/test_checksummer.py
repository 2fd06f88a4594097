"""A process of its own takes the checksums that this one would, in the order in which they were asked for, and ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.checkpoint.arena import checksummer as module
from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.format.digests import leaf_digests
from lakeckpt.errors import AgentError
from tests.checkpoint.arena.summing import summing
from tests.patience import PATIENCE_S

LEAF = 1000
SIZE = 300_000


def inode_of(file: Path) -> int:
    return file.stat().st_ino


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(random.Random(3).randbytes(SIZE))
    return path


@pytest.fixture
def running(file: Path) -> Iterator[tuple[Checksummer, subprocess.Popen[bytes]]]:
    with summing(file.parent) as found:
        found[0].use(file.name, inode_of(file), leaf_bytes=LEAF)
        yield found


@pytest.fixture
def checksummer(running: tuple[Checksummer, subprocess.Popen[bytes]]) -> Checksummer:
    return running[0]


def test_checksums_are_those_of_this_process_in_the_order_of_asking(file: Path, checksummer: Checksummer) -> None:
    data, chance = file.read_bytes(), random.Random(5)
    asked = []
    for _ in range(40):
        bounds = [tuple(sorted(chance.sample(range(SIZE), 2))) for _ in range(chance.randrange(4))]
        checksummer.ask(bounds)
        asked += bounds
        while asked and chance.random() < 0.5:
            start, stop = asked.pop(0)
            assert checksummer.take() == leaf_digests(data[start:stop], LEAF)
    for start, stop in asked:
        assert checksummer.take() == leaf_digests(data[start:stop], LEAF)


def test_what_was_written_before_it_was_asked_for_is_what_it_sums(file: Path, checksummer: Checksummer) -> None:
    for value in range(20):
        with file.open("r+b") as written:
            written.write(bytes([value]) * 5 * LEAF)
        checksummer.ask([(0, 5 * LEAF)])
        assert checksummer.take() == leaf_digests(bytes([value]) * 5 * LEAF, LEAF)


def test_more_answers_than_a_pipe_holds_keep_nobody_waiting(file: Path, checksummer: Checksummer) -> None:
    checksummer.ask([(0, SIZE)] * 100)
    expected = leaf_digests(file.read_bytes(), LEAF)
    assert all(checksummer.take() == expected for _ in range(100))


def test_one_that_is_stopped_is_waited_for_and_then_given_up(
    running: tuple[Checksummer, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checksummer, process = running
    checksummer.ask([(0, LEAF)])
    checksummer.take()
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_ONCE_MORE_S", 0.1)
    os.kill(process.pid, signal.SIGSTOP)
    checksummer.ask([(0, LEAF)])
    with pytest.raises(AgentError, match="nothing came in"):
        checksummer.take()
    with pytest.raises(AgentError, match="nothing came in"):
        checksummer.ask([(0, LEAF)] * 10_000)  # more than the pipe holds


def test_a_process_that_was_killed_is_an_error(running: tuple[Checksummer, subprocess.Popen[bytes]]) -> None:
    checksummer, process = running
    checksummer.ask([(0, LEAF)])
    assert len(checksummer.take()) == 16
    process.kill()
    process.wait(PATIENCE_S)
    with pytest.raises(AgentError, match="the agent, which takes the checksums of an arena, does not answer"):
        checksummer.ask([(0, LEAF)])
    with pytest.raises(AgentError, match="it has ended"):
        checksummer.take()


def test_an_arena_that_is_gone_is_an_error_and_another_one_can_be_used(
    running: tuple[Checksummer, subprocess.Popen[bytes]], file: Path
) -> None:
    checksummer, _ = running
    other = file.parent / "other"
    other.write_bytes(b"x" * LEAF)
    checksummer.use(other.name, inode_of(other), leaf_bytes=LEAF // 2)
    checksummer.ask([(0, LEAF)])
    assert checksummer.take() == leaf_digests(b"x" * LEAF, LEAF // 2)
    checksummer.use("none", 1, leaf_bytes=LEAF)
    checksummer.ask([(0, 1)])
    with pytest.raises(AgentError, match="does not answer"):
        checksummer.take()


def test_an_arena_that_is_made_anew_under_its_name_is_the_one_that_is_summed(
    file: Path, checksummer: Checksummer
) -> None:
    for value in range(3):
        checksummer.ask([(0, LEAF)])
        assert checksummer.take() == leaf_digests(file.read_bytes()[:LEAF], LEAF)
        file.unlink()
        file.write_bytes(bytes([value]) * SIZE)
        checksummer.use(file.name, inode_of(file), leaf_bytes=LEAF)


def test_an_arena_that_took_the_name_of_another_one_is_never_summed_in_its_place(
    file: Path, checksummer: Checksummer
) -> None:
    checksummer.use(file.name, inode_of(file) + 1, leaf_bytes=LEAF)
    checksummer.ask([(0, LEAF)])
    with pytest.raises(AgentError, match="does not answer"):
        checksummer.take()
