"""What the ranks recorded, and the history that follows from it without lakeckpt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lakeckpt.demo.records import Writer, count_rows, read_launches, record_path, surviving_steps

LAKE = np.arange(100, dtype=np.int64)


def write_launch(
    folder: Path, launch: int, restored: int, steps: Sequence[int], *, ranks: int = 2, base: int = 0
) -> None:
    """A launch of ``ranks`` ranks; step s uses the ids 2s and 2s + 1 (plus ``base``), one per rank."""
    for rank in range(ranks):
        writer = Writer(record_path(folder, launch, rank))
        writer.write("start", restored=restored, world_size=ranks)
        for step in steps:
            fields = {"step": step, "epoch": 0, "loss_sum": 1.5}
            writer.write("step", ids=[base + 2 * step + rank], digest="d" if rank == 0 else "", **fields)


def test_steps_survive_up_to_where_the_next_launch_restored(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 8))
    write_launch(tmp_path, 1, 5, range(6, 10))
    history = surviving_steps(read_launches(tmp_path))
    assert [(step.launch, step.step) for step in history] == [(0, s) for s in range(1, 6)] + [
        (1, s) for s in range(6, 10)
    ]


def test_a_launch_that_restored_further_back_takes_steps_from_all_launches_before(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 8))
    write_launch(tmp_path, 1, 6, range(7, 9))
    write_launch(tmp_path, 2, 4, range(5, 7))
    history = surviving_steps(read_launches(tmp_path))
    assert [(step.launch, step.step) for step in history] == [(0, 1), (0, 2), (0, 3), (0, 4), (2, 5), (2, 6)]


def test_a_launch_that_died_before_its_first_step_changes_nothing(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 8))
    write_launch(tmp_path, 1, 6, [])
    write_launch(tmp_path, 2, 6, [7])
    assert [step.launch for step in surviving_steps(read_launches(tmp_path))] == [0] * 6 + [2]


def test_a_surviving_step_that_not_every_rank_recorded_is_an_error(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 4))
    path = record_path(tmp_path, 0, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"step": 2' not in line))
    with pytest.raises(ValueError, match="step 2 survived"):
        surviving_steps(read_launches(tmp_path))


def test_a_history_whose_first_steps_nobody_made_is_an_error(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 3, [4])
    with pytest.raises(ValueError, match="restored step 3"):
        surviving_steps(read_launches(tmp_path))


def test_ranks_that_restored_different_steps_are_an_error(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, [1])
    path = record_path(tmp_path, 0, 1)
    path.write_bytes(path.read_bytes().replace(b'"restored": 0', b'"restored": 1'))
    with pytest.raises(ValueError, match="'restored'"):
        read_launches(tmp_path)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 4))
    path = record_path(tmp_path, 0, 0)
    data = path.read_bytes()
    for end in range(data.rindex(b'{"kind": "step"') + 1, len(data) - 1):
        path.write_bytes(data[:end])
        assert list(read_launches(tmp_path)[0].steps) == [1, 2]


def test_a_launch_killed_before_all_ranks_restored_is_left_out(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, [1])
    record_path(tmp_path, 0, 1).write_bytes(b"")
    assert read_launches(tmp_path) == []


def test_steps_join_all_ranks(tmp_path: Path) -> None:
    write_launch(tmp_path, 3, 0, [1], ranks=3)
    (launch,) = read_launches(tmp_path)
    step = launch.steps[1]
    assert (step.ids, step.loss, step.digest) == ([2, 3, 4], 1.5, "d")
    assert (launch.world_size, launch.ended) == (3, False)
    Writer(record_path(tmp_path, 4, 0)).write("start", restored=1, world_size=1)
    with record_path(tmp_path, 4, 0).open("a") as file:
        file.write('{"kind": "end"}\n')
    assert [one.ended for one in read_launches(tmp_path)] == [False, True]


def test_rows_lost_repeated_and_unknown_are_counted(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, [*range(1, 51)], base=-2)
    history = surviving_steps(read_launches(tmp_path))
    (exact,) = count_rows(history, LAKE, 1)
    assert exact.exactly_once and exact.counted == 100
    (less,) = count_rows(history[:-1], LAKE, 1)
    assert (less.lost, less.repeated, less.exactly_once) == (2, 0, False)
    (more,) = count_rows([*history, history[3]], LAKE, 1)
    assert (more.lost, more.repeated, more.exactly_once) == (0, 2, False)
    (thrice,) = count_rows([*history, history[3], history[3]], LAKE, 1)
    assert (thrice.lost, thrice.repeated) == (0, 4)
    (other,) = count_rows(history, LAKE[:-5], 1)
    assert (other.lost, other.repeated, other.unknown, other.exactly_once) == (0, 0, 5, False)


def test_an_epoch_that_was_never_reached_counts_as_lost(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, [*range(1, 51)], base=-2)
    counts = count_rows(surviving_steps(read_launches(tmp_path)), LAKE, 2)
    assert [(count.epoch, count.lost) for count in counts] == [(0, 0), (1, 100)]
