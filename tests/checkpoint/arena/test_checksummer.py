"""A process of its own takes the checksums that this one would, in the order in which they were asked for, and ends."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.checkpoint.arena import checksummer as module
from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.digests import leaf_digests
from lakeckpt.errors import ArenaError
from tests.patience import PATIENCE_S

LEAF = 1000
SIZE = 300_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(random.Random(3).randbytes(SIZE))
    return path


@pytest.fixture
def checksummer(file: Path) -> Iterator[Checksummer]:
    found = Checksummer(str(file), leaf_bytes=LEAF)
    yield found
    found.close()
    assert found._process.returncode is not None


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while, it is read
        return False


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


def test_one_that_was_killed_is_an_error(file: Path, checksummer: Checksummer) -> None:
    checksummer.ask([(0, LEAF)])
    assert len(checksummer.take()) == 16
    os.kill(checksummer._process.pid, signal.SIGKILL)
    checksummer._process.wait(PATIENCE_S)
    with pytest.raises(ArenaError, match=r"process \d+, which takes the checksums of an arena, does not answer"):
        checksummer.ask([(0, LEAF)])
    checksummer._asked.append(16)
    with pytest.raises(ArenaError, match="its exit status is -9"):
        checksummer.take()


def test_signals_that_end_trainers_leave_it_to_its_trainer(file: Path, checksummer: Checksummer) -> None:
    checksummer.ask([(0, LEAF)])
    checksummer.take()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        os.kill(checksummer._process.pid, ignored)
    checksummer.ask([(0, LEAF)])
    assert len(checksummer.take()) == 16


def test_it_ends_with_a_trainer_that_was_killed(file: Path) -> None:
    script = """
        import sys, time
        from lakeckpt.checkpoint.arena.checksummer import Checksummer
        found = Checksummer(sys.argv[1], leaf_bytes=1000)
        found.ask([(0, 1000)])
        found.take()
        print(found._process.pid, flush=True)
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        process = int(trainer.stdout.readline())
        assert is_alive(process)
        trainer.kill()
    until = time.monotonic() + PATIENCE_S
    while is_alive(process):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_that_is_stopped_is_waited_for_and_then_given_up(
    file: Path, checksummer: Checksummer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_ONCE_MORE_S", 0.1)
    checksummer.ask([(0, LEAF)])
    checksummer.take()
    os.kill(checksummer._process.pid, signal.SIGSTOP)
    checksummer.ask([(0, LEAF)])
    with pytest.raises(ArenaError, match="nothing came in"):
        checksummer.take()
    with pytest.raises(ArenaError, match="nothing came in"):
        checksummer.ask([(0, LEAF)] * 10_000)  # more than the pipe holds


def opened_by(process: int) -> set[str]:
    """What the process has open. It may be closing some of it meanwhile."""
    found = set()
    for one in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{process}/fd/{one}"))
    return found


def test_one_that_was_closed_is_an_error_for_whoever_still_has_it(file: Path) -> None:
    found = Checksummer(str(file), leaf_bytes=LEAF)
    found.ask([(0, LEAF)])
    found.close()
    for call in (lambda: found.ask([(0, LEAF)]), found.take):
        with pytest.raises(ArenaError, match="it was closed"):
            call()


def test_forked_children_keep_it_neither_alive_nor_waited_for(file: Path) -> None:
    found = Checksummer(str(file), leaf_bytes=LEAF)
    child = os.fork()
    if not child:
        time.sleep(1000)  # longer than any test may take
        os._exit(0)
    try:
        assert found._to.fileno() >= 0 and len(os.listdir(f"/proc/{child}/fd")) > 0
        pipes = {os.readlink(f"/proc/self/fd/{pipe.fileno()}") for pipe in (found._to, found._from)}
        until = time.monotonic() + PATIENCE_S
        while pipes & opened_by(child):
            assert time.monotonic() < until
            time.sleep(0.01)
        found.ask([(0, LEAF)])
        assert len(found.take()) == 16
        found.close()
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it waits for its own process only"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_one_that_nobody_refers_to_any_more_is_ended(file: Path) -> None:
    found = Checksummer(str(file), leaf_bytes=LEAF)
    process = found._process.pid
    del found
    gc.collect()
    assert not is_alive(process)


def test_an_arena_that_is_gone_is_an_error(tmp_path: Path) -> None:
    found = Checksummer(str(tmp_path / "none"), leaf_bytes=LEAF)
    found._process.wait(PATIENCE_S)
    with pytest.raises(ArenaError, match="does not answer"):
        found.ask([(0, 1)])
    found.close()
