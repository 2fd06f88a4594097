"""The page of a rank says where the rank is, to whoever reads it, while it lives and after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.watch.beat import PAGE_BYTES, Beat, process_start, read_page


def receipt(step: int, rank: int = 1) -> Receipt:
    spans = (Span(epoch=2, start=8 * step, stop=8 * step + 4),)
    return Receipt(
        epoch=2, micro_batch=2 * step + rank, lane=0, step=step, rank=rank, world_size=2, spans=spans, step_rows=8
    )


def test_the_page_follows_the_loop(tmp_path: Path) -> None:
    path = str(tmp_path / "x.beat")
    beat = Beat(path, rank=1, world=2, killed=3)
    beat.begins(5, {"train": (2, 7), "other": (0, 0)})
    page = read_page(path)
    assert page is not None and page.lives and page.pid == os.getpid()
    assert (page.phase, page.begun, page.step, page.reader, page.epoch, page.next_step) == (
        "between",
        5,
        5,
        "train",
        2,
        7,
    )
    reader = beat.of_reader(0)
    for step in (6, 7):
        reader.waits()
        reader.delivered(receipt(step + 1))
        beat.stepped(step, 0.25)
        beat.phase("between")
    reader.waits()
    page = read_page(path)
    assert page is not None
    assert (page.phase, page.step, page.next_step, page.dealt) == ("data", 7, 9, 1)
    assert (page.batches, page.used, page.rows, page.stalled_s, page.killed) == (2, 2, 8, 0.25, 3)
    assert page.step_s == page.last_step_s - page.first_step_s > 0
    reader.delivered(receipt(9))
    page = read_page(path)
    assert page is not None and (page.phase, page.batches - page.used, page.rows) == ("compute", 1, 8)
    beat.of_reader(1).ended()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_save_is_a_phase_of_its_own_but_in_the_last_phase(tmp_path: Path) -> None:
    beat = Beat(str(tmp_path / "x.beat"), rank=0, world=1)

    def doing() -> str:
        page = read_page(beat.path)
        assert page is not None
        return page.doing

    beat.own_phase("evaluate")
    with beat.saving():
        with beat.saving():
            assert doing() == "save"
        assert doing() == "save"
    assert doing() == "evaluate"
    with pytest.raises(ValueError, match="full"), beat.saving():
        raise ValueError("the disk is full")
    assert doing() == "evaluate"
    beat.phase("closing")
    with beat.saving():
        assert doing() == "closing"


def test_a_rank_that_ends_well_leaves_no_page_and_one_that_does_not_leaves_it(tmp_path: Path) -> None:
    for well in (True, False):
        beat = Beat(str(tmp_path / "x.beat"), rank=0, world=1)
        beat.close(well=well)
        assert (read_page(beat.path) is None) == well


def test_what_is_no_page_is_none(tmp_path: Path) -> None:
    for content in (b"", b"x" * PAGE_BYTES, b"x" * (PAGE_BYTES - 1)):
        (tmp_path / "x.beat").write_bytes(content)
        assert read_page(str(tmp_path / "x.beat")) is None
    assert read_page(str(tmp_path / "none.beat")) is None


def test_the_page_of_a_dead_process_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "x.beat")
    script = f"from lakeckpt.watch.beat import Beat; Beat({path!r}, rank=0, world=1).phase('compute')"
    subprocess.run([sys.executable, "-c", script], check=True)
    page = read_page(path)
    assert page is not None and not page.lives and page.phase == "compute" and page.rank == 0
    assert process_start(os.getpid()) is not None
