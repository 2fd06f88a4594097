"""Looking at the next batch counts nothing, and a loader for validation begins its epoch each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakeckpt import CheckpointManager
from lakeckpt.data.base.memory import default_limit_bytes
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.reading.memory import machine_bytes
from tests.data.reading import ROWS, flat, loader_of, same, some


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_was_looked_at_is_delivered_next_and_counted_then(lake: Path, num_workers: int) -> None:
    loader = loader_of(lake, num_workers=num_workers)
    first = loader.peek()
    before = loader.state_dict()
    assert loader.last_receipt is None and same(loader.peek()["id"], first["id"])
    batches = some(loader, 3)
    assert same(batches[0]["id"], first["id"]) and before == loader_of(lake, num_lanes=num_workers or 1).state_dict()
    fourth = loader.peek()
    rest = list(loader)
    assert same(rest[0]["id"], fourth["id"]) and sorted(flat([*batches, *rest])) == list(range(ROWS))
    assert loader.peek().receipt.epoch == 1 and sorted(flat(loader)) == list(range(ROWS))


def test_looking_row_by_row_gives_the_next_row(lake: Path) -> None:
    loader = loader_of(lake, batch_size=None)
    rows = some(loader, 3)
    looked = loader.peek()
    rest = list(loader)
    assert same(looked["id"], rest[0]["id"]) and sorted(flat([*rows, *rest])) == list(range(ROWS))


def test_looking_puts_an_iterator_out_of_date_and_an_epoch_without_batches_shows_none(lake: Path) -> None:
    loader = loader_of(lake)
    iterator = iter(loader)
    next(iterator)
    loader.peek()
    with pytest.raises(StateUnavailable, match="out of date"):
        next(iterator)
    assert loader_of(lake, filters=[("id", "<", 0)]).peek() is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_restarts_reads_the_same_epoch_from_its_first_batch_each_time(
    lake: Path, num_workers: int
) -> None:
    loader = loader_of(lake, num_workers=num_workers, loader={"restart": True})
    whole = flat(loader)
    assert sorted(whole) == list(range(ROWS)) and flat(loader) == whole
    assert flat(some(loader, 2)) == whole[:8] and flat(loader) == whole and loader.epoch == 0
    assert loader.peek()["id"].tolist() == whole[:4]
    loader.set_epoch(2)
    assert flat(loader) != whole and loader.epoch == 2


def test_a_loader_that_restarts_has_no_state_to_save(lake: Path, tmp_path: Path) -> None:
    loader = loader_of(lake, loader={"restart": True})
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(StateUnavailable, match="restart=True"):
            call()
    with pytest.raises(ConfigError, match="restart=True"):
        CheckpointManager(tmp_path / "run", {"reader": loader})
    with pytest.raises(ConfigError, match="endless"):
        loader_of(lake, endless=True, loader={"restart": True})


def test_windows_that_do_not_fit_into_the_limit_are_warned_of(lake: Path) -> None:
    with pytest.warns(UserWarning, match=r"windows of 4 row groups are open at once .*memory_limit_bytes="):
        flat(loader_of(lake, memory_limit_bytes=10))


def test_the_default_limit_is_a_share_of_what_the_control_groups_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = machine_bytes(str(tmp_path), str(tmp_path))
    (tmp_path / "self").mkdir()
    (tmp_path / "v1" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "v1" / "memory" / "job" / "memory.limit_in_bytes").write_text("4096\n")
    (tmp_path / "v2" / "user" / "job").mkdir(parents=True)
    (tmp_path / "v2" / "user" / "job" / "memory.max").write_text("max\n")
    (tmp_path / "v2" / "user" / "memory.max").write_text("8192\n")
    (tmp_path / "self" / "cgroup").write_text("3:cpu,memory:/job\n0::/user/job\n")
    assert machine_bytes(str(tmp_path), str(tmp_path / "v1")) == 4096
    assert machine_bytes(str(tmp_path), str(tmp_path / "v2")) == 8192
    assert machine_bytes(str(tmp_path), str(tmp_path / "none")) == everything
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_limit_bytes(2) == machine_bytes() // 32
