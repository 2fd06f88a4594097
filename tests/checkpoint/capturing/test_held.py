"""Tensors that lie where they lay are told from those that were given other memory, or are seen otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.capturing.held import Places


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
