"""A rank that dies under torchrun is no preemption: the others end at once, and nothing is saved anew."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.preemption import elastic
from tests.checkpoint.preemption.jobs import is_proved, lines, wrong_rows
from tests.frameworks.harness import write_table

ROWS = 80


def test_survivors_of_a_dead_rank_end_at_once_and_save_nothing_anew(tmp_path: Path) -> None:
    write_table(tmp_path / "table", rows=ROWS, files=2)
    printed = elastic.run(tmp_path, "on")
    assert (
        "SIGTERM: rank 1 has stopped: the process of rank 1 has ended: see its log. Nothing is saved anew: the newest "
        "checkpoint is of step 4" in printed
    )
    first = lines(tmp_path, 1)[0]
    assert first["restored"] == elastic.KILLED_AFTER - 1
    assert wrong_rows(tmp_path, ROWS) == {} and is_proved(tmp_path)
