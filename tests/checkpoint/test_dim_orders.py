"""Tensors come back as they lay in memory: what steps through two of them side by side gives each weight its own
moments, and sums are made in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.state.tensors import dim_order_of, in_dim_order
from lakeckpt.checkpoint.state.tree import flatten
from lakeckpt.convert import read_state
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.wire.envelope import TensorRef
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
    assert flat.tree == {"a": TensorRef(key="item/a")}


def test_a_tensor_that_is_there_twice_lies_as_it_did_in_both_places() -> None:
    tensor = LAID_OUT["transposed"]
    reference = TensorRef(key="item/a", dim_order=(1, 0))
    assert flatten("item", {"a": tensor, "b": tensor}).tree == {"a": reference, "b": reference}


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
