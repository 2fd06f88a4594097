"""What the ranks recorded, and the history that follows from it without lakeckpt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lakeckpt.demo.records import RecordedStep, Writer, count_tokens, read_launches, record_path, surviving_steps

LAKE = {"code": np.arange(100, dtype=np.int64)}


def write_launch(
    folder: Path, launch: int, restored: int, steps: Sequence[int], *, ranks: int = 2, epoch: int = 0
) -> None:
    """A launch of ``ranks`` ranks; step s uses the tokens 2s - 2 and 2s - 1 of ``epoch``, one per rank."""
    for rank in range(ranks):
        writer = Writer(record_path(folder, launch, rank))
        writer.write("start", restored=restored, world_size=ranks)
        for step in steps:
            used = [("code", epoch, [2 * step - 2 + rank])]
            writer.write("step", step=step, used=used, loss_sum=1.5)
            if rank == 0:
                writer.write("weights", step=step, digest="d")


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
    path = record_path(tmp_path, 0, 1)
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
    assert step.sequences == [("code", 0, (number,)) for number in (0, 1, 2)]
    assert (step.loss, step.digest) == (1.5, "d")
    assert (launch.world_size, launch.ended) == (3, False)
    Writer(record_path(tmp_path, 4, 0)).write("start", restored=1, world_size=1)
    with record_path(tmp_path, 4, 0).open("a") as file:
        file.write('{"kind": "end"}\n')
    assert [one.ended for one in read_launches(tmp_path)] == [False, True]


def test_tokens_lost_repeated_and_of_no_table_are_counted(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 51))
    write_launch(tmp_path, 1, 50, [51], epoch=1)
    *history, next_epoch = surviving_steps(read_launches(tmp_path))

    def counted(steps: Sequence[RecordedStep], lake: Mapping[str, npt.NDArray[np.int64]] = LAKE) -> list[int]:
        whole, begun = count_tokens([*steps, next_epoch], lake)
        assert (whole.complete, begun.complete) == (True, False)
        return [whole.counted, whole.lost, whole.repeated]

    assert counted(history) == [100, 0, 0]
    assert counted(history[:-1]) == [98, 2, 0]
    assert counted([*history, history[3]]) == [102, 0, 2]
    assert counted([*history, history[3], history[3]]) == [104, 0, 4]
    assert counted(history, {"code": LAKE["code"][:-5]}) == [100, 0, 5]


def test_in_an_epoch_that_has_begun_tokens_may_be_missing_and_not_repeated(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, range(1, 10))
    history = surviving_steps(read_launches(tmp_path))
    for steps, expected in ((history, (False, 18, 0, 0)), ([*history, history[0]], (False, 20, 0, 2))):
        (begun,) = count_tokens(steps, LAKE)
        assert (begun.complete, begun.counted, begun.lost, begun.repeated) == expected


def test_an_epoch_that_was_skipped_counts_as_lost(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, [1], epoch=2)
    counts = count_tokens(surviving_steps(read_launches(tmp_path)), LAKE)
    assert [(count.epoch, count.lost) for count in counts] == [(0, 100), (1, 100), (2, 0)]


def test_a_source_that_was_never_read_has_no_complete_epoch(tmp_path: Path) -> None:
    write_launch(tmp_path, 0, 0, [1])
    counts = count_tokens(surviving_steps(read_launches(tmp_path)), {**LAKE, "prose": np.arange(100, 200)})
    assert [(count.source, count.complete, count.counted) for count in counts] == [
        ("code", False, 2),
        ("prose", False, 0),
    ]
