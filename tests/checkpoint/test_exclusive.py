"""With ``exclusive=True`` a job refuses to take over a run whose job is alive, and is never refused its own."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lakeckpt.checkpoint.arena.markers import began_s
from lakeckpt.checkpoint.format.manifest import Begin
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.log import put_entry
from lakeckpt.checkpoint.presence import presence
from lakeckpt.errors import ConfigError, RunInUse, TrackingError
from lakeckpt.wire.documents import to_plain
from lakeckpt.wire.envelope import dumps
from tests.checkpoint.rig import Counter, HubExchange, MemoryStorage, manager, run_ranks
from tests.patience import PATIENCE_S

HERE = os.uname().nodename


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def process() -> Iterator[int]:
    """A process of this machine that lives."""
    one = subprocess.Popen(["sleep", "1000"])
    yield one.pid
    one.kill()
    one.wait()


def begin(storage: MemoryStorage, *, host: str, pid: int, ago_s: float = 0.0) -> None:
    """Another job's attempt."""
    entry = Begin(
        run="r", slot=0, world_size=1, library="x", created_s=time.time() - ago_s, write_id="w", host=host, pid=pid
    )
    put_entry(storage, entry)


def note(storage: MemoryStorage, *, ago_s: float, launchers: tuple[str, ...] = ()) -> None:
    """The note that the other job has written."""
    alive = presence._Alive(launchers=launchers, at_s=time.time() - ago_s)
    storage.put("alive/0000000000.lkc", [dumps(to_plain(alive), kind="alive", version=(1, 0))])


def exclusive(storage: MemoryStorage, **options: Any) -> CheckpointManager:
    return manager(storage, {"n": Counter(0)}, exclusive=True, **options)


def test_a_trainer_that_lives_on_this_machine_is_not_superseded(process: int) -> None:
    storage = MemoryStorage()
    begin(storage, host=HERE, pid=process)
    before = dict(storage.objects)
    with pytest.raises(RunInUse, match=rf"attempt 0 \(process {process} on .* began \d s ago, and its process lives"):
        exclusive(storage).restore()
    assert storage.objects == before


def test_a_process_that_has_got_the_number_of_a_dead_trainer_is_no_trainer(process: int) -> None:
    storage = MemoryStorage()
    begin(storage, host=HERE, pid=process, ago_s=3600.0)
    note(storage, ago_s=20.0)
    assert exclusive(storage).restore() == 0


def test_a_trainer_that_died_on_this_machine_is_followed_at_once(process: int) -> None:
    storage = MemoryStorage()
    begin(storage, host=HERE, pid=2**22 + 1)
    note(storage, ago_s=20.0)
    assert exclusive(storage).restore() == 0


@pytest.mark.parametrize(("ago_s", "is_refused"), [(20.0, True), (170.0, True), (190.0, False)])
def test_a_job_elsewhere_is_alive_while_its_note_is_younger_than_three_minutes(ago_s: float, is_refused: bool) -> None:
    storage = MemoryStorage()
    begin(storage, host="node-3", pid=71, ago_s=7200.0)
    note(storage, ago_s=ago_s)
    if is_refused:
        with pytest.raises(RunInUse, match=r"process 71 on node-3.* began 2 h ago, and showed \d+ s ago"):
            exclusive(storage).restore()
    else:
        assert exclusive(storage).restore() == 0


def test_a_job_elsewhere_that_writes_no_note_is_superseded() -> None:
    storage = MemoryStorage()
    begin(storage, host="node-3", pid=71)
    assert exclusive(storage).restore() == 0


@pytest.mark.parametrize("host", [HERE, "node-3"])
def test_a_restart_of_the_same_launcher_is_never_refused(
    host: str, process: int, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("SLURM_JOB_ID", "7")
    storage = MemoryStorage()
    begin(storage, host=host, pid=process)
    note(storage, ago_s=1.0, launchers=("torchrun a", "Slurm job 7"))
    assert exclusive(storage).restore() == 0


def test_by_default_a_job_that_may_be_alive_is_superseded_and_said(
    process: int, caplog: pytest.LogCaptureFixture
) -> None:
    for host in (HERE, "node-3"):
        storage = MemoryStorage()
        begin(storage, host=host, pid=process, ago_s=0.0)
        note(storage, ago_s=1.0)
        with caplog.at_level(logging.WARNING, "lakeckpt"):
            assert manager(storage, {"n": Counter(0)}).restore() == 0
        said = caplog.records[-1].getMessage()
        assert f"takes the run over from attempt 0 (process {process} on {host}" in said and "began 0 s ago" in said


def test_rank_0_renews_its_note_and_removes_it_and_those_before_at_its_end(environment: pytest.MonkeyPatch) -> None:
    storage, every = MemoryStorage(), []
    environment.setattr(presence, "_RENEW_S", 0.0)
    note(storage, ago_s=1000.0)
    begin(storage, host="node-3", pid=71)
    one = exclusive(storage)
    one.restore()
    with storage.changed:
        for _ in range(3):  # it is written again and again
            assert storage.changed.wait_for(
                lambda: storage.objects.get("alive/0000000001.lkc") not in (None, *every), PATIENCE_S
            )
            every.append(storage.objects["alive/0000000001.lkc"])
    assert [path for path in storage.objects if path.startswith("alive/")] == ["alive/0000000001.lkc"]
    thread = one._presence._thread
    assert thread is not None and thread.daemon
    one.close()
    assert [path for path in storage.objects if path.startswith("alive/")] == [] and not thread.is_alive()


def test_the_thread_of_a_manager_that_is_never_closed_ends_with_the_manager() -> None:
    one = exclusive(MemoryStorage())
    one.restore()
    thread = one._presence._thread
    assert thread is not None
    del one
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_ranks_that_disagree_on_it_are_refused() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        manager(storage, {"n": Counter(0)}, exchange=exchange, exclusive=rank == 0).restore()

    assert {type(one) for one in run_ranks(2, body)} == {TrackingError}


def test_a_refusal_is_raised_on_all_ranks_and_the_launchers_of_all_ranks_count(
    process: int, environment: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    begin(storage, host="node-3", pid=71)
    note(storage, ago_s=1.0, launchers=("torchrun of node 1",))

    def body(rank: int, exchange: HubExchange) -> int:
        one = exclusive(storage, exchange=exchange)
        if rank == 1 and knows:
            one._presence._launchers = ("torchrun of node 1",)
        return one.restore()

    knows = False
    assert {type(one) for one in run_ranks(2, body)} == {RunInUse}
    knows = True
    assert run_ranks(2, body) == [0, 0]


def test_it_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="exclusive is True or False"):
        manager(MemoryStorage(), {"n": Counter(0)}, exclusive="yes")


def test_the_time_at_which_a_process_began_is_known_while_it_is_there(process: int) -> None:
    began = began_s(process)
    assert began is not None and abs(time.time() - began) < PATIENCE_S
    assert began_s(2**22 + 1) is None
