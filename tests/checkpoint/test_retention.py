"""What goes and what stays: data behind a verified commit only, the record and the index never."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.checkpoint.log import slot_path
from lakeckpt.checkpoint.retention import prune
from lakeckpt.checkpoint.verify import VerifyReport, verify
from lakeckpt.errors import AttemptSuperseded, SaveFailed
from lakeckpt.testing.storage import Fault, FaultyStorage, Killed
from tests.checkpoint.rig import Counter, MemoryStorage, manager


def folders(storage: MemoryStorage) -> set[str]:
    return {
        name.split("/", 1)[1].rpartition("/")[0] for name in storage.objects if name.startswith(("parts/", "objects/"))
    }


def run(storage: Any, steps: int, *, value: Any = 1.0, **options: Any) -> None:
    saver = manager(storage, {"n": Counter([value])}, every=1, **options)
    saver.restore()
    for _ in range(steps):
        saver.step()


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_keep_their_data_and_all_keep_their_record(keep: int) -> None:
    storage = MemoryStorage()
    storage.put("index/abc.lkc", [b"x"])
    storage.put("parts/readme", [b"not ours"])
    run(storage, 7, keep=keep)
    expected = {f"0000000000/{step:012d}-{step - 1:06d}" for step in range(8 - keep, 8)}
    assert {name for name in folders(storage) if name} == expected
    assert len([name for name in storage.objects if name.startswith("log/")]) == 8
    assert storage.objects["index/abc.lkc"] == b"x" and storage.objects["parts/readme"] == b"not ours"
    assert [one.step for one in read_history(storage).chain] == list(range(1, 8))


def test_leftovers_of_dead_attempts_and_abandoned_branches_go_with_the_next_commit() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=2)
    storage.put("objects/0000000000/000000000004-000003/00000-0000-ab.safetensors", [b"never committed"])
    storage.put("parts/0000000000/000000000004-000003/00000.lkc", [b"never committed"])
    run(storage, 1, keep=2)
    assert folders(storage) == {"0000000000/000000000003-000002", "0000000004/000000000004-000000"}


def test_what_a_newer_attempt_writes_is_never_touched() -> None:
    storage = MemoryStorage()
    run(storage, 2, keep=1)
    newest = read_history(storage).tip
    storage.put("parts/0000000009/000000000004-000000/00000.lkc", [b"of another"])
    storage.put("parts/0000000000/000000000003-000002/00000.lkc", [b"of our next save"])
    prune(storage, newest, keep=1)
    assert len(folders(storage)) == 3


def test_a_superseded_attempt_removes_nothing() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=3)
    newest = read_history(storage).tip
    manager(storage, {"n": Counter()}).restore()
    before = dict(storage.objects)
    assert prune(storage, newest, keep=1) == 0 and storage.objects == before


def test_a_chain_that_cannot_be_read_keeps_everything_for_now() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=3)
    newest = read_history(storage).tip
    for damaged in (b"?", None):
        before = dict(storage.objects)
        if damaged:
            storage.objects[slot_path(2)] = damaged
        else:
            del storage.objects[slot_path(2)]
        assert prune(storage, newest, keep=2) == 0
        storage.objects = before


def test_a_save_that_is_not_committed_removes_nothing() -> None:
    inner = MemoryStorage()
    run(inner, 2, keep=1)
    before = folders(inner)
    faults = {("put_new", n): Fault.ERROR for n in range(2, 5)}
    with pytest.raises(SaveFailed):
        run(FaultyStorage(inner, fail_at=faults), 1, keep=1)
    assert before < folders(inner)
    zombie = manager(inner, {"n": Counter()}, keep=1)
    zombie.restore()
    manager(inner, {"n": Counter()}).restore()
    before = folders(inner)
    with pytest.raises(AttemptSuperseded):
        zombie.save()
    assert before < folders(inner)


def test_a_failure_to_remove_does_not_fail_the_save() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, fail_at={("delete", 1): Fault.ERROR})
    run(storage, 3, keep=1)
    assert read_history(inner).tip.step == 3 and len(folders(inner)) == 1


TENSOR = torch.ones(2)


def half_removed(deletes: int) -> MemoryStorage:
    """A run of which retention was killed at the ``deletes``-th file: of checkpoints 2 and 3 something may be left."""
    storage = MemoryStorage()
    run(storage, 3, keep=2, value=TENSOR)
    with pytest.raises(Killed):
        run(FaultyStorage(storage, fail_at={("delete", deletes): Fault.KILL}), 1, keep=1, value=TENSOR)
    return storage


def statuses(report: VerifyReport) -> dict[int, str]:
    return {one.step: one.status for one in report.checkpoints}


def test_a_kill_while_old_data_are_removed_is_no_damage() -> None:
    """Each checkpoint is one file of tensors and one part; the files of tensors go first."""
    found = []
    for deletes in range(1, 5):
        report = verify(half_removed(deletes))
        assert report.every_damage == () and report.exit_status == 0
        found.append(statuses(report))
    assert [(one[2], one[3], one[4]) for one in found] == [
        ("intact", "intact", "intact"),
        ("removed", "intact", "intact"),
        ("removed", "removed", "intact"),
        ("removed", "removed", "intact"),
    ]
    storage = half_removed(2)
    run(storage, 1, keep=1, value=TENSOR)
    assert len(folders(storage)) == 1


def test_what_is_left_of_a_half_removed_checkpoint_is_still_read() -> None:
    storage = half_removed(2)
    (part,) = (path for path in storage.objects if path.startswith("parts/") and "000000000002-" in path)
    storage.objects[part] = storage.objects[part][:-1]
    report = verify(storage)
    assert [one.path for one in report.every_damage] == [part] and statuses(report)[2] == "damaged"


def test_a_missing_file_of_a_checkpoint_that_is_kept_is_damage() -> None:
    storage = MemoryStorage()
    run(storage, 4, keep=2, value=TENSOR)
    (file,) = (path for path in storage.objects if path.startswith("objects/") and "000000000003-" in path)
    storage.delete(file)
    report = verify(storage)
    assert [one.path for one in report.every_damage] == [file] and statuses(report)[3] == "damaged"
