"""Long work is shown on a terminal, by rich or in plain text, and nowhere else."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lakeckpt
from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table, progress
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.progress import progress_bar
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.packed.token_counts import count_tokens
from tests.lakes import LakeSpec


class Terminal(io.StringIO):
    """What looks like a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, *, has_rich: bool = False) -> Terminal:
    """Make stderr a terminal; in the test, because pytest puts its own there before each test begins."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    return found


def test_in_plain_text_progress_is_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress_bar("auditing") as advance:
        assert advance is not None
        for done in (0, 1, 1, 500, 501):
            advance(done, 1000)
        advance(3, 4, "bytes")
    assert terminal.getvalue() == "\rauditing 0%\rauditing 50%\rbytes 75%   \r         \r"


def test_rich_draws_a_bar_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, has_rich=True)
    with progress_bar("auditing") as advance:
        assert advance is not None
        advance(1, 4)
        advance(2, 2, "bytes")
        drawn = terminal.getvalue()
        assert re.search(r"auditing.*25%", drawn) and re.search(r"bytes.*100%", drawn)
    assert terminal.getvalue().endswith("\x1b[2K")
    assert "\x1b[?25h" in terminal.getvalue()[len(drawn) :], "the cursor is shown again"


def test_nothing_is_written_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("auditing") as advance:
        assert advance is not None
        advance(1, 2)
    with progress_bar("auditing", show=False) as advance:
        assert advance is None
    assert stream.getvalue() == ""


def test_work_that_is_done_soon_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress_bar("counted", after_s=1.0) as advance:
        assert advance is not None
        advance(1, 4)
        assert terminal.getvalue() == ""
        now[0] = 1.5
        advance(2, 4)
        assert terminal.getvalue() == "\rcounted 50%"


def test_an_error_clears_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    def work() -> None:
        with progress_bar("log") as advance:
            assert advance is not None
            advance(1, 2)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert terminal.getvalue() == "\rlog 50%\r       \r"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return LakeSpec(files=((4,) * 20, (3, 3)), columns=("string", "list")).write(tmp_path / "lake")


def test_counting_calls_back_up_to_the_total(lake: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    table = open_table(lake)
    kept = LakeDataset(table, batch_size=2, filters=[("string", "!=", "a")]).row_filter
    assert kept is not None
    count_rows(table, kept, progress=lambda *now: seen.append(now))
    assert seen == [(done, 22, "row groups counted") for done in (16, 20, 22)]


def test_counting_of_tokens_calls_back_for_each_file(lake: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    table = open_table(lake)
    packing = lakeckpt.pack(LakeDataset(table, batch_size=2, columns=["list"]), column="list", length=8).packing
    assert packing is not None
    count_tokens(table, packing, progress=lambda *now: seen.append(now))
    assert seen == [(1, 2, "files counted"), (2, 2, "files counted")]


def test_counting_of_a_dataset_that_takes_long_is_shown(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr("lakeckpt.data.base.selecting._SHOWN_S", 0.0)
    assert LakeDataset(lake, batch_size=2, filters=[("string", "!=", "a")]).selection is not None
    assert "\rrow groups counted 100%" in terminal.getvalue()


@pytest.mark.parametrize(("work", "phase"), [(audit, "records"), (verify, "bytes")])
def test_audit_and_verify_call_back_up_to_the_total_of_each_phase(
    work: Callable[..., object], phase: str, lake: Path, tmp_path: Path
) -> None:
    loader, storage = LakeLoader(LakeDataset(lake, batch_size=4)), LocalStorage(tmp_path / "run")
    with CheckpointManager(storage, {"reader": loader}, persist_every=2) as manager:
        manager.restore()
        for batch in itertools.islice(loader, 6):
            manager.step(batch)
    seen: list[tuple[int, int, str]] = []
    work(storage, progress=lambda *now: seen.append(now))
    assert seen[:4] == [(done, 4, "log") for done in range(1, 5)]  # the attempt, and three commits
    done = [one[0] for one in seen[4:]]
    assert {one[1:] for one in seen[4:]} == {(done[-1], phase)}
    assert done == sorted(set(done)) and len(done) >= 3
