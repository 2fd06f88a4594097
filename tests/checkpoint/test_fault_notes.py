"""A death leaves a note: why, where, at which micro-batch. Of several notes, the one that knows most stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.causes import cause_of_error, cause_of_status, exit_status, killed_for_memory
from lakeckpt.checkpoint.faults.notes import (
    begin_page,
    leave_note,
    note_at,
    note_of,
    notes_in,
    page_path,
    remove_notes,
    remove_old_notes,
)
from lakeckpt.recovery.faults import BatchAt, Cause, FaultNote
from lakeckpt.watch.beat import read_page
from tests.recovery.test_beat import receipt

RUN, OTHER = b"r" * 16, b"o" * 16


def page_of(folder: Path, *, rank: int = 0, attempt: int = 3, phase: str = "compute") -> str:
    """The page of a rank that is in a phase of its third step."""
    beat = begin_page(ArenaFolder(folder), RUN, attempt, rank, 2)
    assert beat is not None
    beat.begins(10, {"train": (2, 5)})
    beat.of_reader(0).delivered(receipt(5, rank))
    beat.stepped(11, 0.0)
    beat.of_reader(0).waits()
    if phase == "compute":
        beat.of_reader(0).delivered(receipt(6, rank))
    return beat.path


def noted(path: str, cause: Cause = "signal", at_s: float = 5.0) -> FaultNote:
    page = read_page(path)
    assert page is not None
    return note_of(page, 3, cause=cause, what="x", text="y", at_s=at_s)


@pytest.mark.parametrize("phase", ["compute", "data"])
def test_a_note_names_the_micro_batch_that_was_worked_on_or_waited_for(tmp_path: Path, phase: str) -> None:
    note = noted(page_of(tmp_path / "arenas", rank=1, phase=phase))
    assert (note.rank, note.world, note.attempt, note.begun, note.step, note.phase) == (1, 2, 3, 10, 11, phase)
    assert note.batch == BatchAt(reader="train", epoch=2, step=6, rank=1, world=2)
    assert (note.batches, note.rows) == ((1, 4) if phase == "compute" else (0, 4))


def test_of_two_notes_the_one_that_knows_more_stays_with_the_earlier_time(tmp_path: Path) -> None:
    path = page_of(tmp_path / "arenas")
    order: list[Cause] = ["unknown", "exit", "signal", "out of memory", "exception"]
    for at_s, cause in zip((9.0, 8.0, 9.0, 9.0, 9.0), order, strict=True):
        leave_note(path, noted(path, cause, at_s))
        leave_note(path, noted(path, "unknown", 1.0))
        found = note_at(path)
        assert found is not None and found.cause == cause
        assert found.at_s == (9.0 if cause == "unknown" else 8.0)


def test_a_page_of_a_dead_rank_is_a_death_of_an_unknown_cause_and_a_living_one_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "arenas"
    script = (
        "import sys; from lakeckpt.checkpoint.faults.notes import begin_page; "
        "from lakeckpt.checkpoint.arena.folder import ArenaFolder; "
        f"begin_page(ArenaFolder({str(folder)!r}), {RUN!r}, 3, 1, 2)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    page_of(folder, rank=0)
    (found,) = notes_in(str(folder), RUN)
    assert (found.rank, found.cause, found.phase) == (1, "unknown", "start") and not found.is_own
    assert notes_in(str(folder), OTHER) == [] == notes_in(str(tmp_path / "none"), RUN)


def test_notes_of_earlier_attempts_are_removed_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "arenas"
    paths = [page_of(folder, attempt=attempt) for attempt in (3, 7)]
    for path in paths:
        leave_note(path, noted(path))
    remove_notes(str(folder), OTHER, before=99)
    assert len(os.listdir(folder)) == 4
    remove_notes(str(folder), RUN, before=7)
    assert note_at(paths[0]) is None and note_at(paths[1]) is not None and len(os.listdir(folder)) == 2


def test_notes_of_a_place_and_old_ones_are_removed_and_living_ranks_keep_their_pages(tmp_path: Path) -> None:
    folder = tmp_path / "arenas"
    path = page_of(folder)
    leave_note(path, noted(path))
    os.utime(path, (1, 1))
    remove_old_notes(str(folder))
    assert len(os.listdir(folder)) == 2, "its process lives"
    os.unlink(path)
    os.utime(path.removesuffix(".beat") + ".fault", (1, 1))
    remove_old_notes(str(folder))
    assert os.listdir(folder) == []
    leave_note(page_of(folder), noted(page_of(folder)))
    remove_notes(str(folder), RUN[:8])
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_written_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert begin_page(ArenaFolder(tmp_path / "file"), RUN, 0, 0, 1) is None
    leave_note(page_path(str(tmp_path / "file"), RUN, 0, 0), replace(noted(page_of(tmp_path / "arenas"))))


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 11)", "os._exit(7)"])
def test_the_status_of_another_process_is_known_once_it_was_collected(ends: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os; input(); {ends}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    assert exit_status(pidfd, timeout_s=0.0) is None, "it lives"
    process.communicate(b"\n")
    found = exit_status(pidfd, timeout_s=5.0)
    os.close(pidfd)
    if found is None:
        pytest.skip("this kernel does not tell (before Linux 6.15)")
    assert found == process.returncode


def test_causes_are_told_apart() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch has it."""

    assert cause_of_status(-signal.SIGSEGV) == ("signal", "SIGSEGV")
    assert cause_of_status(-99) == ("signal", "signal 99")
    assert cause_of_status(-9, killed=2) == ("out of memory", "SIGKILL")
    assert cause_of_status(-11, killed=2) == ("signal", "SIGSEGV")
    assert cause_of_error(OutOfMemoryError())[0] == "out of memory"
    assert cause_of_error(ValueError()) == ("exception", "ValueError")


@pytest.mark.parametrize(
    ("line", "file"), [("0::/job", "job/memory.events"), ("7:memory:/job", "memory/job/memory.oom_control")]
)
def test_the_kills_of_a_control_group_are_counted(tmp_path: Path, line: str, file: str) -> None:
    (tmp_path / "cgroup").write_text(f"{line}\n")
    path = tmp_path / "sys" / file
    path.parent.mkdir(parents=True)
    path.write_text("oom 9\noom_kill 4\noom_group_kill 1\n")
    assert killed_for_memory(str(tmp_path / "cgroup"), str(tmp_path / "sys")) == 4
    path.unlink()
    assert killed_for_memory(str(tmp_path / "cgroup"), str(tmp_path / "sys")) == 0
