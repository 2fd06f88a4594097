"""Wrappers around models and optimizers are restored in place: no copy of a large tensor is made for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lakeckpt.checkpoint.state import loaded
from lakeckpt.errors import CheckpointMismatch
from tests.checkpoint.rig import Counter, MemoryStorage, manager

WIDTH = 1024


class AppState:
    """As torch's tutorial of distributed checkpoints writes it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Container:
    """Several optimizers in one, flat by the names of parameters."""

    def __init__(self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = models, optimizers

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{at}.{name}.{key}": value
            for at, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True))
            for name, one in model.named_parameters()
            for key, value in optimizer.state.get(one, {}).items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for at, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for name, one in model.named_parameters():
                for key in optimizer.state.get(one, {}):
                    optimizer.state[one][key] = state[f"{at}.{name}.{key}"]


def trained(seed: int, kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for one in model.parameters():
        one.grad = torch.rand_like(one)
    optimizer.step()
    optimizer.zero_grad()
    if kind == "app":
        return model, optimizer, {"app": AppState(model, optimizer)}
    return model, optimizer, {"model": model, "optimizers": Container([model], [optimizer])}


@pytest.mark.parametrize("kind", ["app", "container"])
def test_a_wrapper_is_restored_in_place_without_a_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    model, optimizer, objects = trained(0, kind)
    saver = manager(storage, objects)
    saver.restore()
    saver.save()
    other, fresh, live = trained(1, kind)
    before = {id(one): one.data_ptr() for one in other.parameters()}
    copied: list[int] = []
    deepcopy, empty_for = torch.Tensor.__deepcopy__, loaded.empty_for

    def counted(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        copied.append(tensor.nbytes)
        return deepcopy(tensor, memo)

    def counted_new(spec: Any) -> Any:
        copied.append(spec.size_bytes)
        return empty_for(spec)

    monkeypatch.setattr(torch.Tensor, "__deepcopy__", counted)
    monkeypatch.setattr(loaded, "empty_for", counted_new)
    assert manager(storage, live).restore() == 0
    assert sum(copied) < model.weight.nbytes // 100
    assert {id(one): one.data_ptr() for one in other.parameters()} == before
    for was, now in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(was, now)
        assert all(torch.equal(value, fresh.state[now][key]) for key, value in optimizer.state[was].items())


def test_a_small_object_is_undone_though_it_stands_beside_a_wrapper() -> None:
    storage = MemoryStorage()
    _, _, objects = trained(0, "app")
    saver = manager(storage, objects | {"n": Counter(3), "z": Counter(4)})
    saver.restore()
    saver.save()
    model, _, live = trained(1, "app")
    before = model.weight.detach().clone()
    note, refusing = Counter(5), Counter(6)
    refusing.load_state_dict = lambda state: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(CheckpointMismatch, match="'z' refused"):
        manager(storage, live | {"n": note, "z": refusing}).restore()
    assert note.value == 5 and torch.equal(model.weight, before)
