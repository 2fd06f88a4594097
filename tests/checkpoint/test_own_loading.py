"""What loads itself is judged by its own loading, not by shapes; what refuses goes back, and is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lakeckpt.errors import CheckpointMismatch
from tests.checkpoint.rig import Counter, MemoryStorage, manager
from tests.patience import PATIENCE_S


class Extra(nn.Linear):
    """Its extra state is whatever it has seen: None at first."""

    def __init__(self, seen: torch.Tensor | None = None, *, refuses: bool = False) -> None:
        super().__init__(2, 2)
        self.seen, self.refuses = seen, refuses

    def get_extra_state(self) -> torch.Tensor | None:
        return self.seen

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        self.seen = state
        if self.refuses and state is not None and len(state) > 3:
            raise ValueError("too much was seen")


class Metric(nn.Module):
    """Its buffer takes the shape and dtype of what is loaded, as metrics and observers do."""

    def __init__(self, values: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(0) if values is None else values)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.values = state[f"{prefix}values"].clone()
        super()._load_from_state_dict(state, prefix, *rest)


class Lazy(nn.Module):
    """It has no buffer before the first batch, or a state that has one."""

    def __init__(self, values: torch.Tensor | None = None) -> None:
        super().__init__()
        if values is not None:
            self.register_buffer("values", values)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}values" in state:
            self.register_buffer("values", torch.zeros_like(state[f"{prefix}values"]))
        super()._load_from_state_dict(state, prefix, *rest)


class Hooked(nn.Linear):
    """A hook gives the saved bias, which has a row for each head, the shape of here."""

    def __init__(self, bias: torch.Tensor | None = None) -> None:
        super().__init__(2, 2)
        if bias is not None:
            self.bias = nn.Parameter(bias)

        def fold(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            if state[f"{prefix}bias"].dim() == 2:
                state[f"{prefix}bias"] = state[f"{prefix}bias"].sum(0)

        if bias is None:
            self.register_load_state_dict_pre_hook(fold)


class Whole(nn.Linear):
    """A whole model with a ``load_state_dict`` of its own: an entry of old names is renamed."""

    def __init__(self, *, old: bool = False) -> None:
        super().__init__(2, 2, bias=False)
        if old:
            self.register_parameter("kernel", nn.Parameter(self.weight.detach() + 1))
            del self.weight

    def load_state_dict(self, state: Any, *rest: Any, **options: Any) -> Any:
        return super().load_state_dict({"weight": state.get("kernel", state.get("weight"))}, *rest, **options)


Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[Any], Any]]
KINDS: dict[str, Pair] = {
    "extra state of another length": (lambda: Extra(torch.arange(5)), lambda: Extra(torch.arange(2)), lambda m: m.seen),
    "extra state of another dtype": (
        lambda: Extra(torch.ones(2, dtype=torch.float64)),
        lambda: Extra(torch.zeros(2)),
        lambda m: m.seen,
    ),
    "extra state that a fresh one lacks": (lambda: Extra(torch.arange(3)), Extra, lambda m: m.seen),
    "extra state that was None": (Extra, lambda: Extra(torch.arange(3)), lambda m: m.seen),
    "a metric": (lambda: Metric(torch.arange(4)), Metric, lambda m: m.values),
    "a buffer made later": (lambda: Lazy(torch.arange(4)), Lazy, lambda m: m.values),
    "a hook": (lambda: Hooked(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), Hooked, lambda m: m.bias.tolist()),
    "a loading of the whole": (lambda: Whole(old=True), Whole, lambda m: getattr(m, "kernel", None)),
}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (kind, place)
        for kind in KINDS
        for place in ("alone", "inside", "wrapped")
        if place == "alone" or kind != "a loading of the whole"  # torch calls it of the outermost module alone
    ],
)
def test_what_loads_itself_is_restored_though_shapes_differ(
    tmp_path: Path, kind: str, place: str, *, is_captured: bool
) -> None:
    saved, fresh, value_of = KINDS[kind]
    beside = {"capture_every": 1, "arenas": tmp_path / "arenas", "timeout_s": PATIENCE_S} if is_captured else {}

    def placed(module: nn.Module) -> nn.Module:
        if place == "alone":
            return module
        inside = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"part": module}))
        return inside if place == "inside" else nn.ModuleDict({"module": inside})

    first, second, storage = saved(), fresh(), str(tmp_path / "run")
    weights = [one.detach().clone() for one in placed(first).parameters()]
    with manager(storage, {"model": placed(first)}, **beside) as saver:
        saver.restore()
        saver.step()
    manager(storage, {"model": placed(second)}).restore()
    if kind == "a loading of the whole":
        assert same(second.weight.detach(), weights[-1])
    elif kind == "a hook":
        assert value_of(second) == [4.0, 6.0]
    else:
        assert same(value_of(second), value_of(first))
        assert all(map(torch.equal, second.parameters(), first.parameters()))


@pytest.mark.parametrize("also", ["a metric", "a buffer made later", "extra state that a fresh one lacks"])
def test_what_loads_itself_and_refuses_is_named_and_nothing_is_changed(also: str) -> None:
    saved, fresh, _ = KINDS[also]
    storage = MemoryStorage()
    with manager(
        storage, {"n": Counter(3), "model": nn.ModuleDict({"a": saved(), "b": Extra(torch.arange(5))})}
    ) as one:
        one.restore()
        one.step()
    live = nn.ModuleDict({"a": fresh(), "b": Extra(torch.arange(2), refuses=True)})
    objects = {"n": Counter(1), "model": live}
    before = {key: None if value is None else value.clone() for key, value in live.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=r"'model\.b' refused its state .*too much was seen"):
        manager(storage, objects).restore()
    after = live.state_dict()
    assert after.keys() == before.keys() and all(same(before[key], after[key]) for key in before)
    assert objects["n"].value == 1


def test_a_state_whose_shapes_no_own_loading_judges_is_refused_entry_by_entry() -> None:
    storage = MemoryStorage()
    with manager(storage, {"model": nn.ModuleDict({"a": nn.Linear(2, 3), "b": Extra(torch.arange(5))})}) as one:
        one.restore()
        one.step()
    live = nn.ModuleDict({"a": nn.Linear(2, 4), "b": Extra()})
    with pytest.raises(CheckpointMismatch, match=r"(?s)nothing was changed.*model: a\.weight is float32 \[3, 2\]"):
        manager(storage, {"model": live}).restore()
    assert live["b"].seen is None


def test_an_optimizer_with_a_hook_of_its_own_judges_its_moments_by_it() -> None:
    def made(width: int) -> dict[str, Any]:
        model = nn.Linear(width, 1, bias=False)
        return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "weight": model.weight}

    storage, first, second = MemoryStorage(), made(2), made(3)
    first["weight"].sum().backward()
    first["optimizer"].step()
    with manager(storage, {"optimizer": first["optimizer"]}) as one:
        one.restore()
        one.step()

    def widened(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        kept = {
            number: {key: nn.functional.pad(value, (0, 3 - value.shape[1])) for key, value in one.items()}
            for number, one in state["state"].items()
        }
        return {**state, "state": kept}

    with pytest.raises(CheckpointMismatch, match="momentum_buffer of parameter 0 is"):
        manager(storage, {"optimizer": second["optimizer"]}).restore()
    second["optimizer"].register_load_state_dict_pre_hook(widened)
    manager(storage, {"optimizer": second["optimizer"]}).restore()
    assert second["optimizer"].state[second["weight"]]["momentum_buffer"].tolist() == [[1.0, 1.0, 0.0]]
