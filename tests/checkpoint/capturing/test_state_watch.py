"""A watch tells a state in which everything is where it was from a state in which something was replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.capture.state_watch import StateWatch, watch_of


class Silent(torch.Tensor):
    """Somebody's own kind of tensor, which does not say what it is set to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.is_set_to:
            raise NotImplementedError("is_set_to")
        return super().__torch_function__(func, types, args, kwargs or {})


def elsewhere(one: torch.Tensor) -> None:
    one.data = one.data.clone()


def transposed(one: torch.Tensor) -> None:
    one.data = one.data.t()


def as_integers(one: torch.Tensor) -> None:
    one.data = one.data.view(torch.int32)


def reshaped(one: torch.Tensor) -> None:
    one.data = one.data.view(2, 8)


def resized(one: torch.Tensor) -> None:
    """Its storage is the same, and lies elsewhere."""
    storage, before, size = one.untyped_storage(), one.data_ptr(), one.untyped_storage().nbytes()
    while one.data_ptr() == before:  # a small one may grow where it is
        storage.resize_(size := 64 * size)
    assert one.shape == (4, 4)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(16.0).view(4, 4),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(16.0).view(4, 4), requires_grad=False),
    "a view": lambda: torch.arange(40.0)[8:24].view(4, 4),
}


def watch_on(*dicts: dict[Any, Any], lists: tuple[list[Any], ...] = ()) -> StateWatch:
    return StateWatch(lambda: (dicts, lists))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [elsewhere, transposed, as_integers, reshaped, resized])
@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_tensor_with_other_memory_or_another_shape_is_noticed(
    kind: str, change: Callable[[torch.Tensor], None], looks: int
) -> None:
    tensor = KINDS[kind]()
    watch = watch_on({"other": torch.zeros(3), "one": tensor})
    for _ in range(looks):
        tensor.data.add_(1)
        assert watch.holds()
    change(tensor)
    assert not watch.holds() and not watch.holds()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0, 4), torch.tensor(3.0).expand(5)],
    ids=["empty", "expanded"],
)
def test_odd_tensors_lie_where_they_lay(tensor: torch.Tensor) -> None:
    watch = watch_on({"one": tensor})
    assert watch.holds() and watch.holds()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.imag(torch.randn(3, dtype=torch.complex64).conj()),
        torch.arange(16.0).view(4, 4).as_subclass(Silent),
        torch.zeros(2, device="meta"),
    ],
    ids=["conjugated", "negated", "silent", "meta"],
)
def test_a_module_with_a_tensor_that_torch_cannot_compare_is_not_watched(tensor: torch.Tensor) -> None:
    module = torch.nn.Linear(2, 2)
    assert watch_of(module) is not None
    module.register_buffer("odd", tensor)
    assert watch_of(module) is None


def equal_but_another(of: dict[Any, Any]) -> None:
    of["b"] = [2]


def in_another_order(of: dict[Any, Any]) -> None:
    of["a"] = of.pop("a")


def under_another_name(of: dict[Any, Any]) -> None:
    held = list(of.values())
    of.clear()
    of.update(zip("ax", held, strict=True))


def less(of: dict[Any, Any]) -> None:
    del of["b"]


def more(of: dict[Any, Any]) -> None:
    of["c"] = 1


@pytest.mark.parametrize("change", [equal_but_another, in_another_order, under_another_name, less, more])
def test_a_dict_that_holds_something_else_is_noticed(change: Callable[[dict[Any, Any]], None]) -> None:
    same: dict[Any, Any] = {"a": [1], "b": [2]}
    changed = dict(same)
    watch = watch_on(same, {}, changed, {})
    assert watch.holds() and watch.holds()
    change(changed)
    assert not watch.holds() and not watch.holds()


def test_a_dict_that_was_empty_and_an_entry_that_moved_to_the_next_dict_are_noticed() -> None:
    empty: dict[Any, Any] = {}
    full: dict[Any, Any] = {"a": 1}
    watch = watch_on({}, empty, full)
    assert watch.holds()
    empty["a"] = full.pop("a")
    assert not watch.holds()
    full["a"] = empty.pop("a")
    assert watch.holds()


def test_a_list_with_equal_objects_is_not_the_same_list() -> None:
    one, other = [1], [1]
    held = [one, other]
    watch = watch_on(lists=(held,))
    assert watch.holds()
    for others in ([other, one], [one], [one, other, one], [one, one], []):
        held[:] = others
        assert not watch.holds()
    held[:] = [one, other]
    assert watch.holds()
