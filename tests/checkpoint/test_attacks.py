"""Whole checkpoints made to attack, through the front doors: restore, verify, read_state. A typed error, no code that
runs, nothing outside that is touched, and live objects as they were."""

from __future__ import annotations

import contextlib
import tracemalloc
import warnings
from pathlib import Path

import pytest

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.manifest import entry_from_bytes, entry_to_bytes
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.checkpoint.report import DamageWarning
from lakeckpt.convert import read_state
from lakeckpt.errors import CheckpointError, CheckpointNotFound, LakeckptError, NewerFormat, WireError
from tests.checkpoint.attacks import ATTACKS, link_out, put_part, saved
from tests.checkpoint.rig import Counter, training
from tests.wire.crafted import sealed


@pytest.mark.parametrize("name", ATTACKS)
def test_a_run_made_to_attack_is_refused_with_nothing_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKECKPT_BOOM", str(tmp_path / "boom"))
    (tmp_path / "secret").write_bytes(b"secret")
    storage = saved(tmp_path / "run")
    ATTACKS[name](storage)
    objects = training(seed=1) | {"n": Counter([2])}
    before = str({name: one.state_dict() for name, one in objects.items()})
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamageWarning)
            with pytest.raises(LakeckptError):
                CheckpointManager(storage, objects).restore()
            with pytest.raises((CheckpointError, WireError)):
                read_state(tmp_path / "run")
            with contextlib.suppress(LakeckptError):
                assert verify(storage).every_damage or name.startswith("tree")  # of what no checksum vouches for
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert str({name: one.state_dict() for name, one in objects.items()}) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "secret"]
    assert (tmp_path / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("what", ["objects", "parts", "log"])
@pytest.mark.parametrize("whole_folder", [True, False])
def test_links_out_of_a_run_are_not_followed(what: str, whole_folder: bool, tmp_path: Path) -> None:
    storage = saved(tmp_path / "run")
    link_out(storage, what, whole_folder=whole_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        with pytest.raises(LakeckptError, match=r"link|whole"):
            CheckpointManager(storage, training(seed=1) | {"n": Counter([2])}).restore()


def test_a_format_that_is_newer_is_refused_by_its_name_and_no_older_checkpoint_is_taken(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    for kind, put in {
        "part": lambda data: put_part(storage, data),
        "log": lambda data: storage.put(slot_path(1), [data]),
    }.items():
        put(sealed(b"\x80", kind=kind, version=(9, 0)))
        with pytest.raises(NewerFormat, match=rf"this {kind} document has format 9\.0 .*upgrade lakeckpt"):
            CheckpointManager(storage, training(seed=1) | {"n": Counter([2])}).restore()
        with pytest.raises(NewerFormat, match=rf"this {kind} document has format 9\.0 .*upgrade lakeckpt"):
            read_state(tmp_path)


def test_a_step_that_has_no_checkpoint_is_refused_with_those_that_have(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 7. The steps that can be loaded are \d"):
        read_state(tmp_path, step=7)


def test_entries_of_the_log_are_read_as_they_were_written(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    for slot in (0, 1):
        entry = entry_from_bytes(storage.read(slot_path(slot)))
        assert entry_from_bytes(entry_to_bytes(entry)) == entry
