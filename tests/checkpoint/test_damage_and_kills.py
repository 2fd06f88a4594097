"""Any damage is noticed and the checkpoint before is taken; any kill leaves a complete older or newer checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import open_table
from lakeckpt.checkpoint.format.verified_reads import fetch_part, fetch_register
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import CheckpointDamaged, DamageWarning, NewerFormat, SaveFailed
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing.faulty_storage import FaultyStorage, Killed, StoreFault
from lakeckpt.wire.envelope import dumps
from tests.checkpoint.rig import Counter, MemoryStorage, Reader, manager, train_step, training


def two_checkpoints() -> MemoryStorage:
    """Step 1 in slot 1, step 2 in slot 2."""
    storage = MemoryStorage()
    objects = training() | {"n": Counter(0), "reader": Reader()}
    saver = manager(storage, objects)
    saver.restore()
    batches = iter(objects["reader"])
    for step in (1, 2):
        next(batches)
        train_step(objects)
        objects["n"].value = step
        saver.step()
        saver.save()
    return storage


def restored(storage: Any) -> tuple[int, int, int, tuple[str, ...]]:
    """Steps done, as the manager, a counter and the reader say; and the paths of the damage that was told."""
    objects = training(seed=4) | {"n": Counter(-1), "reader": Reader()}
    saver = manager(storage, objects)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = saver.restore()
    report = saver.restore_report
    assert report is not None
    assert len(caught) == len(report.damaged) and all(one.category is DamageWarning for one in caught)
    return steps, objects["n"].value, objects["reader"].state_dict()["step"], tuple(one.path for one in report.damaged)


def copy_of(storage: MemoryStorage) -> MemoryStorage:
    twin = MemoryStorage()
    twin.objects = dict(storage.objects)
    return twin


def mutations(data: bytes, places: int) -> Iterator[bytes | None]:
    """One flipped bit at about so many places (all bits in turn), truncations, an addition, other content, no file."""
    for at in range(0, len(data), len(data) // places | 1):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    for at in {0, 1, len(data) // 2, len(data) - 1}:
        yield data[:at]
    yield data + b"\0"
    yield bytes(len(data))
    yield None


PLACES = pytest.mark.parametrize("places", [40, pytest.param(120, marks=pytest.mark.soak)])


def test_two_whole_checkpoints_restore_to_the_second() -> None:
    assert restored(two_checkpoints()) == (2, 2, 2, ())


@PLACES
@pytest.mark.parametrize("kind", ["log/0000000002", "parts/", "objects/"])
def test_damage_in_any_file_of_the_newest_checkpoint_is_told_and_the_one_before_is_taken(
    kind: str, places: int
) -> None:
    whole = two_checkpoints()
    names = [name for name in whole.objects if name.startswith(kind)]
    (name,) = names[-1:]  # of the second checkpoint: its folder sorts last
    for mutated in mutations(whole.objects[name], places):
        storage = copy_of(whole)
        if mutated is None:
            del storage.objects[name]
        else:
            storage.objects[name] = mutated
        if kind.startswith("log") and mutated is None:
            assert restored(storage)[:3] == (1, 1, 1)  # as if it had never been committed
            continue
        steps, counter, reader, damaged = restored(storage)
        assert (steps, counter, reader) == (1, 1, 1)
        assert damaged == ("log/0000000002.lkc",)


@PLACES
@pytest.mark.parametrize("slot", [0, 1])
def test_damage_in_older_entries_is_told_and_the_newest_is_taken(slot: int, places: int) -> None:
    whole = two_checkpoints()
    name = f"log/{slot:010d}.lkc"
    for mutated in mutations(whole.objects[name], places):
        storage = copy_of(whole)
        if mutated is None:
            del storage.objects[name]
        else:
            storage.objects[name] = mutated
        assert restored(storage) == (2, 2, 2, (name,))


def test_every_byte_of_a_part_and_of_the_register_is_covered_by_the_manifest() -> None:
    storage = two_checkpoints()
    manifest = read_history(storage).tip
    register = fetch_register(storage, manifest)
    assert fetch_part(storage, manifest, register, 0).rank == 0
    for path in (manifest.save.part_path(0), manifest.save.register_path):
        whole = storage.objects[path]
        for at in range(len(whole)):
            storage.objects[path] = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
            with pytest.raises(CheckpointDamaged):
                fetch_part(storage, manifest, fetch_register(storage, manifest), 0)
        storage.objects[path] = whole


def test_a_whole_part_that_is_not_the_one_that_was_committed_is_noticed() -> None:
    storage = two_checkpoints()
    manifest = read_history(storage).tip
    path, register = manifest.save.part_path(0), fetch_register(storage, manifest)
    other = replace(fetch_part(storage, manifest, register, 0), world_size=2).to_bytes()
    assert len(other) == len(storage.objects[path])
    storage.objects[path] = other
    with pytest.raises(CheckpointDamaged, match=r"the part of rank 0 is not what slot 2 committed"):
        fetch_part(storage, manifest, register, 0)


def test_training_goes_on_from_the_one_before_and_the_history_says_so() -> None:
    storage = two_checkpoints()
    for name in storage.objects:
        if name.startswith("objects/"):
            last = name
    storage.objects[last] = storage.objects[last][:-1]
    objects = training() | {"n": Counter(), "reader": Reader()}
    saver = manager(storage, objects)
    with pytest.warns(DamageWarning, match=r"damage in the run: log/0000000002.lkc: .*safetensors"):
        assert saver.restore() == 1
    next(iter(objects["reader"]))
    saver.step()
    saver.save()
    history = read_history(storage)
    assert [one.slot for one in history.chain] == [1, 5] and [one.slot for one in history.abandoned] == [2]
    assert restored(storage)[0] == 2


def test_files_in_each_others_place_are_noticed() -> None:
    whole = two_checkpoints()
    for kind in ("parts/", "objects/", "log/"):
        names = [name for name in whole.objects if name.startswith(kind)][-2:]
        storage = copy_of(whole)
        storage.objects[names[1]] = storage.objects[names[0]]
        assert restored(storage)[:3] == (1, 1, 1)


def test_both_checkpoints_damaged_is_an_error_that_names_both() -> None:
    storage = two_checkpoints()
    for name in storage.objects:
        if name.startswith("parts/"):
            storage.objects[name] += b"?"
    saver = manager(storage, training() | {"n": Counter(), "reader": Reader()})
    with (
        pytest.warns(DamageWarning, match="not whole"),
        pytest.raises(CheckpointDamaged, match=r"(?s)0000000002.*0000000001"),
    ):
        saver.restore()


def test_a_damaged_index_of_the_table_at_hand_stops_no_restore_and_is_written_anew_where_it_is_removed(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"x": list(range(10))}), tmp_path / "a.parquet")
    index = open_table(tmp_path).index

    class TableReader(Reader):
        table = open_table(tmp_path)

    storage = MemoryStorage()
    saver = manager(storage, {"reader": TableReader()})
    saver.restore()
    saver.save()
    path = f"index/{index.digest}.lkc"
    whole = storage.objects[path]
    assert read_history(storage).tip.readers["reader"].index == index.digest
    for bad in (whole[:-1], bytes([*whole[:50], whole[50] ^ 4, *whole[51:]])):
        storage.objects[path] = bad
        manager(storage, {"reader": TableReader()}).restore()
        assert storage.objects[path] == bad and any(path in str(one) for one in verify(storage).every_damage)
    storage.delete(path)
    again = manager(storage, {"reader": TableReader()})
    again.restore()
    again.save()
    assert storage.objects[path] == whole and verify(storage).every_damage == ()
    # What a newer lakeckpt wrote is no damage, and not for us to write over.
    storage.objects[path] = newer = dumps({}, kind="table-index", version=(9, 0))
    manager(storage, {"reader": TableReader()}).restore()
    assert storage.objects[path] == newer
    with pytest.raises(NewerFormat, match=r"format 9\.0 .*upgrade"):
        verify(storage)


def life(storage: Any, folder_is_fresh: bool) -> Iterator[int]:
    """A job that saves at steps 2 and 4; yields after each save."""
    objects = training() | {"n": Counter(), "reader": Reader()}
    saver = manager(storage, objects, keep=1)
    done = saver.restore()
    assert folder_is_fresh or objects["n"].value == done == objects["reader"].state_dict()["step"]
    batches = iter(objects["reader"])
    while done < 4:
        next(batches)
        train_step(objects)
        done += 1
        objects["n"].value = done
        saver.step()
        if done % 2 == 0:
            saver.save()
            yield done


def calls_of_a_life() -> int:
    storage = FaultyStorage(MemoryStorage())
    assert list(life(storage, True)) == [2, 4]
    return len(storage.calls)


@pytest.mark.parametrize("fault", [StoreFault.KILL, StoreFault.KILL_AFTER])
def test_a_kill_at_every_storage_call_leaves_a_complete_checkpoint(fault: StoreFault) -> None:
    total = calls_of_a_life()
    assert total > 20
    for n in range(1, total + 1):
        inner = MemoryStorage()
        committed = 0
        try:
            for saved in life(FaultyStorage(inner, fail_at={("*", n): fault}), True):
                committed = saved
        except Killed:
            pass
        steps, counter, reader, damaged = restored(inner) if committed or read_history(inner).chain else (0, 0, 0, ())
        assert steps == counter == reader and damaged == ()
        assert committed <= steps <= committed + 2
        assert list(life(inner, False))[-1:] in ([4], [])
        history = read_history(inner)
        rows = [one.readers["reader"].consumed().get(0) for one in history.chain]
        assert sum(one.size for one in rows if one) == 40 and history.whole
        objects = {name for name in inner.objects if name.startswith("objects/")}
        assert len(objects) <= 2  # leftovers of the dead attempt went with the next commit


def test_a_torn_put_at_every_call_is_never_taken_for_a_checkpoint() -> None:
    """A store that leaves half an object behind: it is not listed with its size, so that nothing is committed."""
    for fault in (StoreFault.KILL_TORN, StoreFault.TORN, StoreFault.SILENT_TEAR):
        for n in range(1, 5):
            inner = MemoryStorage()
            committed = 0
            try:
                for saved in life(FaultyStorage(inner, fail_at={("put", n): fault}), True):
                    committed = saved
            except (Killed, SaveFailed):
                pass
            if read_history(inner).chain:
                steps, counter, _, damaged = restored(inner)
                assert steps == counter == committed and damaged == ()


@pytest.mark.filterwarnings("ignore:checkpoints that are not to be kept")  # the store fails then, too
def test_an_error_at_every_storage_call_of_a_save_fails_it_cleanly_or_not_at_all() -> None:
    total = calls_of_a_life()
    outcomes = set()
    for fault in (StoreFault.ERROR, StoreFault.LOST_ANSWER):
        for n in range(1, total + 1):
            inner = MemoryStorage()
            storage = FaultyStorage(inner)
            objects = training() | {"n": Counter(), "reader": Reader()}
            saver = manager(storage, objects, keep=1)
            saver.restore()
            begun = len(storage.calls)
            if n <= begun:
                continue
            storage._faults[("*", n)] = fault
            batches = iter(objects["reader"])
            saved = 0
            for step in (1, 2, 3, 4):
                next(batches)
                train_step(objects)
                objects["n"].value = step
                saver.step()
                if step % 2 == 0:
                    try:
                        saved = saver.save().step
                        outcomes.add("saved")
                    except SaveFailed:
                        outcomes.add("failed")
            final = saver.save().step
            assert final == 4 and saved in (0, 2, 4)
            assert restored(inner) == (4, 4, 4, ())
            history = read_history(inner)
            assert (
                sum(
                    one.readers["reader"].consumed().get(0).size
                    for one in history.chain
                    if one.readers["reader"].stretches
                )
                == 40
            )
    assert outcomes == {"saved", "failed"}


def test_every_file_on_a_real_disk_is_covered(tmp_path: Path) -> None:
    objects = training() | {"n": Counter(1), "reader": Reader()}
    saver = manager(tmp_path, objects)
    saver.restore()
    saver.step()
    saver.save()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    kinds = {path.relative_to(tmp_path).parts[0] for path in files}
    assert kinds == {"log", "objects", "parts"}
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        fresh = training() | {"n": Counter(), "reader": Reader()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                manager(LocalStorage(tmp_path), fresh).restore()
            except CheckpointDamaged:
                pass
        assert caught
        path.write_bytes(whole)


def test_checkpoints_whose_data_retention_removed_are_not_tried_one_by_one() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"n": Counter([1.0])}, persist_every=1, keep=2)
    saver.restore()
    for _ in range(20):
        saver.step()
    for name in storage.objects:
        if name.startswith("parts/"):
            storage.objects[name] += b"?"
    with pytest.warns(DamageWarning) as caught, pytest.raises(CheckpointDamaged):
        manager(storage, {"n": Counter()}).restore()
    assert len(caught) == 2
