"""Tensors come back as they lay in memory: what steps through two of them side by side gives each weight its own
moments, and sums are made in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import read_state
from lakeckpt.checkpoint.capturing.sources import OptimizerSource
from lakeckpt.checkpoint.dcp.value import decode_value, encode_value
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.load import loaded_of
from lakeckpt.checkpoint.tensors import dim_order_of, in_dim_order
from lakeckpt.checkpoint.tree import flatten, tree_to_bytes
from lakeckpt.errors import CheckpointDamaged, WireDamaged
from lakeckpt.lake.local import LocalStorage
from lakeckpt.wire.codec import TensorRef, dumps, loads
from tests.checkpoint.rig import MemoryStorage, manager

LAID_OUT = {
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, of one column": torch.arange(24.0).reshape(2, 3, 4, 1).to(memory_format=torch.channels_last),
    "transposed": torch.arange(20.0).reshape(4, 5).t(),
    "turned around": torch.arange(30.0).reshape(1, 5, 6).permute(2, 1, 0),
}
ROW_BY_ROW = {
    "contiguous": torch.arange(20.0).reshape(4, 5),
    "empty": torch.zeros(0, 3).t(),
    "one element": torch.zeros(1, 1).t(),
    "with gaps": torch.arange(40.0).reshape(5, 8)[:, ::2],
    "expanded": torch.zeros(5, 1).expand(5, 4),
    "a number": torch.tensor(3.0),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_lies_in_another_order_is_laid_out_so_again(name: str) -> None:
    tensor = LAID_OUT[name]
    order = dim_order_of(tensor)
    assert order == tensor.dim_order()
    again = in_dim_order(tensor.contiguous(), order)
    assert torch.equal(again, tensor) and again.stride() == tensor.stride()


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_what_lies_row_by_row_is_written_as_ever(name: str) -> None:
    flat = flatten("item", {"a": ROW_BY_ROW[name]})
    assert flat.tree == {"a": TensorRef(key="item/a")} and not flat.has_dim_orders
    assert loads(tree_to_bytes(flat), kind="tree", supported=(1, 0)).version == (1, 0)


def test_a_tensor_that_is_there_twice_lies_as_it_did_in_both_places() -> None:
    tensor = LAID_OUT["transposed"]
    reference = TensorRef(key="item/a", dim_order=(1, 0))
    assert flatten("item", {"a": tensor, "b": tensor}).tree == {"a": reference, "b": reference}


def test_documents_with_an_order_are_refused_by_name_where_it_would_be_lost() -> None:
    flat = flatten("item", {"a": LAID_OUT["transposed"]})
    assert loads(tree_to_bytes(flat), kind="tree", supported=(2, 0)).version == (2, 0)
    value = encode_value("item", {"a": LAID_OUT["transposed"]})
    assert loads(value, kind="dcp-value", supported=(2, 0)).version == (2, 0)
    parameter = torch.nn.Parameter(LAID_OUT["transposed"])
    optimizer = torch.optim.SGD([parameter], momentum=0.5)
    source = OptimizerSource("item", optimizer)
    assert loads(source.document()(), kind="tree", supported=(2, 0)).version == (1, 0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert source.renew()
    assert loads(source.document()(), kind="tree", supported=(2, 0)).version == (2, 0)


class Pair:
    """Two networks and their fused optimizers, as who trains a GAN writes it."""

    def __init__(self, *, channels_last: bool = True) -> None:
        torch.manual_seed(3)
        self.networks = [torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 3, 3)]
        if channels_last:
            self.networks = [one.to(memory_format=torch.channels_last) for one in self.networks]  # type: ignore[call-overload]
        self.optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, fused=True) for one in self.networks]

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = torch.randn((4, 3, 9, 9), generator=torch.Generator().manual_seed(step))
            loss = self.networks[1](self.networks[0](batch).relu()).square().mean()
            loss.backward()
            for one in self.optimizers:
                one.step()
                one.zero_grad()
            losses.append(loss.item())
        return losses

    def state_dict(self) -> dict[str, Any]:
        return {"networks": self._of(self.networks), "optimizers": self._of(self.optimizers)}

    def _of(self, those: list[Any]) -> list[Any]:
        return [one.state_dict() for one in those]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, saved in zip(self.networks + self.optimizers, state["networks"] + state["optimizers"], strict=True):
            one.load_state_dict(saved)


@pytest.mark.parametrize("is_captured", [False, True])
def test_an_object_with_several_fused_optimizers_goes_on_bit_by_bit(is_captured: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"capture_every": 1, "arenas": tmp_path} if is_captured else {}
    expected = Pair().train(range(9))
    storage, pair = MemoryStorage(), Pair()
    with manager(storage, {"pair": pair}, **options) as saver:
        saver.restore()
        for step in range(5):
            pair.train(range(step, step + 1))
            saver.step()
    other = Pair()
    with manager(storage, {"pair": other}, **options) as restorer:
        assert restorer.restore() == 5
        assert other.train(range(5, 9)) == expected[5:]


def test_a_state_that_is_read_without_objects_goes_on_bit_by_bit(tmp_path: Path) -> None:
    expected = Pair().train(range(9))
    pair = Pair()
    with manager(LocalStorage(tmp_path), {"pair": pair}) as saver:
        saver.restore()
        pair.train(range(5))
        saver.step()
        saver.save(sync=True)
    other = Pair()
    other.load_state_dict(read_state(tmp_path)["pair"])
    assert other.train(range(5, 9)) == expected[5:]


@pytest.mark.parametrize("was", [False, True])
def test_moments_lie_as_their_weights_do_now(was: bool) -> None:
    """Weights of one run lie channels last, and of the other they do not: fused steps want both alike."""
    storage, pair = MemoryStorage(), Pair(channels_last=was)
    names = {"networks": "first", "optimizers": "first optimizer"}
    with manager(storage, {names["networks"]: pair.networks[0], names["optimizers"]: pair.optimizers[0]}) as saver:
        saver.restore()
        pair.train(range(5))
        saver.step()
    other = Pair(channels_last=not was)
    with manager(storage, {names["networks"]: other.networks[0], names["optimizers"]: other.optimizers[0]}) as restorer:
        restorer.restore()
    moments = other.optimizers[0].state[other.networks[0].weight]
    assert torch.equal(moments["exp_avg"], pair.optimizers[0].state[pair.networks[0].weight]["exp_avg"])
    assert moments["exp_avg"].stride() == moments["exp_avg_sq"].stride() == other.networks[0].weight.stride()


class Turned(torch.optim.Optimizer):
    """It keeps a matrix for each square weight, which it turns, as SOAP's and SPlus' are by ``eigh``."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            self.state[one].setdefault("sides", [torch.zeros_like(one), torch.zeros(3, 4)])
            self.state[one]["sides"] = [one.detach().clone().t(), torch.arange(12.0).reshape(4, 3).t()]


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_matrices_beside_square_weights_lie_as_they_did_but_for_fused_steps(options: dict[str, bool]) -> None:
    storage = MemoryStorage()
    weights = [torch.nn.Parameter(torch.arange(16.0).reshape(4, 4))]
    optimizer = Turned(weights, **options)
    optimizer.step()
    with manager(storage, {"optimizer": optimizer}) as saver:
        saver.restore()
        saver.step()
    other = Turned([torch.nn.Parameter(torch.zeros(4, 4))], **options)
    with manager(storage, {"optimizer": other}) as restorer:
        restorer.restore()
    (found,) = other.state.values()
    saved = optimizer.state[weights[0]]["sides"]
    assert all(torch.equal(*pair) for pair in zip(found["sides"], saved, strict=True))
    assert [one.stride() for one in found["sides"]] == [(4, 1) if options else (1, 4), (1, 3)]


def test_values_of_dcp_lie_as_they_did() -> None:
    found = decode_value(encode_value("item", {"all": list(LAID_OUT.values())}))["all"]
    for one, saved in zip(found, LAID_OUT.values(), strict=True):
        assert torch.equal(one, saved) and one.stride() == saved.stride()


def test_an_order_of_other_dimensions_than_the_tensor_has_is_damage() -> None:
    wrong = TensorRef(key="item/a", dim_order=(1, 0))
    tensors = {"item/a": ["float32", [1, 1, 2], bytes(8)]}
    with pytest.raises(WireDamaged, match=r"'item/a' of a value lies in the order \[1, 0\]"):
        decode_value(dumps({"tree": {"a": wrong}, "tensors": tensors}, kind="dcp-value", version=(2, 0)))


def test_a_tree_with_an_order_of_other_dimensions_is_damage() -> None:
    tree = dumps({"a": TensorRef(key="item/a", dim_order=(1, 0))}, kind="tree", version=(2, 0))
    random = dumps({}, kind="tree", version=(1, 0))
    spec = TensorSpec(key="item/a", dtype="float32", shape=(2, 2, 2))
    with pytest.raises(CheckpointDamaged, match=r"in the order \[1, 0\], and its shape is \[2, 2, 2\]"):
        loaded_of(
            {"item": tree, "lakeckpt.random": random},
            specs={"item/a": spec},
            wholes={},
            source=None,  # type: ignore[arg-type]
            is_new=True,
            per_rank=(),
            what="slot 1",
        )
