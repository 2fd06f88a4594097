"""A run whose place is empty at a restart is away and not new, wherever a node of the job knows a run there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.agent.generations import digest_of_place, digest_of_run, identity_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaLayout
from lakeckpt.checkpoint.arena.markers import Marker, launchers, leave_marker, marker_at, remove_marker
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.cli.main import main
from lakeckpt.errors import SaveFailed, StorageError
from lakeckpt.lake.storage.base import expect_folder
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.agent.rig import fill, plan
from tests.checkpoint.rig import Counter, HubExchange, good, manager, run_ranks

LAUNCHER = ("Slurm job 7",)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """These processes are nobody's; with `environment`, a launcher's."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")

    def become(**environment: str) -> None:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    become()
    return become


class Clock:
    """A clock on which ranks wait for no time. ``then`` is done when it comes to ``at_s``."""

    def __init__(self, at_s: float = 0.0, then: Callable[[], object] = lambda: None) -> None:
        self.at_s, self.then, self.now_s, self.is_done = at_s, then, 0.0, False

    def now(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.at_s and not self.is_done:
            self.is_done = True
            self.then()


class Site:
    """The place of a run, and the folder of a node's memory."""

    def __init__(self, folder: Path) -> None:
        self.run, self.arenas, self.kept = folder / "run", folder / "arenas", folder / "kept"

    def trained(self, steps: int) -> None:
        """An attempt that saves each step, and dies."""
        one = self.manager({"n": Counter(0)}, persist_every=1)
        one.restore()
        for _ in range(steps):
            one.step()

    def manager(self, state: dict[str, Any], **options: Any) -> CheckpointManager:
        return manager(str(self.run), state, **{"arenas": self.arenas, "timeout_s": 60.0, **options})

    def take_away(self, how: str) -> None:
        self.run.rename(self.kept)
        if how == "emptied":
            self.run.mkdir()

    def bring_back(self) -> None:
        if self.run.exists():
            self.run.rmdir()
        self.kept.rename(self.run)

    def capture(self, step: int) -> None:
        """A cut in the node's memory."""
        digest = digest_of_run("a run", LocalStorage(self.run))
        slices = plan()
        layout = ArenaLayout(
            identity=identity_of(digest, rank=0, world_size=1),
            plan=slices.digest,
            data_bytes=slices.data_bytes,
            documents_bytes=8192,
        )
        with ArenaFolder(self.arenas).create(layout) as arena:
            fill(arena, step)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("how", ["renamed", "emptied"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launchers_restart_waits_for_its_run_and_goes_on_at_its_newest_checkpoint(
    how: str, ranks: int, site: Site, launched: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    launched(SLURM_JOB_ID="7")
    site.trained(3)
    site.take_away(how)
    launched(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    clock = Clock(30.0, site.bring_back)

    def body(rank: int, exchange: HubExchange) -> int:
        waiter = clock if rank == 0 else Clock()
        return site.manager({"n": Counter(0)}, exchange=exchange, waiter=waiter).restore()

    with caplog.at_level(logging.WARNING, "lakeckpt"):
        assert good(run_ranks(ranks, body)) == [3] * ranks
    assert 30 <= clock.now_s < 40
    said = [one.getMessage() for one in caplog.records]
    assert f"{site.run} lists no run, but this job has begun a run there before, whose newest" in said[0]
    assert "of step 3" in said[0] and f"lakeckpt doctor --forget {site.run} --arenas {site.arenas}" in said[0]
    assert "lists its run again" in said[1]
    assert [one.step for one in read_history(LocalStorage(site.run)).chain] == [1, 2, 3]


@pytest.mark.parametrize("how", ["renamed", "emptied"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_does_not_come_back_is_an_error_on_all_ranks_that_names_the_cut_and_begins_nothing(
    how: str, ranks: int, site: Site, launched: Callable[..., None]
) -> None:
    launched(TORCHELASTIC_RUN_ID="exp-7")
    site.trained(2)
    site.take_away(how)

    def body(rank: int, exchange: HubExchange) -> None:
        site.manager({"n": Counter(0)}, exchange=exchange, waiter=Clock()).restore()

    errors = run_ranks(ranks, body)
    assert {type(one) for one in errors} == {StorageError}
    for error in errors:
        assert "of step 2" in str(error) and str(site.run) in str(error) and "within 60 s" in str(error)
        assert f"lakeckpt doctor --forget {site.run}" in str(error) and len(str(error)) < 600
    assert list(site.run.iterdir()) == [] if how == "emptied" else not site.run.exists()
    site.bring_back()
    assert site.manager({"n": Counter(0)}).restore() == 2


def test_a_run_that_somebody_removed_begins_anew_at_once_where_it_is_started_by_hand(site: Site) -> None:
    site.trained(2)
    site.take_away("renamed")
    clock = Clock()
    assert site.manager({"n": Counter(0)}, waiter=clock).restore() == 0
    assert clock.now_s == 0 and site.run.exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"}),
        ({"TORCHELASTIC_RUN_ID": "a"}, {}),
    ],
)
def test_another_launchers_job_waits_for_nobody(
    before: dict[str, str], after: dict[str, str], site: Site, launched: Callable[..., None]
) -> None:
    launched(**before)
    site.trained(2)
    site.take_away("renamed")
    launched(**after)
    clock = Clock()
    assert site.manager({"n": Counter(0)}, waiter=clock).restore() == 0 and clock.now_s == 0


def test_the_run_id_that_torchrun_gives_by_default_stands_for_the_process_that_started_the_rank() -> None:
    (none,) = launchers({"TORCHELASTIC_RUN_ID": "none"})
    assert none == launchers({"TORCHELASTIC_RUN_ID": "none"})[0] and "process" in none
    assert launchers({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "3"}) == (none, "Slurm job 3")
    assert launchers({}) == ()


def test_a_cut_in_memory_is_offered_within_ten_seconds_and_forgotten_by_doctor(site: Site) -> None:
    site.arenas.mkdir(mode=0o700)
    site.capture(25)
    clock = Clock()
    with pytest.raises(StorageError, match="holds the cut of step 25 of a run there") as raised:
        site.manager({"n": Counter(0)}, waiter=clock).restore()
    assert clock.now_s <= 10 and not site.run.exists()
    assert main(["doctor", "--forget", str(site.run), "--arenas", str(site.arenas)]) == 0
    assert str(site.run) in str(raised.value) and list(site.arenas.iterdir()) == []
    assert site.manager({"n": Counter(0)}, waiter=clock).restore() == 0


def test_doctor_ends_the_wait_of_a_job(
    site: Site, launched: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    launched(SLURM_JOB_ID="7")
    site.trained(2)
    site.take_away("emptied")
    forget = ["doctor", "--forget", str(site.run), "--arenas", str(site.arenas)]
    clock = Clock(20.0, lambda: main(forget))
    assert site.manager({"n": Counter(0)}, waiter=clock).restore() == 0
    assert 20 <= clock.now_s < 25 and "a new run begins" in caplog.text


def test_a_run_that_is_copied_back_is_restored_when_its_listing_stands_still(
    site: Site, launched: Callable[..., None]
) -> None:
    launched(SLURM_JOB_ID="7")
    site.trained(3)
    site.take_away("emptied")
    files = sorted(one for one in site.kept.rglob("*") if one.is_file())

    class Copying(Clock):
        def wait(self, seconds: float) -> None:
            super().wait(seconds)
            if files:
                file = files.pop()
                to = site.run / file.relative_to(site.kept)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(file.read_bytes())

    assert site.manager({"n": Counter(0)}, waiter=Copying()).restore() == 3 and not files


def test_a_job_that_ended_well_leaves_no_marker_and_one_that_fails_leaves_it(
    site: Site, launched: Callable[..., None]
) -> None:
    launched(SLURM_JOB_ID="7")
    place, folder = digest_of_place(LocalStorage(site.run)), ArenaFolder(site.arenas)

    def fails() -> None:
        with site.manager({"n": Counter(0)}, persist_every=1) as one:
            one.restore()
            one.step()
            raise KeyError("loss")

    with pytest.raises(KeyError):
        fails()
    assert marker_at(folder, place) == Marker(place=str(site.run), launchers=LAUNCHER, step=1)
    with site.manager({"n": Counter(0)}, persist_every=1) as one:
        assert one.restore() == 1
        one.step()
        assert marker_at(folder, place) == Marker(place=str(site.run), launchers=LAUNCHER, step=2)
    assert marker_at(folder, place) is None and not remove_marker(folder, place)


def test_a_marker_that_cannot_be_written_or_read_is_none(site: Site, launched: Callable[..., None]) -> None:
    launched(SLURM_JOB_ID="7")
    site.arenas.write_text("no folder")
    site.trained(1)
    place = digest_of_place(LocalStorage(site.run))
    assert marker_at(ArenaFolder(site.arenas), place) is None
    site.arenas.unlink()
    leave_marker(ArenaFolder(site.arenas), place, Marker(place="x", launchers=LAUNCHER, step=1))
    (torn,) = site.arenas.iterdir()
    torn.write_bytes(torn.read_bytes()[:-3])
    assert marker_at(ArenaFolder(site.arenas), place) is None


@pytest.mark.parametrize("how", ["renamed", "emptied"])
def test_a_save_into_a_folder_that_is_away_fails_and_makes_nothing_there(how: str, site: Site) -> None:
    state = {"n": Counter(0)}
    one = site.manager(state)
    one.restore()
    one.step()
    one.save()
    site.take_away(how)
    one.step()
    with pytest.raises(SaveFailed, match="is away: it was renamed, unmounted or removed"):
        one.save()
    assert list(site.run.iterdir()) == [] if how == "emptied" else not site.run.exists()
    site.bring_back()
    assert one.save().step == 2
    assert [entry.step for entry in read_history(LocalStorage(site.run)).chain] == [1, 2]


@pytest.mark.parametrize("how", ["renamed", "emptied"])
def test_an_agent_that_starts_when_the_folder_is_away_makes_no_run_there(how: str, tmp_path: Path) -> None:
    if how == "emptied":
        (tmp_path / "run").mkdir()
    storage = LocalStorage(tmp_path / "run")
    expect_folder(storage, "log", is_known=True)
    for _ in range(2):
        with pytest.raises(StorageError, match="is away"):
            storage.put("parts/one", [b"part"])
    assert not list(tmp_path.rglob("parts"))
    (tmp_path / "run" / "log").mkdir(parents=True)
    storage.put("parts/one", [b"part"])
