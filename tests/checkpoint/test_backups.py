"""The agent keeps copies of a run elsewhere, as far behind it as the user allows, and says what it could not copy."""

from __future__ import annotations

import shutil
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint.agent.logs import agents_of
from lakeckpt.checkpoint.copying.backups import Backup, Backups
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import BackupWarning, ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, manager, training
from tests.checkpoint.test_background import managed, restored, train
from tests.patience import PATIENCE_S


def copied_step(place: Path) -> int | None:
    tip = read_history(LocalStorage(place)).tip
    return None if tip is None else tip.step


def test_a_backup_is_made_as_soon_as_the_run_is_so_many_steps_or_so_much_time_ahead(tmp_path: Path) -> None:
    run, lines = LocalStorage(tmp_path / "run"), list[str]()
    by_steps, by_time, at_once = (tmp_path / name for name in ("steps", "time", "once"))
    backups = Backups(
        run,
        [Backup(str(by_steps), 2), Backup(str(by_time), timedelta(hours=1)), Backup(str(at_once), 1e-9)],
        lines.append,
    )
    found = []
    with manager(run, {"n": Counter()}, persist_every=1) as saver:
        saver.restore()
        for _ in range(4):
            saver.step()
            backups.committed()
            backups.finish()
            found.append(tuple(map(copied_step, (by_steps, by_time, at_once))))
    assert found == [(1, 1, 1), (1, 1, 2), (3, 1, 3), (3, 1, 4)]
    assert backups.failed == "" and len(lines) == 7
    assert verify(LocalStorage(by_steps)).every_damage == ()


def test_the_agent_makes_backups_beside_training_and_goes_on_with_them_in_the_next_attempt(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    for first in (1, 3):
        objects = training()
        with managed(run, objects, tmp_path / "arenas", backups=[lakeckpt.Backup(str(kept), 2)]) as saver:
            assert saver.restore() == first - 1
            made = train(saver, objects, 2)
        (log,) = (tmp_path / "arenas").glob("*.log")
        until_s = time.monotonic() + PATIENCE_S
        while agents_of(str(log)) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert copied_step(kept) == first + 1
        shutil.copytree(kept, tmp_path / str(first))  # a restore begins an attempt, and takes no copy any more
        assert restored(LocalStorage(tmp_path / str(first))) == (first + 1, made[first + 1])


def test_a_backup_that_cannot_be_made_is_a_warning_at_a_later_save_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    objects, said = training(), list[warnings.WarningMessage]()
    with managed(tmp_path / "run", objects, tmp_path / "arenas", backups=[Backup(str(tmp_path / "file"), 1)]) as saver:
        saver.restore()
        for _ in range(200):
            train(saver, objects, 1)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                saver.save()
            if said:
                break
    (one,) = said
    assert one.category is BackupWarning and f"the backup at {tmp_path / 'file'} was not made" in str(one.message)


@pytest.mark.parametrize(
    ("backups", "options", "says"),
    [
        (lambda: [Backup("x", 0)], {}, "every of a Backup is a positive number of steps"),
        (lambda: [Backup("x", True)], {}, "every of a Backup is a positive number of steps"),
        (lambda: [Backup("x", 1, {"key": object()})], {}, "storage_options of a Backup go to the agent"),
        (lambda: ["x"], {}, "backups is a list of lakeckpt.Backup, got"),
        (lambda: "x", {}, "backups is a list of lakeckpt.Backup, got"),
        (lambda: [Backup("x", 1)], {"capture_every": None, "arenas": None}, "let cron or the scheduler run `lakeckpt"),
    ],
)
def test_bad_backups_are_refused_by_name(tmp_path: Path, backups: Any, options: dict[str, Any], says: str) -> None:
    given = {"capture_every": 1, "arenas": tmp_path / "arenas", **options}
    with pytest.raises(ConfigError, match=says):
        manager(tmp_path / "run", training(), backups=backups(), **given)
