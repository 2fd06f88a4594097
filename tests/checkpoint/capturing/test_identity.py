"""Tensors that lie where they lay are told from those that were given other memory, or are seen otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.capture.identity import Held, Places, are_same, contents_of


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
    "silent": lambda: torch.arange(16.0).view(4, 4).as_subclass(Silent),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [elsewhere, transposed, as_integers, reshaped, resized])
@pytest.mark.parametrize("looks", [0, 1, 3])
def test_other_memory_or_another_look_at_it_is_noticed(
    kind: str, change: Callable[[torch.Tensor], None], looks: int
) -> None:
    tensor = KINDS[kind]()
    places = Places({"other": torch.zeros(3), "one": tensor})
    for _ in range(looks):
        tensor.data.add_(1)
        assert places.hold()
    change(tensor)
    assert not places.hold() and not places.hold()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.imag(torch.randn(3, dtype=torch.complex64).conj()),
        torch.zeros(0, 4),
        torch.tensor(3.0).expand(5),
        torch.zeros(2, device="meta"),
    ],
    ids=["conjugated", "negated", "empty", "expanded", "meta"],
)
def test_odd_tensors_lie_where_they_lie(tensor: torch.Tensor) -> None:
    places = Places({"one": tensor})
    assert places.hold() and places.hold() and places.hold()


def test_places_are_others_where_keys_or_memory_are() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    places = Places({"a": one, "b": other})
    assert places.are(Places({"a": one[:], "b": other.view(3)})), "other tensors of the same memory"
    for others in ({"a": one, "c": other}, {"a": other, "b": one}, {"a": one, "b": other.clone()}, {"a": one}):
        assert not places.are(Places(others))


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
def test_dicts_in_which_something_else_is_are_told_from_those_in_which_the_same_is(
    change: Callable[[dict[Any, Any]], None],
) -> None:
    same: dict[Any, Any] = {"a": [1], "b": [2]}
    changed = dict(same)
    empty: dict[Any, Any] = {}
    held = Held([contents_of(one) for one in (same, empty, changed, {})])
    assert held.hold() and held.hold()
    change(changed)
    assert not held.hold() and not held.hold()


def test_what_was_empty_is_not_the_same_with_something_in_it() -> None:
    empty: dict[Any, Any] = {}
    held = Held([contents_of(one) for one in ({}, empty, {"a": 1})])
    assert held.hold()
    empty["hook"] = None
    assert not held.hold()
    empty.clear()
    assert held.hold()


def test_the_same_objects_in_the_same_order_are_the_same() -> None:
    one, other = [1], [1]
    assert are_same([one, other], (one, other)) and are_same([], ())
    for others in ([other, one], [one], [one, other, one], [one, one], []):
        assert not are_same([one, other], others)
