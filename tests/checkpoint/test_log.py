"""The log of slots: order, the fence, lost answers, damage, and the history that it tells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from lakeckpt.checkpoint.format.manifest import (
    Begin,
    Entry,
    Manifest,
    ReaderRecord,
    Restored,
    Stretch,
    entry_from_bytes,
    entry_to_bytes,
)
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import SlotTaken, list_slots, put_entry, read_entry, read_log, slot_path
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import NewerFormat, StorageError, WireError
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from lakeckpt.tracking.steps import Frontier, StepRecord, StepRun
from lakeckpt.wire.envelope import dumps, loads
from tests.checkpoint.rig import MemoryStorage


def begin(slot: int, *, write_id: str = "w", run: str = "run") -> Begin:
    return Begin(run=run, slot=slot, world_size=1, library="0", created_s=1.5, write_id=f"{write_id}{slot}")


def restored(slot: int, attempt: int | None, of: int | None, *, step: int | None = None) -> Restored:
    return Restored(
        run="run",
        slot=slot,
        attempt=attempt,
        restored=of,
        library="0",
        created_s=1.5,
        write_id=f"w{slot}",
        rolled_back_to=step,
    )


def manifest(slot: int, *, attempt: int, parent: int | None, step: int = 1, write_id: str = "w") -> Manifest:
    state = {"epoch": 0, "nested": [1, None]}
    record = ReaderRecord(
        state=state,
        stretches=(Stretch(begin=state, end=state, consumed={0: Intervals.of([(0, 5), (7, 9)])}),),
        steps=StepRecord(runs=(StepRun(first=1, count=3, start=Frontier(0, 1), stride=1),)),
        index="ab",
    )
    return Manifest(
        run="run",
        slot=slot,
        attempt=attempt,
        parent=parent,
        step=step,
        number=slot,
        world_size=1,
        cut=b"cut",
        register=bytes(16),
        kept=Intervals.of([(slot, slot + 1)]),
        readers={"reader": record},
        seed=7,
        library="0",
        created_s=2.5,
        write_id=f"{write_id}{slot}",
    )


def put_all(storage: MemoryStorage, *entries: Entry) -> MemoryStorage:
    for entry in entries:
        put_entry(storage, entry)
    return storage


@pytest.mark.parametrize("entry", [begin(3), restored(3, 2, 1), restored(4, None, 1), manifest(9, attempt=2, parent=4)])
def test_an_entry_comes_back(entry: Entry) -> None:
    assert entry_from_bytes(entry_to_bytes(entry)) == entry
    storage = put_all(MemoryStorage(), entry)
    assert read_entry(storage, entry.slot) == entry


def test_a_slot_is_taken_once() -> None:
    storage = put_all(MemoryStorage(), begin(0))
    with pytest.raises(SlotTaken) as taken:
        put_entry(storage, begin(0, write_id="other"))
    assert taken.value.found == begin(0)
    put_entry(storage, begin(0))  # the same bytes: it was ours
    assert read_entry(storage, 0) == begin(0)


def test_a_lost_answer_is_settled_by_reading_back() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, fail_at={("put_new", 1): StoreFault.LOST_ANSWER})
    put_entry(storage, begin(0))
    assert read_entry(inner, 0) == begin(0)


def test_a_put_that_did_not_happen_is_repeated_a_few_times() -> None:
    storage = FaultyStorage(
        MemoryStorage(), fail_at={("put_new", 1): StoreFault.ERROR, ("put_new", 2): StoreFault.ERROR}
    )
    put_entry(storage, begin(0))
    always = FaultyStorage(MemoryStorage(), fail_at={("put_new", n): StoreFault.ERROR for n in range(1, 9)})
    with pytest.raises(StorageError):
        put_entry(always, begin(0))
    assert len([call for call in always.calls if call[0] == "put_new"]) == 3


def test_an_answer_that_is_lost_twice_over_is_told_apart_from_another_entry() -> None:
    inner = put_all(MemoryStorage(), begin(0, write_id="other"))
    storage = FaultyStorage(inner, fail_at={("put_new", 1): StoreFault.ERROR})
    with pytest.raises(SlotTaken):
        put_entry(storage, begin(0))


def test_names_that_are_not_ours_are_passed_over() -> None:
    storage = put_all(MemoryStorage(), begin(0))
    for name in ("log/1.lkc", "log/0000000001.lkc.tmp", "log/readme", "log/0000000001/0000000001.lkc"):
        storage.put(name, [b"x"])
    assert list_slots(storage) == [0]


def test_damage_and_holes_are_reported_and_the_rest_is_read() -> None:
    storage = put_all(
        MemoryStorage(), begin(0), manifest(1, attempt=0, parent=None), manifest(2, attempt=0, parent=1), begin(4)
    )
    storage.objects[slot_path(2)] = storage.objects[slot_path(2)][:-1]
    storage.put(slot_path(5), [entry_to_bytes(begin(4))])
    view = read_log(storage)
    assert sorted(view.entries) == [0, 1, 4] and view.last == 5
    assert sorted(damage.path for damage in view.damaged) == [slot_path(2), slot_path(3), slot_path(5)]
    assert any("another's place" in damage.reason for damage in view.damaged)


def test_entries_of_two_runs_in_one_log_are_reported() -> None:
    view = read_log(put_all(MemoryStorage(), begin(0), begin(1, run="other")))
    assert "2 runs" in str(view.damaged[0])


def test_every_flipped_bit_and_truncation_of_an_entry_is_noticed() -> None:
    whole = entry_to_bytes(manifest(1, attempt=0, parent=None))
    for at in range(len(whole)):
        for bit in range(8):
            with pytest.raises(WireError):
                entry_from_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(WireError):
            entry_from_bytes(whole[:at])


def test_a_log_of_a_newer_version_is_refused() -> None:
    storage = MemoryStorage()
    plain = loads(entry_to_bytes(begin(1)), kind="log", supported=(1, 0))
    storage.put(slot_path(1), [dumps(plain, kind="log", version=(2, 0))])
    with pytest.raises(NewerFormat, match="upgrade"):
        read_log(storage)


def crafted(change: Callable[[dict[str, object]], object]) -> bytes:
    plain = loads(entry_to_bytes(manifest(3, attempt=0, parent=1)), kind="log", supported=(1, 0))
    change(plain)
    return dumps(plain, kind="log", version=(1, 0))


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.update(entry="erase"),
        lambda plain: plain.update(entry=None),
        lambda plain: plain.update(slot=-1),
        lambda plain: plain.update(slot=True),
        lambda plain: plain.update(more=1),
        lambda plain: plain.update(parts="parts"),
        lambda plain: plain.update(readers={"reader": 3}),
        lambda plain: plain.update(readers={"reader": {"state": {}, "stretches": [[1]], "steps": [], "index": None}}),
        lambda plain: plain.update(readers={"reader": {"state": {}, "stretches": [], "steps": [[1]], "index": None}}),
        lambda plain: plain.update(readers={"reader": {"state": {}, "stretches": [], "steps": [], "index": 5}}),
        lambda plain: plain.pop("cut"),
    ],
)
def test_a_manifest_with_a_field_of_another_type_is_refused(change: Callable[[dict[str, object]], object]) -> None:
    assert isinstance(entry_from_bytes(crafted(lambda plain: None)), Manifest)
    with pytest.raises(WireError):
        entry_from_bytes(crafted(change))


def test_the_history_is_the_chain_of_parents_and_the_rest_is_abandoned() -> None:
    storage = put_all(
        MemoryStorage(),
        begin(0),
        manifest(1, attempt=0, parent=None),
        manifest(2, attempt=0, parent=1),
        manifest(3, attempt=0, parent=2),
        begin(4),
        restored(5, 4, 2),
        manifest(6, attempt=4, parent=2),
        begin(7),
        restored(8, 7, 6),
    )
    history = read_history(storage)
    assert [one.slot for one in history.chain] == [1, 2, 6] and history.whole
    assert [one.slot for one in history.abandoned] == [3]
    assert [one.slot for one in history.begins] == [0, 4, 7]
    assert [(one.attempt, one.restored) for one in history.restores] == [(0, None), (4, 2), (7, 6)]
    assert history.tip == manifest(6, attempt=4, parent=2)
    assert history.tip.readers["reader"].consumed() == {0: Intervals.of([(0, 5), (7, 9)])}


def test_an_attempt_that_went_on_from_an_older_checkpoint_moves_the_tip() -> None:
    storage = put_all(
        MemoryStorage(),
        begin(0),
        manifest(1, attempt=0, parent=None),
        manifest(2, attempt=0, parent=1),
        begin(3),
        restored(4, 3, 1),
    )
    history = read_history(storage)
    assert [one.slot for one in history.chain] == [1] and [one.slot for one in history.abandoned] == [2]
    assert [one.slot for one in read_history(storage, tip=2).chain] == [1, 2]


def test_a_chain_that_cannot_be_read_to_its_end_says_where_it_breaks() -> None:
    storage = put_all(
        MemoryStorage(),
        begin(0),
        manifest(1, attempt=0, parent=None),
        manifest(2, attempt=0, parent=1),
        manifest(3, attempt=0, parent=2),
    )
    storage.delete(slot_path(2))
    history = read_history(storage)
    assert [one.slot for one in history.chain] == [3]
    assert not history.whole and history.broken_at == 2
    assert [damage.path for damage in history.damaged] == [slot_path(2)]


def test_a_parent_that_is_no_checkpoint_is_told_though_its_slot_can_be_read() -> None:
    history = read_history(put_all(MemoryStorage(), begin(0), manifest(1, attempt=0, parent=0)))
    assert [one.slot for one in history.chain] == [1] and history.broken_at == 0
    assert [(one.path, one.reason) for one in history.damaged] == [
        (slot_path(0), "a manifest is named as a parent and is not there")
    ]


def test_an_empty_place_has_an_empty_history() -> None:
    history = read_history(MemoryStorage())
    assert (history.run, history.chain, history.tip, history.whole) == (None, (), None, True)
    assert read_history(put_all(MemoryStorage(), begin(0))).chain == ()


def test_consumption_over_several_stretches_is_their_union() -> None:
    record = manifest(1, attempt=0, parent=None).readers["reader"]
    more = Stretch(begin={}, end={}, consumed={0: Intervals.of([(5, 7)]), 1: Intervals.of([(0, 1)])})
    both = replace(record, stretches=(*record.stretches, more))
    assert both.consumed() == {0: Intervals.of([(0, 9)]), 1: Intervals.of([(0, 1)])}


def test_the_commit_path_does_not_load_torch() -> None:
    """Not even where torch is: `test_layers.py` has the same modules without it."""
    names = ["persist.publish", "persist.history", "persist.retention", "format.verified_reads"]
    modules = ", ".join(f"lakeckpt.checkpoint.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
