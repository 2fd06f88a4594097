"""What the committer refuses: parts that are not what was agreed on, and objects that are not there whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from lakeckpt.checkpoint.format.digests import LEAF_BYTES, content_digest, leaf_digests, short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import PartRecord, SaveId, TreeRecord
from lakeckpt.checkpoint.format.sharing import part_key
from lakeckpt.checkpoint.format.units import sum_of, tensor_unit, tree_unit
from lakeckpt.checkpoint.persist.commit import Collected, Expected, await_commit, collect_parts, verify_objects
from lakeckpt.checkpoint.persist.failures import publish_failure, refuse_failed
from lakeckpt.checkpoint.persist.log import put_entry
from lakeckpt.checkpoint.persist.persist import OwnedTensor, persist
from lakeckpt.checkpoint.state.staged import StagedTensor
from lakeckpt.errors import AttemptSuperseded, SaveFailed
from tests.checkpoint.rig import EventWaiter, MemoryStorage
from tests.checkpoint.test_log import begin, manifest

SAVE = SaveId(attempt=0, step=1, number=1)
DATA = memoryview(bytes(range(8)))
SPEC = TensorSpec(key="m/w", dtype="float32", shape=(2,))
DIVIDED = TensorSpec(key=part_key("m/w", (0,), (2,)), dtype="float32", shape=(2,))
WEIGHT, PART = (tensor_unit(spec, content_digest(DATA)) for spec in (SPEC, DIVIDED))
TREE = tree_unit("m", short_digest(b"d"))
AGREED = {
    "one by one": Expected(alone=[sum_of([WEIGHT, TREE])] * 2, bundles={}),
    "together": Expected(alone=[sum_of([TREE])] * 2, bundles={((0, 1),): sum_of([PART]), ((1, 2),): sum_of([PART])}),
}
SPECS = {"one by one": SPEC, "together": DIVIDED}
OTHER = r"(the part of rank 1 does not hold what the ranks|step 1: rank 1 did not write what they) agreed on at the cut"


@pytest.fixture(params=AGREED, autouse=True)
def expected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the ranks agreed on what each of them writes."""
    monkeypatch.setitem(AGREED, "now", AGREED[request.param])
    monkeypatch.setitem(SPECS, "now", SPECS[request.param])


def write(storage: MemoryStorage, rank: int, *, save: SaveId = SAVE, data: memoryview = DATA) -> PartRecord:
    staged = StagedTensor(spec=SPECS["now"], data=data, leaves=leaf_digests(data, LEAF_BYTES))
    tensor = OwnedTensor(staged=staged, ranks=((rank, rank + 1),))
    tree = TreeRecord(item="m", document=b"d", digest=short_digest(b"d"), ranks=((rank, rank + 1),))
    return persist(storage, run="r", save=save, rank=rank, world_size=2, cut=b"c", tensors=[tensor], trees=[tree])


def collect(storage: MemoryStorage) -> Collected:
    waiter = EventWaiter(storage)
    waiter.died()
    expected = AGREED["now"]
    obstacles = partial(refuse_failed, storage, SAVE, 0)
    return collect_parts(
        storage, SAVE, world_size=2, cut=b"c", expected=expected, waiter=waiter, timeout_s=5, obstacles=obstacles
    )


def test_parts_that_hold_what_was_agreed_on_are_taken() -> None:
    storage = MemoryStorage()
    parts = [write(storage, rank) for rank in range(2)]
    storage.put(f"parts/{SAVE.folder}/readme", [b"not a part"])
    found = collect(storage)
    assert [(head.rank, head.files) for head in found.heads] == [(part.rank, part.files) for part in parts]
    assert found.digests == b"".join(short_digest(storage.objects[SAVE.part_path(rank)]) for rank in range(2))
    verify_objects(storage, found.heads)


def test_a_part_with_another_content_is_refused() -> None:
    storage = MemoryStorage()
    write(storage, 0), write(storage, 1, data=memoryview(bytes(8)))
    with pytest.raises(SaveFailed, match=OTHER):
        collect(storage)


@pytest.mark.parametrize("writers", [(), (0,), (1,), (0, 1)])
def test_what_ranks_hold_together_is_written_by_one_of_them(
    writers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ((0, 2),)
    monkeypatch.setitem(AGREED, "now", Expected(alone=[sum_of([TREE])] * 2, bundles={both: sum_of([PART])}))
    monkeypatch.setitem(SPECS, "now", DIVIDED)
    storage = MemoryStorage()
    for rank in range(2):
        part = write(storage, rank)
        tensors = tuple(replace(one, ranks=both) for one in part.tensors if rank in writers)
        storage.put(SAVE.part_path(rank), [replace(part, tensors=tensors).to_bytes()])
    if len(writers) == 1:
        assert len(collect(storage).heads) == 2
    else:
        with pytest.raises(SaveFailed, match="step 1: ranks 0-1 did not write what they agreed on at the cut"):
            collect(storage)


def test_a_part_that_lacks_or_adds_a_unit_is_refused() -> None:
    for change in ("tensors", "trees"):
        storage = MemoryStorage()
        write(storage, 0)
        part = write(storage, 1)
        fewer = replace(part, **{change: ()})
        more = replace(part, trees=(*part.trees, replace(part.trees[0], item="other")))
        for other in (fewer, more):
            storage.put(SAVE.part_path(1), [other.to_bytes()])
            with pytest.raises(SaveFailed, match="agreed on"):
                collect(storage)


def test_a_part_of_another_cut_is_refused() -> None:
    storage = MemoryStorage()
    write(storage, 0)
    storage.put(SAVE.part_path(1), [replace(write(storage, 1), cut=b"d").to_bytes()])
    with pytest.raises(SaveFailed, match="the part of rank 1 does not hold what the ranks agreed on"):
        collect(storage)


def test_a_part_of_another_rank_or_save_in_its_place_is_refused() -> None:
    storage = MemoryStorage()
    write(storage, 0)
    storage.put(SAVE.part_path(1), [storage.objects[SAVE.part_path(0)]])
    with pytest.raises(SaveFailed, match="rank 1"):
        collect(storage)
    old = SaveId(attempt=0, step=1, number=0)
    write(storage, 1, save=old)
    storage.put(SAVE.part_path(1), [storage.objects[old.part_path(1)]])
    with pytest.raises(SaveFailed, match="rank 1"):
        collect(storage)


def test_a_torn_part_is_refused_and_a_missing_one_is_named() -> None:
    storage = MemoryStorage()
    write(storage, 0), write(storage, 1)
    path = SAVE.part_path(1)
    storage.objects[path] = storage.objects[path][:-3]
    with pytest.raises(SaveFailed, match="does not read back"):
        collect(storage)
    del storage.objects[path]
    with pytest.raises(SaveFailed, match="rank 1 of 2 did not publish a part within 5 s"):
        collect(storage)


def test_a_note_of_failure_ends_the_wait_at_once_and_keeps_its_kind() -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)
    publish_failure(storage, SAVE, 1, OSError("disk full"))
    with pytest.raises(SaveFailed, match="rank 1 dropped the save: OSError: disk full"):
        collect(storage)
    publish_failure(storage, SAVE, 0, SaveFailed("rank 3 is gone"))
    obstacles = partial(refuse_failed, storage, SAVE, 1)
    with pytest.raises(SaveFailed, match=r"^rank 3 is gone$"):
        await_commit(storage, SAVE, 2, waiter=waiter, timeout_s=5, obstacles=obstacles)
    assert waiter.time_s == 0


def test_objects_that_are_missing_or_of_another_size_are_refused() -> None:
    storage = MemoryStorage()
    parts = [write(storage, rank) for rank in range(2)]
    path = parts[1].files[0].path
    whole = storage.objects[path]
    for bad in (whole[:-1], whole + b"?", None):
        storage.objects.pop(path)
        if bad is not None:
            storage.objects[path] = bad
        with pytest.raises(SaveFailed, match="rank 1 wrote"):
            verify_objects(storage, parts)
        storage.objects[path] = whole


def test_ranks_take_only_the_commit_of_their_own_save() -> None:
    for entry, kind in (
        (manifest(2, attempt=0, parent=None, step=1), AttemptSuperseded),
        (begin(2), AttemptSuperseded),
        (None, SaveFailed),
    ):
        storage = MemoryStorage()
        if entry is not None:
            put_entry(storage, entry)
        waiter = EventWaiter(storage)
        waiter.died()
        with pytest.raises(kind):
            await_commit(storage, SAVE, 2, waiter=waiter, timeout_s=5)
        put_entry(storage, replace(manifest(3, attempt=0, parent=None, step=1), number=1))
        assert await_commit(storage, SAVE, 3, waiter=waiter, timeout_s=5).slot == 3
