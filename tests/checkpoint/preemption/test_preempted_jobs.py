"""A signal ends a job at any moment: the newest cut is saved, the status says so, and no row is lost or repeated."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.checkpoint.agent.test_agent import ended
from tests.checkpoint.preemption.jobs import (
    STEP,
    Moment,
    ends,
    go_on,
    is_proved,
    log,
    reach,
    start,
    steps,
    wrong_rows,
)
from tests.frameworks.harness import write_table
from tests.patience import PATIENCE_S

ROWS = 120
MOMENTS = ["data", "forward", "backward", "optimizer", "save"]
LONG_S = 10_000.0
"""A grace that no test waits for."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_table(tmp_path / "table", rows=ROWS, files=2)
    return tmp_path


def check_the_newest_step_was_saved(folder: Path, **options: object) -> None:
    """The next attempt goes on at the newest step that the ranks made, and every row counts once."""
    assert go_on(folder, **options) == max(steps(folder)), log(folder)
    assert wrong_rows(folder, ROWS) == {} and is_proved(folder)


@pytest.mark.parametrize("capture_every", [None, 1])
@pytest.mark.parametrize("name", MOMENTS)
def test_one_rank_saves_the_step_in_which_the_signal_finds_it(
    folder: Path, name: str, capture_every: int | None
) -> None:
    moment = Moment(name=name)
    options = {"save_on": ("SIGTERM",), "grace_s": LONG_S, "capture_every": capture_every, "persist_every": STEP}
    ranks = start(folder, 1, moment, **options)
    reach(moment, ranks, folder)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    moment.go.set()
    assert ends(ranks) == [143], log(folder)
    assert STEP <= max(steps(folder)) < ROWS // 4, "the job was to be stopped in the middle"
    # what each agent logs comes after its trainer's end
    assert all(map(ended, agents_of(folder, 1 if capture_every else 0)))
    assert capture_every is None or any("the trainer ends" in line for line in agent_logs(folder))
    check_the_newest_step_was_saved(folder)


@pytest.mark.parametrize("signalled", [(0, 1), (1,)], ids=["both", "one"])
@pytest.mark.parametrize("name", [*MOMENTS, "collective"])
def test_two_ranks_save_one_step_whichever_of_them_gets_the_signal(
    folder: Path, name: str, signalled: tuple[int, ...]
) -> None:
    moment = Moment(name=name)  # rank 0 is in it, and rank 1 waits for rank 0 in a collective
    number = signal.SIGUSR1 if name == "forward" else signal.SIGTERM
    ranks = start(folder, 2, moment, save_on=("SIGTERM", "SIGUSR1"), grace_s=LONG_S, persist_every=STEP)
    reach(moment, ranks, folder)
    for rank in signalled:
        os.kill(ranks[rank].pid or 0, number)
    moment.go.set()
    assert ends(ranks) == [128 + number] * 2, log(folder)
    check_the_newest_step_was_saved(folder)


def slurm(folder: Path) -> dict[str, str]:
    """The environment of a running job of Slurm, whose scontrol notes what it is ordered to do."""
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\n[ $1 = show ] && echo JobState=RUNNING && exit\necho "$@" >> {folder}/asked\n')
    script.chmod(0o700)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}


def test_a_loop_that_comes_to_no_further_cut_ends_without_a_save_and_is_requeued(folder: Path) -> None:
    moment, options = Moment(name="data"), {"requeue": "slurm", "environment": slurm(folder)}
    ranks = start(folder, 1, moment, save_on=("SIGTERM",), grace_s=0.1, persist_every=2, **options)
    reach(moment, ranks, folder)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    assert ends(ranks) == [143]
    assert "came to no further cut within 0.1 s. Nothing is saved anew: the newest checkpoint is of step 2" in log(
        folder
    )
    assert (folder / "asked").read_text() == "requeue 4711\n"
    assert go_on(folder) == 2 and wrong_rows(folder, ROWS) == {} and is_proved(folder)


def test_the_agents_persist_the_newest_cut_where_one_rank_comes_to_no_further_cut(folder: Path) -> None:
    moment = Moment(name="data", where=[1])  # rank 0 waits for it in a collective
    ranks = start(folder, 2, moment, save_on=("SIGTERM",), grace_s=1.0, capture_every=1)
    reach(moment, ranks, folder)
    agents = agents_of(folder, 2)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    assert ends(ranks) == [143, 143] and len(agents) == 2
    assert all(map(ended, agents)), agent_logs(folder)
    assert "came to no further cut within 1 s" in log(folder)
    assert go_on(folder) == STEP - 1 and wrong_rows(folder, ROWS) == {} and is_proved(folder)


def test_a_rank_that_saves_does_not_wait_for_one_that_comes_to_no_cut(folder: Path) -> None:
    moment = Moment(name="optimizer", where=[1])  # rank 0 comes to the cut, and saves
    ranks = start(folder, 2, moment, save_on=("SIGTERM",), grace_s=1.0, persist_every=2)
    reach(moment, ranks, folder)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    assert ends(ranks) == [143, 143]
    assert "rank 1, " in log(folder) and "came to no further cut within 1 s" in log(folder)
    assert go_on(folder) == 2 and wrong_rows(folder, ROWS) == {} and is_proved(folder)


def agents_of(folder: Path, least: int) -> list[int]:
    """The agents that have begun, when there are so many: they start beside the first steps."""
    while len(found := [line for line in agent_logs(folder) if "begins: rank" in line]) < least:
        threading.Event().wait(0.01)
    return [int(line.split("[")[1].split("]")[0]) for line in found]


def agent_logs(folder: Path) -> list[str]:
    return [line for path in (folder / "arenas").glob("*.log") for line in path.read_text().splitlines()]


def test_a_peer_that_died_is_found_at_once_and_nothing_is_saved_anew(folder: Path) -> None:
    """As under torchrun, which sends SIGTERM to the ranks that live when one has died."""
    moment, options = Moment(name="data"), {"requeue": "slurm", "environment": slurm(folder)}
    ranks = start(folder, 2, moment, save_on=("SIGTERM",), grace_s=LONG_S, persist_every=2, **options)
    reach(moment, ranks, folder)
    ranks[1].kill()
    ranks[1].join(PATIENCE_S)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    assert ends(ranks) == [143, -signal.SIGKILL]
    assert "the process of rank 1 has ended: see its log. Nothing is saved anew" in log(folder)
    assert not (folder / "asked").exists(), "the launcher starts such a job again"
    assert go_on(folder) == 2 and wrong_rows(folder, ROWS) == {} and is_proved(folder)


def test_a_peer_that_died_on_another_node_is_known_by_the_note_of_its_neighbour(folder: Path) -> None:
    moment = Moment(name="data", where=[0, 2])
    nodes = ["a", "b", "b"]
    ranks = start(folder, 3, moment, save_on=("SIGTERM",), grace_s=LONG_S, nodes=nodes)
    reach(moment, ranks, folder)
    ranks[1].kill()
    ranks[1].join(PATIENCE_S)
    os.kill(ranks[2].pid or 0, signal.SIGTERM)
    ranks[2].join(PATIENCE_S)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    assert ends([ranks[0]]) == [143]
    mine = [line for line in log(folder).splitlines() if "rank 0, process" in line]
    assert len(mine) == 1 and "the process of rank 1 has ended" in mine[0]


def test_a_save_takes_longer_than_the_grace_and_is_not_cut_off(folder: Path) -> None:
    moment = Moment(name="save")
    ranks = start(folder, 1, moment, save_on=("SIGTERM",), grace_s=0.1, persist_every=STEP)
    reach(moment, ranks, folder)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    ranks[0].join(0.5)
    assert ranks[0].is_alive(), log(folder)
    moment.go.set()
    assert ends(ranks) == [143], log(folder)
    assert steps(folder) == set(range(1, STEP + 1)), "the step that was being saved was the newest"
    check_the_newest_step_was_saved(folder)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_in_the_last_save_ends_the_job_when_it_is_made(folder: Path, world_size: int) -> None:
    moment = Moment(name="last")
    ranks = start(folder, world_size, moment, save_on=("SIGTERM",), grace_s=0.1)
    reach(moment, ranks, folder)
    os.kill(ranks[-1].pid or 0, signal.SIGTERM)
    ranks[-1].join(0.5)
    assert ranks[-1].is_alive(), log(folder)
    moment.go.set()
    assert ends(ranks)[-1] == 143, log(folder)  # another rank may end before it learns of the signal
    assert max(steps(folder)) * world_size == ROWS // 4
    check_the_newest_step_was_saved(folder)
