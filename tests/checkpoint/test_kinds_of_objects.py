"""Optimizers, buffers and tensors as others make them: what is saved of them comes back, or is refused at the save."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from lakeckpt.errors import CheckpointMismatch, UnsupportedValue
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks

Build = Callable[[], dict[str, Any]]


def train(objects: dict[str, Any], steps: range) -> list[float]:
    """The losses of these steps, which depend on the state and the number of the step alone."""
    model, optimizer = objects["model"], objects["optimizer"]
    losses = []
    for step in steps:
        first = next(model.parameters())
        shape = (4, 3, 6, 6) if first.dim() == 4 else (4, first.shape[1])
        batch = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_goes_on(build: Build, **options: Any) -> None:
    """A run of five steps that is restored into new objects goes on bit by bit."""
    expected = train(build(), range(9))
    storage, objects = MemoryStorage(), build()
    with manager(storage, objects, **options) as saver:
        saver.restore()
        for step in range(5):
            train(objects, range(step, step + 1))
            saver.step()
    fresh = build()
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.zero_()
    with manager(storage, fresh, **options) as restorer:
        assert restorer.restore() == 5
        assert train(fresh, range(5, 9)) == expected[5:]


def images(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.01, **options)}  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_of_weights_that_lie_channels_last_goes_on_bit_by_bit(
    kind: type[torch.optim.Optimizer],
) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    check_goes_on(lambda: images(kind, fused=True, **options))


class Around(torch.optim.Optimizer):
    """Around another one, with slow weights and a state dict of a form of its own, as Lookahead is written: of hooks it
    has those for steps alone."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()
        self.state, self.defaults = defaultdict(dict), inner.defaults
        self.slow = [one.detach().clone() for one in self.parameters]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(chain(*(group["params"] for group in self.param_groups)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, fast in zip(self.slow, self.parameters, strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow, self.count = state_dict["slow"], state_dict["count"]


class Projected(torch.optim.Optimizer):
    """Its moments are flat, under the name that torch's own have, as SPAM's are; GaLore's are of a lower rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in chain(*(group["params"] for group in self.param_groups)):
            state = self.state[parameter]
            state.setdefault("exp_avg", torch.zeros(parameter.numel())).lerp_(parameter.grad.flatten(), 0.1)
            parameter.sub_(state["exp_avg"].view_as(parameter), alpha=0.01)


def around() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(5, 3)
    return {"model": model, "optimizer": Around(torch.optim.AdamW(model.parameters(), lr=0.01))}


def projected() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(5, 3)
    return {"model": model, "optimizer": Projected(model.parameters())}


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("build", [around, projected])
def test_an_optimizer_with_a_state_of_its_own_form_or_shapes_goes_on_bit_by_bit(
    build: Build, is_captured: bool, tmp_path: Path
) -> None:
    check_goes_on(build, **({"capture_every": 1, "arenas": tmp_path} if is_captured else {}))


class Bank(torch.nn.Module):
    """A memory that grows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 20_000))

    def grow(self, value: float) -> None:
        assert isinstance(self.rows, torch.Tensor)
        self.rows.resize_(self.rows.shape[0] + 1, 20_000)[-1] = value


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_buffer_can_be_resized_after_it_was_saved_and_after_it_was_restored(
    is_captured: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"capture_every": 1, "arenas": tmp_path} if is_captured else {}
    storage, bank = MemoryStorage(), Bank()
    with manager(storage, {"bank": bank}, **options) as saver:
        saver.restore()
        for step in range(3):
            bank.grow(step)
            saver.step()
            saver.save()
    other = Bank()
    other.rows.resize_(4, 20_000)
    with manager(storage, {"bank": other}, **options) as restorer:
        assert restorer.restore() == 3
    other.grow(3.0)
    assert other.rows[:, 0].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


class Dressed(torch.optim.Optimizer):
    """One of torch's in another's clothes, as accelerate has them."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.AdamW(parameters, fused=True)

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


class Derived(torch.optim.AdamW):
    pass


class Own(torch.optim.Optimizer):
    """With moments like torch's, and nothing of its optimizers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter.data -= moment.lerp_(parameter.grad, 0.5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived, Dressed, Own])
def test_moments_of_parameters_of_no_module_in_another_order_are_refused(kind: Any) -> None:
    """Fused steps would write beyond the end of the smaller ones."""

    def build(order: int) -> dict[str, Any]:
        model = torch.nn.Linear(4, 6)
        return {"model": model, "optimizer": kind(list(model.parameters())[::order])}

    storage, objects = MemoryStorage(), build(1)
    with manager(storage, {"optimizer": objects["optimizer"]}) as saver:
        saver.restore()
        train(objects, range(1))
        saver.step()
    with pytest.raises(CheckpointMismatch, match=r"exp_avg of parameter 0 is \[6, 4\] in the checkpoint"):
        manager(storage, {"optimizer": build(-1)["optimizer"]}).restore()


def test_what_an_object_was_given_can_be_resized() -> None:
    storage, rows = MemoryStorage(), Counter(torch.ones(3))
    with manager(storage, {"rows": rows}) as saver:
        saver.restore()
        saver.step()
    other = Counter(torch.zeros(3))
    with manager(storage, {"rows": other}) as restorer:
        restorer.restore()
    assert other.value.resize_(100)[:3].tolist() == [1.0] * 3


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_tensor_that_is_made_of_others_is_refused_by_its_path(is_captured: bool, tmp_path: Path) -> None:
    """All such lie at address 0: two of one shape were taken for tied ones."""
    options: dict[str, Any] = {"capture_every": 1, "arenas": tmp_path} if is_captured else {}
    made = TwoTensor(torch.ones(2), torch.zeros(2))
    saver = manager(MemoryStorage(), {"n": Counter({"at": made})}, **options)
    saver.restore()
    with pytest.raises(UnsupportedValue, match=r"n/value/at: a TwoTensor is made of other tensors"):
        saver.save()
    saver.close()


def test_a_tensor_whose_memory_was_freed_is_refused_by_its_path() -> None:
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    saver = manager(MemoryStorage(), {"n": Counter({"at": freed})})
    saver.restore()
    with pytest.raises(UnsupportedValue, match=r"n/value/at: a Tensor without memory"):
        saver.save()


class Gathered(Counter):
    """Its tensors are gathered on rank 0, which takes a call on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__({"mean": torch.ones(2)} if rank == 0 else {})
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        super().load_state_dict(state)


def test_an_object_that_gathers_its_state_on_one_rank_is_called_alike_on_all() -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange, *, restores: bool) -> list[str]:
        gathered = Gathered(rank)
        saver = manager(storage, {"gathered": gathered}, exchange=exchange, waiter=EventWaiter(storage))
        assert saver.restore() == int(restores)
        if not restores:
            saver.step()
            saver.save()
        return gathered.calls

    for restores in (False, True):
        first, second = good(run_ranks(2, partial(body, restores=restores)))
        assert first == second and first.count("load_state_dict") == int(restores)
