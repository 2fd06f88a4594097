"""Profiles of idle windows beside a run's checkpoints, and the command that reports them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.bubbles.policy import IdleWindow
from lakeckpt.checkpoint.bubbles.profile import (
    BubbleProfile,
    IterationRecord,
    MovedSlice,
    profile_path,
    read_profiles,
    save_profile,
)
from lakeckpt.cli.main import main
from lakeckpt.errors import NewerFormat, WireDamaged
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.wire.documents import to_plain
from lakeckpt.wire.envelope import dumps
from tests.checkpoint.rig import changed

RECORD = IterationRecord(
    step=7,
    begin_s=10.0,
    end_s=11.0,
    windows=(
        IdleWindow(site="pipeline 3", kind="bubble", begin_s=10.2, end_s=10.4),
        IdleWindow(site="forward 0", kind="free", begin_s=10.5, end_s=10.6),
    ),
    slices=(
        MovedSlice(size_bytes=3000, begin_s=10.2, end_s=10.3),
        MovedSlice(size_bytes=1000, begin_s=10.7, end_s=10.8, urgent=True),
    ),
)


def profile(rank: int, attempt: int = 4) -> BubbleProfile:
    return BubbleProfile(attempt=attempt, rank=rank, world_size=2, records=(RECORD,) * 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The profiles of two attempts."""
    storage = open_storage(tmp_path / "run")
    for one in (profile(1), profile(0), profile(0, attempt=2)):
        save_profile(storage, one)
    return tmp_path / "run"


@pytest.fixture
def storage(run: Path) -> Storage:
    return open_storage(run)


def test_the_profiles_of_the_newest_attempt_come_back(storage: Storage) -> None:
    assert read_profiles(storage) == [profile(0), profile(1)]
    assert read_profiles(storage, 2) == [profile(0, attempt=2)]
    assert read_profiles(storage, 3) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": -1},
        {"world_size": 0},
        {"records": {}},
        {"records": [{"step": 1}]},
        {"records": [to_plain(RECORD) | {"step": "3"}]},
        {"records": [to_plain(RECORD) | {"step": -1}]},
        {"records": [to_plain(RECORD) | {"end_s": 10**400}]},
        {"records": [to_plain(RECORD) | {"windows": [["gap", "busy", 1.0, 2.0]]}]},
        {"records": [to_plain(RECORD) | {"windows": None}]},
        {"records": [to_plain(RECORD) | {"slices": [[1, 2]]}]},
        {"records": [to_plain(RECORD) | {"slices": [[-1, 0.0, 1.0, False]]}]},
        {"records": [to_plain(RECORD) | {"slices": [[True, 0.0, 1.0, False]]}]},
    ],
)
def test_a_profile_that_cannot_be_is_refused(storage: Storage, wrong: dict[str, Any]) -> None:
    plain = {"attempt": 4, "rank": 0, "world_size": 2, "records": []}
    assert BubbleProfile.from_bytes(dumps(plain, kind="bubbles", version=(1, 7))).rank == 0
    with pytest.raises(WireDamaged):
        BubbleProfile.from_bytes(dumps(plain | wrong, kind="bubbles", version=(1, 0)))
    with pytest.raises(NewerFormat):
        BubbleProfile.from_bytes(dumps(plain, kind="bubbles", version=(2, 0)))


def test_a_damaged_profile_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / profile_path(4, 1)
    path.write_bytes(changed(path.read_bytes()))
    assert main(["report", str(run)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_report_says_where_the_bytes_moved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["attempt"], plain["world_size"], [one["rank"] for one in plain["ranks"]]) == (4, 2, [0, 1])
    one = plain["ranks"][0]
    assert (one["iterations"], one["iteration_s"], one["bubble_s"]) == (2, 1.0, pytest.approx(0.2))
    assert (one["moved_bytes"], one["in_bubbles_bytes"], one["outside_bytes"]) == (8000, 6000, 2000)
    assert (one["in_bubbles_share"], one["at_the_fence_bytes"], one["in_free_time_bytes"]) == (0.75, 2000, 0)
    assert [(site["site"], site["times"], site["moved_bytes"]) for site in one["sites"]] == [
        ("pipeline 3", 2, 6000),
        ("forward 0", 2, 0),
    ]


def test_report_speaks_to_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--attempt", "4"]) == 0
    told = capsys.readouterr().out
    assert "attempt 4, 2 ranks" in told and "75.0%" in told and "pipeline 3" in told


def test_a_run_without_a_profile_is_no_error_and_no_run_is_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "log").mkdir()
    (run / "log" / "0000000001.lkc").write_bytes(b"an entry")
    assert main(["report", str(run), "--attempt", "9"]) == 0
    assert "no profile" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "there is no run at" in capsys.readouterr().err
