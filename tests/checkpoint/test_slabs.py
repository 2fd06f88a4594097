"""Of a large tensor, those slabs that were touched are written, and no others; all of it is there all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_safetensors

import lakeckpt.checkpoint.restore.load_into as in_place
import lakeckpt.checkpoint.state.loaded as loaded_module
from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.orders import Bye, Order, Outcome
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.format import slabs
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, content_digest, leaf_digests
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.parts import PartRecord, SaveId
from lakeckpt.checkpoint.format.slabs import digests_of_slabs, slab_specs
from lakeckpt.checkpoint.format.verified_reads import open_files, read_slabs
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist import persist
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.persist import OwnedTensor
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.checkpoint.persist.unchanged import Earlier
from lakeckpt.checkpoint.restore.from_storage import load
from lakeckpt.checkpoint.state.staged import StagedTensor
from lakeckpt.convert import convert_checkpoint, read_state
from lakeckpt.errors import CheckpointDamaged, DamageWarning
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.agent.rig import RUN, begin
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.examples import examples

SLAB = 2 * LEAF_BYTES
ROW = 1000  # floats: no slab begins where a row does


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "SLAB_BYTES", SLAB)


def files(storage: Any) -> dict[str, int]:
    return {info.path: info.size_bytes for info in storage.list("objects")}


def table(rows: int = 3000) -> torch.nn.Embedding:
    """An embedding of 12 MB: six slabs, the last of which is shorter."""
    made = torch.nn.Embedding(rows, ROW)
    with torch.no_grad():
        made.weight.copy_(torch.arange(rows * ROW, dtype=torch.float32).reshape(rows, ROW))
    return made


def touch(module: torch.nn.Module, row: int, value: float) -> None:
    with torch.no_grad():
        module.weight[row] = value  # type: ignore[index,operator]


def part_of(storage: Any) -> PartRecord:
    tip = read_history(storage).tip
    assert tip is not None
    return PartRecord.from_bytes(storage.read(tip.save.part_path(0)))


def restored(storage: Any, rows: int = 3000) -> torch.Tensor:
    """The weight of a new module that takes the newest checkpoint: a new attempt, by which others are superseded."""
    module = torch.nn.Embedding(rows, ROW)
    manager(storage, {"model": module}).restore()
    return module.weight.detach()


def stored(storage: Any) -> torch.Tensor:
    """The weight in the newest checkpoint."""
    tip = read_history(storage).tip
    assert tip is not None
    return load(storage, tip, rank=0, world_size=1).read(["model/weight"])["model/weight"]


class Saving:
    """A run that saves a module at each step, and counts what that writes."""

    def __init__(self, storage: Any, module: torch.nn.Module, *, keep: int = 1) -> None:
        self.storage = storage
        self.saver = manager(storage, {"model": module}, keep=keep)
        self.saver.restore()

    def save(self) -> int:
        """The bytes of files of tensors that a save wrote."""
        before = files(self.storage)
        self.saver.step()
        self.saver.save()
        return sum(size for path, size in files(self.storage).items() if path not in before)


def test_a_touched_row_is_written_with_its_slab_and_nothing_else() -> None:
    storage, module = MemoryStorage(), table()
    run = Saving(storage, module)
    whole = module.weight.nbytes
    assert whole < run.save() < whole + 5000
    for step, row in enumerate([0, 600, 2999]):
        touch(module, row, step)
        assert run.save() <= SLAB + 5000
        assert torch.equal(stored(storage), module.weight)
    assert run.save() == 0 and torch.equal(restored(storage), module.weight)
    assert verify(storage).every_damage == ()


def test_a_row_across_a_border_is_written_with_both_slabs() -> None:
    storage, module = MemoryStorage(), table()
    run = Saving(storage, module)
    run.save()
    row = SLAB // 4 // ROW
    assert row * ROW * 4 < SLAB < (row + 1) * ROW * 4
    touch(module, row, -1.0)
    assert SLAB < run.save() <= 2 * SLAB + 5000
    assert torch.equal(restored(storage), module.weight)


def test_of_a_table_that_grew_only_what_is_new_is_written() -> None:
    storage, module = MemoryStorage(), table(2000)
    run = Saving(storage, module)
    run.save()
    module.weight = table(3000).weight  # the rows that were there, and a thousand more
    assert run.save() <= 1000 * ROW * 4 + SLAB + 5000
    assert torch.equal(restored(storage), module.weight)


@pytest.mark.parametrize("keep", [1, 3])
def test_every_kept_checkpoint_has_all_its_slabs_and_what_nobody_needs_goes(keep: int) -> None:
    storage, module = MemoryStorage(), table()
    run = Saving(storage, module, keep=keep)
    for step in range(9):
        touch(module, step * 330, -step)
        run.save()
    statuses = [one.status for one in verify(storage).checkpoints]
    assert statuses[-keep:] == ["intact"] * keep and set(statuses[:-keep]) <= {"removed"}
    assert sum(files(storage).values()) <= 2 * module.weight.nbytes + (keep + 1) * SLAB
    assert torch.equal(restored(storage), module.weight)
    for info in storage.list("objects"):
        names = load_safetensors(storage.objects[info.path])
        assert all(one.dtype == torch.float32 for one in names.values())


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**20 - 1)), max_size=4), max_size=5),
    st.sampled_from([1, 3 * LEAF_BYTES, 2**30]),
)
def test_whatever_is_touched_a_part_holds_what_a_full_write_holds(
    touches: list[list[tuple[str, int]]], file_bytes: int
) -> None:
    sizes = {"a": 3 * LEAF_BYTES + 8, "b": LEAF_BYTES, "c": LEAF_BYTES // 2 * 3}
    contents = {name: bytearray(size) for name, size in sizes.items()}
    storage, earlier = MemoryStorage(), Earlier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persist, "SLAB_BYTES", LEAF_BYTES)
        patch.setattr(persist, "FILE_BYTES", file_bytes)
        for step, places in enumerate([[], *touches]):
            for name, at in places:
                contents[name][at * sizes[name] >> 20] ^= 1 + step
            part = PartRecord.from_bytes(put(storage, step, contents, earlier).to_bytes())
            assert sum(file.size_bytes for file in part.files) <= 2 * sum(sizes.values()) + 10_000
            for path in files(storage).keys() - {file.path for file in part.files}:
                storage.delete(path)  # what the newest part does not name, nobody needs
            found = {name: memoryview(bytearray(size)) for name, size in sizes.items()}
            slabs = open_files(storage, [(part, index) for index in range(len(part.files))])
            read_slabs(storage, slabs, found)
            assert found == contents
            earlier = Earlier.of(part)


def put(storage: MemoryStorage, step: int, contents: dict[str, bytearray], earlier: Earlier) -> PartRecord:
    """Write the part of a save of a rank that holds all of ``contents``."""
    tensors = [
        OwnedTensor(
            staged=StagedTensor(
                spec=TensorSpec(key=name, dtype="uint8", shape=(len(data),)),
                data=memoryview(bytes(data)),
                leaves=leaf_digests(data, LEAF_BYTES),
            ),
            ranks=((0, 1),),
        )
        for name, data in contents.items()
    ]
    save = SaveId(attempt=0, step=step, number=step)
    return persist.persist(
        storage, run="r", save=save, rank=0, world_size=1, cut=b"c", tensors=tensors, trees=[], earlier=earlier
    )


def test_slabs_are_read_into_the_live_parameter_and_nothing_is_made_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, module = MemoryStorage(), table()
    run = Saving(storage, module)
    run.save()
    touch(module, 1500, 5.0)
    run.save()

    def none(spec: TensorSpec) -> Any:
        raise AssertionError(f"{spec} is made")

    for one in (in_place, loaded_module):
        monkeypatch.setattr(one, "empty_for", none)
    assert torch.equal(restored(storage), module.weight)


class Watched(MemoryStorage):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        data = super().read(path, start, stop, etag=etag)
        self.size_bytes += len(data)
        return data


def test_of_a_tensor_that_goes_elsewhere_the_rows_that_are_wanted_are_read_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage, module = Watched(), table()
    Saving(storage, module).save()
    tip = read_history(storage).tip
    assert tip is not None
    loaded = load(storage, tip, rank=0, world_size=1)
    made: list[int] = []
    make = loaded_module.empty_for

    def counted(spec: TensorSpec) -> Any:
        made.append(spec.size_bytes)
        return make(spec)

    monkeypatch.setattr(loaded_module, "empty_for", counted)
    monkeypatch.setattr(loaded_module, "_BLOCK_BYTES", 1)  # then blocks are of the rows of a slab
    storage.size_bytes, found = 0, torch.empty(3000, 10)
    loaded.read_part("model/weight", (0, 5), found)
    assert torch.equal(found, module.weight[:, 5:15])
    assert len(made) == 6 and max(made) <= SLAB and sum(made) == 3000 * ROW * 4
    storage.size_bytes, found = 0, torch.empty(500, ROW)
    loaded.read_part("model/weight", (700, 0), found)
    assert torch.equal(found, module.weight[700:1200])
    assert storage.size_bytes < 3 * SLAB, "slabs are read that nobody wants"


def test_damage_in_the_rows_that_are_wanted_of_a_tensor_is_told() -> None:
    storage, module = MemoryStorage(), table()
    Saving(storage, module).save()
    tip = read_history(storage).tip
    assert tip is not None
    loaded = load(storage, tip, rank=0, world_size=1)
    (path,) = files(storage)
    damaged = bytearray(storage.objects[path])
    damaged[5 * SLAB + 100_000] ^= 1
    storage.objects[path] = bytes(damaged)
    loaded.read_part("model/weight", (0, 0), torch.empty(100, ROW))
    with pytest.raises(CheckpointDamaged, match="are not what was written"):
        loaded.read_part("model/weight", (2990, 0), torch.empty(1, ROW))


@pytest.mark.parametrize("block_bytes", [1, 2**30])
def test_parts_of_any_shape_are_read_out_of_slabs(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_module, "_BLOCK_BYTES", block_bytes)
    storage, module = MemoryStorage(), table()
    run = Saving(storage, module)
    run.save()
    touch(module, 1500, 5.0)
    run.save()
    tip = read_history(storage).tip
    assert tip is not None
    loaded = load(storage, tip, rank=0, world_size=1)
    for offsets, sizes in (((0, 0), (3000, 500)), ((1400, 3), (200, 997)), ((2999, 0), (1, ROW))):
        found = torch.empty(sizes)
        loaded.read_part("model/weight", offsets, found)
        (row, column), (rows, columns) = offsets, sizes
        assert torch.equal(found, module.weight[row : row + rows, column : column + columns])


def test_other_forms_get_whole_tensors(tmp_path: Path) -> None:
    module = table()
    with manager(tmp_path / "run", {"model": module}, keep=1) as saver:
        saver.restore()
        saver.step()
        saver.save()
        touch(module, 7, 5.0)
        saver.step()
    assert len(part_of(LocalStorage(tmp_path / "run")).files) == 2
    for form, name in (("safetensors", "out"), ("torch", "out.pt")):
        convert_checkpoint(tmp_path / "run", tmp_path / name, to=form, item="model")
        found = read_state(tmp_path / name)
        assert torch.equal(found.get("weight", found.get("model.weight")), module.weight), form


def test_a_bit_that_flipped_in_a_slab_of_an_earlier_save_is_told_with_its_file() -> None:
    storage, module = MemoryStorage(), table()
    run = Saving(storage, module)
    run.save()
    old = next(iter(files(storage)))
    touch(module, 0, 9.0)
    run.save()
    data = bytearray(storage.objects[old])
    data[-SLAB] ^= 4
    storage.objects[old] = bytes(data)
    (damage,) = verify(storage).every_damage
    assert damage.path == old and "'model/weight::slab" in damage.reason
    with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged, match=r"::slab \d' are not what was written"):
        restored(storage)
    data[-SLAB] ^= 4
    at = data.index(b"::slab 2")
    data[at : at + 8] = b"::slab 9"
    storage.objects[old] = bytes(data)
    with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged, match=old):
        restored(storage)


def test_a_slab_that_no_rank_needs_any_more_is_read_by_verify_alone() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        value = torch.full((SLAB // 2,), float(rank))  # two slabs
        saver = manager(storage, {"own": Counter(value)}, keep=1, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        for step in range(2):
            saver.step()
            value[0] = 10.0 * rank + step
            saver.save()

    good(run_ranks(2, body))
    tip = read_history(storage).tip
    assert tip is not None
    others = PartRecord.from_bytes(storage.read(tip.save.part_path(1)))
    assert [slab.file for slab in others.tensors[0].slabs] == [1, 0]  # what changed lies apart
    own = Counter()
    manager(storage, {"own": own}).restore()
    assert own.value[0] == 1.0 and own.value[1] == 0.0
    data = bytearray(storage.objects[others.files[0].path])
    data[-1] ^= 1
    storage.objects[others.files[0].path] = bytes(data)
    manager(storage, {"own": own}).restore()
    assert own.value[0] == 1.0 and own.value[1] == 0.0
    assert "own/value::slab 1' are not what was" in str(verify(storage).every_damage[0])


def test_cuts_in_an_arena_are_persisted_slab_by_slab(tmp_path: Path) -> None:
    module, storage = table(), MemoryStorage()
    begin(storage)
    folder, identity = ArenaFolder(tmp_path / "arenas"), identity_of(bytes(16), rank=0, world_size=1)
    engine = CaptureEngine({"model": module}, identity, folder=folder, generations=3)
    generations = Generations(folder, identity)
    attempt = Attempt(run=RUN, number=0, last=0, parent=None, seed=0)
    wrote, said = [], list[Outcome]()
    try:
        for step, row in enumerate((0, 2999, 1500, 1500), 1):
            touch(module, row, -step)
            engine.cut(CutId(attempt=0, step=step), digest=bytes(16), must=True)
            engine.wait()
            before = files(storage)
            persister = Persister(
                storage,
                generations,
                attempt,
                rank=0,
                world_size=1,
                settings=Settings(keep=Keep(last=2), timeout_s=60.0),
                waiter=EventWaiter(storage),
                report=said.append,
            )
            persister.take(Order(step=step, number=step))
            persister.take(Bye())
            persister.run()
            assert said[-1].kind == "", said
            wrote.append(sum(size for path, size in files(storage).items() if path not in before))
            assert torch.equal(stored(storage), module.weight)
    finally:
        generations.close()
        engine.close()
    assert wrote[0] > module.weight.nbytes and all(SLAB // 2 < one <= SLAB + 5000 for one in wrote[1:])


def test_slabs_make_up_the_tensor_and_their_digests_follow_from_its_leaves() -> None:
    data = bytes(range(256)) * (5 * LEAF_BYTES // 512)
    spec = TensorSpec(key="w", dtype="complex64", shape=(len(data) // 8,))
    specs = slab_specs(spec, SLAB)
    assert sum(one.size_bytes for one in specs) == len(data) and [one.size_bytes for one in specs][:-1] == [SLAB]
    found = digests_of_slabs(leaf_digests(data, LEAF_BYTES), SLAB)
    assert found == [content_digest(data[:SLAB]), content_digest(data[SLAB:])]
    assert slab_specs(TensorSpec(key="w", dtype="int8", shape=(SLAB,)), SLAB)[0].key == "w"
    assert slabs.SLAB_BYTES % LEAF_BYTES == 0


def test_a_tensor_that_is_called_as_a_slab_is_does_not_get_into_its_way() -> None:
    storage = MemoryStorage()
    big = torch.arange(SLAB // 2, dtype=torch.float32)
    counter = Counter({"w": big, "w::slab 1": torch.ones(3)})
    saver = manager(storage, {"n": counter})
    saver.restore()
    saver.step()
    saver.save()
    counter.value = {"w": torch.zeros_like(big), "w::slab 1": torch.zeros(3)}
    manager(storage, {"n": counter}).restore()
    assert torch.equal(counter.value["w"], big) and counter.value["w::slab 1"].tolist() == [1.0] * 3


def test_files_hold_runs_of_elements_that_anybody_can_read(tmp_path: Path) -> None:
    module = table()
    with manager(tmp_path, {"model": module}) as saver:
        saver.restore()
        saver.step()
    (path,) = tmp_path.glob("objects/*/*/*")
    with safe_open(path, "pt") as file:
        runs = [file.get_tensor(f"model/weight::slab {n}") for n in range(len(file.keys()))]
    assert torch.equal(torch.cat(runs).reshape(-1, ROW), module.weight)
