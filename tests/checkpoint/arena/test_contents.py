"""Contents: what was put beside the data is found again; nothing that does not hold together gets past reading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lakeckpt.checkpoint.arena import checksums, contents, layout
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.checksums import checked, look_over
from lakeckpt.checkpoint.arena.contents import Contents, GenerationDocuments, TensorPlace, TensorTable, contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.arena.slices import plan_slices
from lakeckpt.checkpoint.format import digests
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.errors import ArenaDamaged, WireError
from lakeckpt.recovery.facts import CutId
from lakeckpt.wire.envelope import dumps

SPECS = [
    TensorSpec(key="model/weight", dtype="float32", shape=(5, 7)),
    TensorSpec(key="model/none", dtype="int64", shape=(0, 3)),
    TensorSpec(key="model/half", dtype="bfloat16", shape=(33,)),
    TensorSpec(key="optimizer/step", dtype="complex64", shape=()),
]
PLAN = plan_slices({one.key: one.size_bytes for one in SPECS}, slice_bytes=64)
LEAF = 64
BYTES = {one.key: bytes((at * 50 + n) % 256 for n in range(one.size_bytes)) for at, one in enumerate(SPECS)}


def documents(**changes: Any) -> GenerationDocuments:
    told = {
        "trees": {"model": b"a tree", "lakeckpt.random": b""},
        "table": TensorTable(
            places={one.key: TensorPlace(spec=one, start=PLAN.places[one.key][0]) for one in SPECS},
        ),
        "readers": {"loader": b"\x00\xff"},
    }
    return GenerationDocuments(**{**told, **changes})


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An arena with small leaves."""
    for module in (checksums, contents, digests, layout):
        monkeypatch.setattr(module, "LEAF_BYTES", LEAF)
    made_for = ArenaLayout(
        identity=ArenaIdentity(run=b"r" * 16, rank=0, world=1),
        plan=PLAN.digest,
        data_bytes=PLAN.data_bytes,
        documents_bytes=4096,
    )
    with ArenaFolder(tmp_path / "arenas").create(made_for) as made:
        yield made


def capture(arena: Arena, document: bytes, *, hashed: bool = True) -> None:
    filling = arena.begin()
    assert filling is not None
    for key, data in BYTES.items():
        at = PLAN.places[key][0]
        filling.data[at : at + len(data)] = data
    filling.complete(CutId(attempt=0, step=3), digest=b"c" * 16, documents=document)
    if hashed:
        look_over(arena, lambda: True)


def read(found: Contents, key: str) -> bytearray:
    made = bytearray(found.specs[key].size_bytes)
    found.fill({key: memoryview(made)})
    return made


def test_a_generation_is_read_as_it_was_written(arena: Arena) -> None:
    capture(arena, documents().to_bytes())
    with arena.hold() as held:
        assert held is not None
        found = contents_of(held)
        assert found.documents == documents()
        assert found.specs == {one.key: one for one in SPECS}
        assert {key: read(found, key) for key in found.specs} == BYTES
        found.verify()


def memory(size_bytes: int, offset: int) -> memoryview:
    """Zeros, the first of which lies ``offset`` bytes behind the begin of a page."""
    made = np.zeros(size_bytes + 4096, np.uint8)
    first = (offset - made.ctypes.data) % 4096
    return made[first : first + size_bytes].data


@pytest.mark.parametrize("offset", [0, 1, 63, 64, 193, 2048, 4095])  # 193: too close behind where model/half lies
@pytest.mark.parametrize("keys", [[], list(BYTES), list(BYTES)[::-1], ["model/half"], ["model/none", "model/weight"]])
def test_tensors_are_copied_to_where_they_belong(arena: Arena, keys: list[str], offset: int) -> None:
    capture(arena, documents().to_bytes())
    into = {key: memory(len(BYTES[key]), offset) for key in keys}
    with arena.hold() as held:
        assert held is not None
        contents_of(held).fill(into)
    assert {key: bytes(target) for key, target in into.items()} == {key: BYTES[key] for key in keys}


@pytest.mark.parametrize("offset", [0, 1])
def test_a_changed_byte_of_what_is_copied_is_noticed_and_one_of_another_leaf_is_nobodys(
    arena: Arena, offset: int
) -> None:
    capture(arena, documents().to_bytes())
    into = memory(len(BYTES["model/half"]), offset)
    with arena.hold() as held:
        assert held is not None
        found, at = contents_of(held), arena.layout.data_at(held.number)
        place = found.documents.table.places["model/half"]
        held_by = range(place.start // LEAF, (place.stop - 1) // LEAF + 1)
        for byte in range(arena.layout.data_bytes):
            arena.memory[at + byte] ^= 1
            try:
                found.fill({"model/half": into})
                noticed = False
            except ArenaDamaged:
                noticed = True
            assert noticed == (byte // LEAF in held_by)
            with pytest.raises(ArenaDamaged):
                found.verify()
            arena.memory[at + byte] ^= 1
        found.verify()


def test_an_arena_that_is_cut_short_is_damaged(arena: Arena) -> None:
    capture(arena, documents().to_bytes())
    with arena.hold() as held:
        assert held is not None
        found = contents_of(held)
        os.ftruncate(arena._descriptor, arena.layout.data_at(held.number))
        with pytest.raises(ArenaDamaged, match="byte 0 of step 3 is not what was written"):
            found.fill({"model/weight": memoryview(bytearray(len(BYTES["model/weight"])))})


def test_of_a_damaged_leaf_only_the_tensors_in_it_are_refused(arena: Arena) -> None:
    capture(arena, documents().to_bytes())
    arena._put(arena.layout.data_at(0) + 100, b"\xee")  # of the weight, which ends at 140
    with arena.hold() as held:
        assert held is not None
        found = contents_of(held)
        with pytest.raises(ArenaDamaged, match="leaf 1 of step 3"):
            read(found, "model/weight")
        assert read(found, "optimizer/step") == BYTES["optimizer/step"] and read(found, "model/none") == b""
        with pytest.raises(ArenaDamaged, match="leaf 1 of step 3"):
            found.verify()


def _table(*rows: Any) -> bytes:
    return dumps(list(rows), kind="arena-table", version=(1, 0))


@pytest.mark.parametrize(
    "changed",
    [
        {"table": _table([["t", "float32", [1]], -1])},
        {"table": _table(["t", "float32", [1]])},
        {"table": _table([["t", "float32", ["1"]], 0])},
        {"table": _table([["t", "float32", [-1]], 0])},
        {"table": _table([["t", "object", [1]], 0])},
        {"table": _table([[1, "uint8", [1]], 0])},
        {"table": dumps({}, kind="arena-table", version=(1, 0))},
        {"table": b""},
        {"table": None},
        {"trees": {"model": "text"}},
        {"trees": None},
        {"readers": {3: b""}},
        {"extra": {}},
    ],
)
def test_documents_that_make_no_sense_are_refused(arena: Arena, changed: dict[str, Any]) -> None:
    plain = {"trees": {}, "table": _table(), "readers": {}, **changed}
    document = dumps(plain, kind="arena-contents", version=(1, 0))
    with pytest.raises(WireError):
        GenerationDocuments.from_bytes(document)
    capture(arena, document)
    with arena.hold() as held:
        assert held is not None
        with pytest.raises(ArenaDamaged, match="what step 3 holds cannot be read"):
            contents_of(held)


def test_digests_are_those_of_the_contents_wherever_they_lie(tmp_path: Path) -> None:
    sizes = {"small": 100, "leaves": 8 * LEAF_BYTES, "odd": 8 * LEAF_BYTES + 77, "last": LEAF_BYTES + 5}
    plan = plan_slices(sizes, slice_bytes=2 * LEAF_BYTES)
    places = {
        key: TensorPlace(spec=TensorSpec(key=key, dtype="uint8", shape=(size,)), start=plan.places[key][0])
        for key, size in sizes.items()
    }
    made_for = ArenaLayout(
        identity=ArenaIdentity(run=b"r" * 16, rank=0, world=1),
        plan=plan.digest,
        data_bytes=plan.data_bytes,
        documents_bytes=4096,
        generations=2,
    )
    with ArenaFolder(tmp_path / "arenas").create(made_for) as arena:
        filling = arena.begin()
        assert filling is not None
        filling.data[:] = os.urandom(plan.data_bytes)
        made = GenerationDocuments(trees={}, table=TensorTable(places=places))
        filling.complete(CutId(attempt=0, step=1), digest=bytes(16), documents=made.to_bytes())
        with arena.hold() as held:
            assert held is not None
            assert contents_of(held).leaves() == checked(contents_of(held)).leaves()
            found = contents_of(held)
            found.verify()
            assert found.leaves() == {key: leaf_digests(read(found, key), LEAF_BYTES) for key in sizes}
            arena.memory[made_for.data_at(0) + places["leaves"].start + 3 * LEAF_BYTES] ^= 1
            with pytest.raises(ArenaDamaged):
                contents_of(held).verify()
            # The checksums were taken before, and not of the memory as it is now.
            now = held.data[places["leaves"].start :][: sizes["leaves"]]
            assert found.leaves()["leaves"] != leaf_digests(now, LEAF_BYTES)
