"""Files of tensors: what safetensors reads, and what every flipped bit does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load

from lakeckpt.checkpoint.format.digests import (
    LEAF_BYTES,
    PIECE_BYTES,
    content_digest,
    digest_of_leaves,
    leaf_digests,
    leaves_of_all,
)
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import PartRecord, SaveId
from lakeckpt.checkpoint.format.tensor_file import layout
from lakeckpt.checkpoint.format.verified_reads import open_files, read_slabs
from lakeckpt.checkpoint.persist import persist
from lakeckpt.checkpoint.persist.persist import OwnedTensor
from lakeckpt.checkpoint.state.staged import StagedTensor
from lakeckpt.checkpoint.state.tensors import empty_for, host_bytes, on_host, spec_of
from lakeckpt.errors import CheckpointDamaged, StorageError, UnsupportedValue
from lakeckpt.lake.storage.direct import PAGE_BYTES, STRAIGHT_BYTES
from tests.checkpoint.rig import MemoryStorage

SAVE = SaveId(attempt=1, step=2, number=3)
ONE_BYTE = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
PLAIN = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16"]
ALL = [*PLAIN, "uint8", "bool", "complex64", "complex128", *ONE_BYTE]
NATIVE = [*PLAIN, "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]


def example(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with arbitrary bits."""
    target = getattr(torch, dtype)
    size = torch.empty(shape, dtype=torch.uint8).numel()
    if dtype == "bool":
        return (torch.arange(size) % 3 == 0).reshape(shape)
    raw = (torch.arange(size * target.itemsize) * 37 % 251).to(torch.uint8)
    return raw.view(target).reshape(shape) if size else torch.empty(shape, dtype=target)


def write(storage: MemoryStorage, tensors: dict[str, torch.Tensor]) -> PartRecord:
    owned = []
    for key, tensor in tensors.items():
        data = host_bytes(on_host(tensor))
        staged = StagedTensor(spec=spec_of(key, tensor), data=data, leaves=leaf_digests(data, LEAF_BYTES))
        owned.append(OwnedTensor(staged=staged, ranks=((0, 1),)))
    return persist.persist(storage, run="r", save=SAVE, rank=0, world_size=1, cut=b"c", tensors=owned, trees=[])


def read(storage: MemoryStorage, part: PartRecord) -> dict[str, torch.Tensor]:
    made = {one.spec.key: empty_for(one.spec) for one in part.tensors}
    slabs = open_files(storage, [(part, index) for index in range(len(part.files))])
    read_slabs(storage, slabs, {key: view for key, (_, view) in made.items()})
    return {key: tensor for key, (tensor, _) in made.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and host_bytes(on_host(one)) == host_bytes(
        on_host(other)
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ALL)
def test_every_dtype_and_shape_comes_back_to_the_bit(dtype: str, shape: tuple[int, ...]) -> None:
    storage = MemoryStorage()
    tensor = example(dtype, shape)
    part = PartRecord.from_bytes(write(storage, {"a": tensor, "b": torch.ones(3)}).to_bytes())
    assert same_bits(read(storage, part)["a"], tensor)
    if dtype in ("uint64", "uint32", "uint16") and version("safetensors") < "0.6":
        return  # it does not know these types
    by_the_library = load(storage.objects[part.files[0].path])["a"]
    if dtype in NATIVE:
        assert same_bits(by_the_library, tensor)
    else:
        assert host_bytes(by_the_library) == host_bytes(on_host(tensor))


def test_views_are_saved_by_their_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"t": base.t(), "slice": base[:, 1:3], "conj": (base * 1j).conj()}
    storage = MemoryStorage()
    found = read(storage, write(storage, views))
    assert all(torch.equal(found[key], view.resolve_conj()) for key, view in views.items())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    with pytest.raises(UnsupportedValue, match="model/w"):
        spec_of("model/w", tensor)


def test_many_and_large_tensors_are_packed_into_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "FILE_BYTES", 100)
    storage = MemoryStorage()
    tensors = {f"t{n}": torch.arange(float(n)) for n in (0, 5, 60, 3, 4, 24)}
    part = write(storage, tensors)
    assert len(part.files) > 2
    found = read(storage, part)
    assert all(same_bits(found[key], tensor) for key, tensor in tensors.items())


def test_every_flipped_bit_truncation_and_addition_is_noticed() -> None:
    storage = MemoryStorage()
    part = write(storage, {"a": torch.arange(5.0), "b": torch.arange(4, dtype=torch.int8), "none": torch.empty(0)})
    path = part.files[0].path
    whole = storage.objects[path]
    for at in range(len(whole)):
        for bit in range(8):
            storage.objects[path] = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            with pytest.raises(CheckpointDamaged, match="safetensors"):
                read(storage, part)
        storage.objects[path] = whole[:at]
        with pytest.raises(CheckpointDamaged, match="safetensors"):
            read(storage, part)
    storage.objects[path] = whole + b"\0"
    with pytest.raises(CheckpointDamaged, match="does not have the"):
        read(storage, part)
    del storage.objects[path]
    with pytest.raises(CheckpointDamaged, match="missing"):
        read(storage, part)


def test_tensors_are_swapped_only_with_notice() -> None:
    """Another file of the same size and the same tensors in another order is not ours."""
    storage = MemoryStorage()
    part = write(storage, {"a": torch.arange(4.0), "b": torch.arange(4.0) + 1})
    other = write(storage, {"a": torch.arange(4.0) + 1, "b": torch.arange(4.0)})
    storage.objects[part.files[0].path] = storage.objects[other.files[0].path]
    with pytest.raises(CheckpointDamaged):
        read(storage, part)
    swapped = replace(part, files=other.files)
    with pytest.raises(CheckpointDamaged):
        read(storage, swapped)


def test_a_store_that_fails_is_not_damage() -> None:
    class Unreachable(MemoryStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            raise StorageError(110, "connection timed out")

    class BadSector(MemoryStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            raise StorageError(5, "input/output error")

    part = write(MemoryStorage(), {"a": torch.ones(1)})
    with pytest.raises(StorageError, match="timed out"):
        read(Unreachable(), part)
    with pytest.raises(CheckpointDamaged, match="medium"):
        read(BadSector(), part)


def test_digests_on_threads_are_those_of_each_alone() -> None:
    contents = [memoryview(bytes([n]) * (PIECE_BYTES // 2 * n)) for n in range(4)]
    found = leaves_of_all(contents, threads=3)
    assert [digest_of_leaves([leaves]) for leaves in found] == [content_digest(content) for content in contents]
    assert found == leaves_of_all(contents, threads=1) and len(set(found)) == 4


def test_larger_elements_come_first_so_that_all_are_aligned() -> None:
    plan = layout(
        [
            TensorSpec(key=name, dtype=name, shape=(3,))
            for name in ("int8", "float64", "bfloat16", "float32", "complex64")
        ]
    )
    for start, size in zip(plan.starts.values(), (8, 4, 4, 2, 1), strict=True):
        assert start % size == 0


def test_large_tensors_of_whole_pages_begin_at_pages_and_all_are_aligned() -> None:
    specs = [
        TensorSpec(key="odd", dtype="float32", shape=(STRAIGHT_BYTES // 4 + 1,)),
        TensorSpec(key="small", dtype="float64", shape=(3,)),
        TensorSpec(key="half", dtype="float16", shape=(STRAIGHT_BYTES,)),
        TensorSpec(key="pages", dtype="float32", shape=(STRAIGHT_BYTES // 4,)),
        TensorSpec(key="byte", dtype="uint8", shape=(1,)),
    ]
    plan = layout(specs)
    starts = plan.starts
    assert starts["half"] % PAGE_BYTES == starts["pages"] % PAGE_BYTES == 0
    assert starts["small"] % 8 == starts["odd"] % 4 == 0
    content = bytes(n % 251 for n in range(997)) * (plan.size_bytes // 997 + 1)
    by_the_library = load(plan.head + content[len(plan.head) : plan.size_bytes])
    for spec in specs:
        found = bytes(host_bytes(by_the_library[spec.key]))
        assert found == content[starts[spec.key] : starts[spec.key] + spec.size_bytes]
