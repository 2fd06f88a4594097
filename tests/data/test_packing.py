"""Whatever a transform returns comes out of a slab as it went in."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from lakeckpt import Batch, Ragged
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.data.workers.pickling import pack, unpack
from tests.data.reading import same

RECEIPT = Receipt(
    epoch=0, micro_batch=0, lane=0, step=0, rank=0, world_size=1, spans=(Span(epoch=0, start=0, stop=2),), step_rows=2
)
Pair = namedtuple("Pair", ["left", "right"])


def crossed(value: Any, *, pinned: bool = False) -> Any:
    """``value`` as another process gets it; ``pinned``: as it does with memory that would be."""
    packed = pack(value, RECEIPT)
    slab = np.zeros(packed.size_bytes, np.uint8)
    packed.copy_to(slab.__array_interface__["data"][0])
    return unpack(torch.from_numpy(slab) if pinned else slab, packed.pickle_at, RECEIPT)


NUMBERS = torch.arange(24, dtype=torch.int32)
VALUES: dict[str, Any] = {
    "dtypes": [torch.arange(3).to(kind) for kind in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64)],
    "no dimension": {"t": torch.tensor(3), "a": np.array(2.5)},
    "no elements": {"t": torch.zeros(0, 3), "a": np.zeros((2, 0), np.int16)},
    "other strides": [NUMBERS.view(4, 6).t(), NUMBERS.view(1, 2, 3, 4).to(memory_format=torch.channels_last)],
    "Fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "of numpy": [
        np.array(["a", "bc"]),
        np.array(["2001-02-03"], "M8[D]"),
        np.array([(1, 2.0)], "i4,f8"),
        np.float32(3),
    ],
    "not yet conjugated or negated": [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
    "big-endian": np.arange(3, dtype=">i4"),
    "objects": {"numpy": np.array([{"a": 1}, None], object), "set": {1, 2}, "path": Path("x"), "none": None},
    "nested": {"a": [(NUMBERS, {"b": "text"}), 1.5], "c": (), "d": {}, 3: "a key of another kind"},
    "named": Pair(left=NUMBERS, right=OrderedDict(x=np.arange(2))),
    "ragged": Ragged(values=np.frombuffer(b"heyyou", np.uint8), offsets=np.array([0, 3, 3, 6]), kind="str"),
    "masked": Ragged(values=NUMBERS[:2], offsets=torch.tensor([0, 2]), masks={"values.is_null": torch.ones(2).bool()}),
    "jagged": torch.nested.nested_tensor_from_jagged(torch.rand(6, 2), torch.tensor([0, 4, 4, 6])),
    "sparse": torch.eye(3).to_sparse(),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "arrow": pa.table({"x": [[1], None, [2, 3]], "y": ["a", "b", None]}).slice(1),
    "empty arrow": pa.table({"x": pa.array([], pa.int8())}),
    "arrow within": {"objects": {pa.table({"x": [1]}).num_rows}, "deep": Pair(pa.table({"x": [1]}), None)},
}


@pytest.mark.parametrize("name", VALUES)
def test_any_value_crosses_as_it_was(name: str) -> None:
    assert same(VALUES[name], crossed(VALUES[name]))


@pytest.mark.parametrize("name", VALUES)
def test_any_value_is_the_same_in_pinned_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    assert same(VALUES[name], crossed(VALUES[name], pinned=True))


def test_pinned_columns_share_one_storage() -> None:
    found = crossed(Batch({"a": torch.arange(3), "b": torch.zeros(2, 2)}, RECEIPT), pinned=True)
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


def test_a_slice_crosses_without_what_it_was_cut_from() -> None:
    whole = torch.arange(1 << 20)
    for value in (whole[3:9], whole[::1000][:5], pa.table({"x": np.arange(1 << 20)}).slice(5, 5), whole.numpy()[7:9]):
        assert pack(value, RECEIPT).size_bytes < 4096
        assert same(value, crossed(value)) or same(value.contiguous(), crossed(value))


def test_what_lies_with_gaps_in_any_order_of_dimensions_crosses_without_them() -> None:
    for value in (NUMBERS[::2], NUMBERS.view(4, 6)[::2].t(), NUMBERS.view(4, 6).t()[:, ::2]):
        assert torch.equal(value, crossed(value))
        assert np.array_equal(value.numpy(), crossed(value.numpy()))


def test_what_is_one_object_stays_one_and_arrays_are_writable() -> None:
    shared = torch.arange(3)
    found = crossed({"a": shared, "b": [shared], "deep": Pair(shared, np.arange(2)), "table": Batch({}, RECEIPT)})
    assert found["a"] is found["b"][0] is found["deep"].left
    found["a"][0] = 7
    found["deep"].right[0] = 7
    assert found["deep"].left[0] == 7 and found["table"].receipt is RECEIPT


def test_a_batch_of_tensors_crosses_with_its_columns_in_order_and_shared_ones_stay_one() -> None:
    words = Ragged(values=torch.arange(6), offsets=torch.tensor([0, 2, 6]), kind="bytes")
    columns = {"b": torch.zeros(2, 3), "words": words, "a": torch.arange(2), "turned": NUMBERS.view(4, 6).t()}
    for left_out in ("turned", "words", "b"):
        batch = Batch({name: one for name, one in columns.items() if name != left_out}, RECEIPT)
        found = crossed(batch)
        assert type(found) is Batch and list(found) == list(batch) and found.receipt is RECEIPT
        assert all(same(batch[name], found[name]) for name in batch)
    again = crossed(Batch({"x": NUMBERS, "y": NUMBERS}, RECEIPT))
    assert again["x"] is again["y"]
    batch, inside = crossed((Batch({"x": NUMBERS}, RECEIPT), NUMBERS))
    assert batch["x"] is inside
    sparse = crossed(Batch({"x": NUMBERS, "sparse": torch.eye(3).to_sparse()}, RECEIPT))
    assert same(torch.eye(3).to_sparse(), sparse["sparse"]) and same(NUMBERS, sparse["x"])


def test_the_receipt_is_the_loops_own_wherever_it_is_held() -> None:
    found = crossed({"whose": RECEIPT, "deep": Pair(RECEIPT, None), "of": Batch({}, RECEIPT)})
    assert found["whose"] is found["deep"].left is found["of"].receipt is RECEIPT


def test_what_holds_itself_crosses_as_one_object() -> None:
    value: list[Any] = [NUMBERS, {"n": 1}]
    value[1]["whole"] = value
    found = crossed(value)
    assert found[1]["whole"] is found and torch.equal(found[0], NUMBERS)
