"""Runs that are refused: a link that leads out of the folder, a newer format, a step that has no checkpoint."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.manifest import entry_from_bytes, entry_to_bytes
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.convert import read_state
from lakeckpt.errors import CheckpointNotFound, DamageWarning, LakeckptError, NewerFormat
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, MemoryStorage, training, with_parts
from tests.wire.crafted import sealed


@functools.cache
def files() -> dict[str, bytes]:
    """A run with one checkpoint."""
    storage = MemoryStorage()
    with CheckpointManager(storage, training() | {"n": Counter([1, torch.ones(3)])}) as manager:
        manager.restore()
        manager.save()
    return storage.objects


def saved(folder: Path) -> LocalStorage:
    """It in a folder."""
    for path, data in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return LocalStorage(folder)


def put_part(storage: LocalStorage, data: bytes) -> None:
    manifest = read_history(storage).tip
    assert manifest is not None
    storage.put(slot_path(manifest.slot), [entry_to_bytes(with_parts(storage, manifest, {0: data}))])


def link_out(storage: LocalStorage, what: str, *, whole_folder: bool) -> None:
    """Have a folder of the run, or the last file in it, be a link to one that lies beside the run."""
    run = Path(storage.name)
    path = run / what
    if not whole_folder:
        path = next(one for one in sorted(path.rglob("*"), reverse=True) if one.is_file())
    path.rename(run.parent / "outside")
    path.symlink_to(run.parent / "outside")


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
        "part": lambda data: put_part(storage, len(data).to_bytes(8, "big") + data),
        "log": lambda data: storage.put(slot_path(1), [data]),
    }.items():
        put(sealed(b"\x80", kind=kind, version=(9, 0)))
        with pytest.raises(NewerFormat, match=rf"this {kind} document has format 9\.0 .*upgrade lakeckpt"):
            CheckpointManager(storage, training(seed=1) | {"n": Counter([2])}).restore()
        with pytest.raises(NewerFormat, match=rf"this {kind} document has format 9\.0 .*upgrade lakeckpt"):
            read_state(tmp_path)


def test_a_step_that_has_no_checkpoint_is_refused_with_those_that_have(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(
        CheckpointNotFound, match=r"no checkpoint of step 7 that .* The steps that can be loaded are \d"
    ):
        read_state(tmp_path, step=7)


def test_entries_of_the_log_are_read_as_they_were_written(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    for slot in (0, 1):
        entry = entry_from_bytes(storage.read(slot_path(slot)))
        assert entry_from_bytes(entry_to_bytes(entry)) == entry
