"""`lakeckpt run` starts ranks as torchrun does, restarts them from a warm process, and ends where no restart helps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.notes import begin_page, notes_in, page_path
from lakeckpt.checkpoint.ranks import LAUNCH, note_page
from lakeckpt.cli.launch.attempts import Attempts
from lakeckpt.cli.main import main
from lakeckpt.recovery.faults import PHASES
from tests.checkpoint.preemption.jobs import is_proved
from tests.checkpoint.test_crash_loops import rows_named
from tests.cli import launched
from tests.frameworks.harness import write_table
from tests.patience import PATIENCE_S


def ran(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under `lakeckpt run` with one rank."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(launched.ROOT / "src"), str(folder / "lib")])}
    command = [sys.executable, "-m", "lakeckpt", "run", *options, str(path), "first", "--second"]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )


def check_rows(folder: Path, attempts: set[int]) -> None:
    """Each row counts once in what the newest attempt of each step used, and every one of ``attempts`` did a step."""
    used: Counter[int] = Counter()
    for rank in (0, 1):
        newest = {one["step"]: one for one in launched.noted(folder, rank)}
        assert {one["attempt"] for one in newest.values()} == attempts
        used.update(number for one in newest.values() for number in one["ids"])
    assert used == Counter(range(launched.ROWS)) and is_proved(folder)


def test_a_killed_job_goes_on_warm_and_each_row_counts_once(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=launched.ROWS)
    assert "ranks start cold" not in launched.run(tmp_path, kills="9")
    check_rows(tmp_path, {0, 1})
    (fault,) = launched.faults_of_run(tmp_path)["faults"]
    assert (fault["cause"], fault["what"], fault["rank"], fault["step"]) == ("signal", "SIGKILL", 1, 9)
    assert (fault["doing"], fault["deaths"]) == ("compute", 1)
    assert fault["tier"] in ("memory", "storage")  # agents may have persisted the cut meanwhile
    assert 0 <= fault["steps_again"] == 9 - fault["back_to"] <= 2  # the other rank may be a step behind
    assert fault["rows_again"] == 2 * launched.BATCH * fault["steps_again"]
    assert list(fault["phases"]) == list(PHASES)


@pytest.mark.soak
def test_a_row_that_kills_a_job_of_two_ranks_three_times_ends_the_launcher_with_93(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=launched.ROWS)
    said = launched.run(tmp_path, mode="crash", status=93)
    assert "3 times in a row by signal SIGSEGV" in said and f"lakeckpt faults {tmp_path / 'run'}" in said
    assert launched.POISON in rows_named(tmp_path / "table", said)
    faults = launched.faults_of_run(tmp_path)["faults"]
    assert len(faults) == 3 and {(one["cause"], one["what"]) for one in faults} == {("signal", "SIGSEGV")}
    assert len({json.dumps(one["micro_batch"]) for one in faults}) == 1


@pytest.mark.soak
def test_a_row_that_raises_three_times_ends_the_launcher_with_93(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=launched.ROWS)
    said = launched.run(tmp_path, mode="raise", status=93)
    assert "3 times in a row by exception ValueError" in said
    assert launched.POISON in rows_named(tmp_path / "table", said)


@pytest.mark.soak
def test_a_bad_cut_in_memory_is_passed_over_after_the_third_death(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=launched.ROWS)
    said = launched.run(tmp_path, mode="bad cut", kills="9")
    assert "3 deaths in a row without progress: the newest checkpoint before step" in said
    faults = launched.faults_of_run(tmp_path)["faults"]
    first, second, third = (one["back_to"] for one in faults)
    assert first == second > third == 5 and [one["deaths"] for one in faults] == [1, 2, 3]
    assert is_proved(tmp_path)


@pytest.mark.soak
def test_a_stopped_rank_is_the_cause_and_its_launcher_need_not_wait_for_it(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=launched.ROWS)
    said = launched.run(tmp_path, kills="9", mode="stop 5")
    assert "Unable to shutdown process" not in said  # torchelastic's, after 30 s
    check_rows(tmp_path, {0, 1})
    (fault,) = launched.faults_of_run(tmp_path)["faults"]
    assert (fault["cause"], fault["what"], fault["rank"], fault["step"]) == ("hang", "SIGSTOP", 1, 9)
    assert fault["steps_again"] <= 1 and fault["phases"]["perceived"] >= 5


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_warm_ranks_with_workers_end_with_the_weights_of_cold_ones(tmp_path: Path, method: str) -> None:
    for name in ("warm", "cold"):
        write_table(tmp_path / name / "table", rows=launched.ROWS)
    assert "ranks start cold" not in launched.run(tmp_path / "warm", kills="9,17,21", workers=1, method=method)
    launched.run(tmp_path / "cold", cold=True)
    check_rows(tmp_path / "warm", {0, 1, 2, 3})
    weights = [(tmp_path / name / "weights.json").read_text() for name in ("warm", "cold")]
    assert weights[0] == weights[1]


SCRIPT = """
import atexit, os, sys
import beside
atexit.register(lambda: print("at exit", flush=True))
print("started", __name__, sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
sys.exit(beside.STATUS)
"""


@pytest.mark.soak
def test_an_import_error_ends_the_launcher_after_three_tries_with_the_status_of_the_script(tmp_path: Path) -> None:
    done = ran(tmp_path, "print('started', flush=True)\nimport a_module_that_nobody_has")
    assert done.returncode == 1 and done.stdout.splitlines() == ["started"] * 3
    assert "3 attempts failed before the run began" in done.stderr
    assert "No module named 'a_module_that_nobody_has'" in done.stderr


def test_a_script_that_never_begins_a_run_ends_the_launcher_with_its_own_status(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("STATUS = 7")
    done = ran(tmp_path, SCRIPT)
    assert done.returncode == 7
    assert done.stdout.splitlines() == ["started __main__ ['first', '--second'] True", "at exit"] * 3
    assert "3 attempts failed before the run began" in done.stderr
    assert "ranks start cold: 2 deaths in a row without progress" in done.stderr
    assert "--rdzv-backend=c10d (static), --max-restarts=1000 (0)" in done.stderr


@pytest.mark.soak
def test_a_preloaded_module_that_starts_a_thread_means_a_cold_start(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    done = ran(tmp_path, "print('trained')", "--preload", "busy")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "ranks start cold: a module of --preload has started 1 threads" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preload", "no_such_module", __file__], "--preload names 'no_such_module'"),
        (["--nnodes", "2", __file__], "a job on 2 nodes needs a place to meet: give --rdzv-endpoint"),
        (["no_such_script.py"], "there is no script 'no_such_script.py' in "),
        (["--no-such-option", __file__], "no-such-option"),
    ],
)
def test_what_cannot_run_is_refused_before_a_rank_starts(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options]) == 2
    assert words in capsys.readouterr().err


def test_attempts_without_progress_are_stuck_and_attempts_that_never_begin_are_hopeless(
    tmp_path: Path,
) -> None:
    attempts = Attempts(str(tmp_path))
    for number, step in enumerate(("4", "6", "6", "8", "", "", "")):
        if step:
            (tmp_path / f"{number}.0").write_text(f"{step}\n")
        attempts.failed(number)
        assert attempts.is_stuck == (number in (2, 4, 5, 6))
        assert attempts.is_hopeless == (number == 6)


def test_a_rank_that_is_killed_before_it_has_made_its_page_is_noted_from_a_page_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, arenas, digest = tmp_path / "launch", ArenaFolder(tmp_path / "arenas"), bytes(16)
    launch.mkdir()
    for name, value in ((LAUNCH, str(launch)), ("TORCHELASTIC_RESTART_COUNT", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    note_page(page_path(arenas.path, digest, 7, 5))
    assert begin_page(arenas, digest, 7, 5, 8) is not None
    failure = SimpleNamespace(exitcode=-9, error_file_data=None)
    Attempts(str(launch)).failed(2, {3: failure})
    [note] = [one for one in notes_in(arenas.path, digest) if one.cause != "unknown"]
    assert (note.rank, note.world, note.attempt, note.name) == (7, 8, 7, "signal SIGKILL")
    assert note.batch is None and "before it had made its page" in note.text
