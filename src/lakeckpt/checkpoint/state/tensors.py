"""This module turns torch's tensors into bytes and back, without a change of a single bit.

`spec_of` refuses, by its path, a tensor that cannot be stored as it is: one without data, sharded, sparse, quantized,
nested, overlapping itself, or made of other tensors. `refuse_overlaps` refuses tensors that share a part of their
memory. `tied_key` is equal for tensors that are one memory with one shape (tied weights).

The order of dimensions in memory is kept (`dim_order_of`): a fused optimizer on a CPU steps through the memory of a
parameter and of its moments side by side, and an object around such an optimizer gets its moments from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.errors import UnsupportedValue

__all__ = [
    "as_bytes",
    "batches_of",
    "dim_order_of",
    "empty_for",
    "host_bytes",
    "in_dim_order",
    "lent",
    "on_host",
    "refuse_overlaps",
    "spec_of",
    "sums_of",
    "tied_key",
]


_T = TypeVar("_T")


def spec_of(key: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the name, dtype and shape of a tensor that can be stored. Raises `UnsupportedValue` naming ``key``."""
    kind = type(tensor).__name__
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedValue(
            f"{key}: a {kind} has no shape yet: run the module once (a forward pass on one batch) before it is "
            "restored or saved"
        )
    if hasattr(tensor, "to_local") and not hasattr(tensor, "placements"):
        raise UnsupportedValue(
            f"{key}: a {kind} is spread over ranks in a way that is not supported: use DTensor (FSDP2), or gather it "
            "before it is saved"
        )
    is_masked = isinstance(tensor, torch.masked.MaskedTensor)
    if is_masked or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedValue(
            f"{key}: a {kind} of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device} cannot be stored: "
            "give a plain dense tensor"
        )
    if not hasattr(tensor, "placements"):
        _refuse_without_memory(key, tensor)
    return TensorSpec(key=key, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def _refuse_without_memory(key: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedValue` for a tensor that is made of others and has no bytes of its own. All such tensors lie at
    address 0, and would be taken for tied ones."""
    kind = type(tensor).__name__
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedValue(
            f"{key}: a {kind} is made of other tensors, as quantized ones of torchao are, and cannot be stored: give "
            "a plain dense tensor, or those that it is made of, by a state_dict of your own"
        )
    if tensor.numel() and not tensor.data_ptr():
        raise UnsupportedValue(f"{key}: a {kind} without memory cannot be stored: give a plain dense tensor")
    if _overlaps_itself(tensor):
        raise UnsupportedValue(
            f"{key}: several elements of this {kind} are one place in memory (strides {list(tensor.stride())}, as of "
            "an expanded tensor): make it contiguous, by clone()"
        )


def tied_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what is equal for two tensors that are the same memory seen the same way; None for empty ones."""
    if not tensor.numel():
        return None
    seen = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), str(tensor.device), *seen)


def refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `UnsupportedValue` naming two contiguous tensors that share a part of their memory, if neither lies inside
    the other."""
    spans = sorted(
        (str(one.device), one.data_ptr(), -one.nbytes, key)
        for key, one in tensors.items()
        if one.numel() and one.is_contiguous()
    )
    around: list[tuple[str, int, str]] = []  # device, end and key; each of them lies inside the one before
    for device, start, minus_size, key in spans:
        end = start - minus_size
        while around and (around[-1][0] != device or around[-1][1] <= start):
            around.pop()
        if around and around[-1][1] < end:
            raise UnsupportedValue(
                f"{around[-1][2]} and {key} share a part of their memory, and neither lies inside the other: give one "
                "of them a memory of its own, by clone()"
            )
        around.append((device, end, key))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements are, or may be, one place in memory, as in an expanded tensor."""
    reach = 1  # the places that the dimensions before take
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def dim_order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions, from the outermost in memory to the innermost; None if they are in their own order.

    ``torch.Tensor.dim_order`` gives the same and takes far longer."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return None if list(order) == sorted(order) else order


def in_dim_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return the same values in memory without gaps whose dimensions have this order, as `dim_order_of` gives it."""
    if order is None:
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in host memory with the same values; the same memory if it is that already."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, not copied, to be read or written."""
    return lent(as_bytes(tensor)).data if tensor.numel() else memoryview(bytearray())


class _Lent:
    """The memory of a tensor of bytes, in numpy's array interface. An array of it keeps the tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "version": 3,
        }


def lent(flat: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return what `as_bytes` gave, in host memory, as an array of the same memory.

    The array must be released before somebody resizes the memory. ``Tensor.numpy()`` would forbid that for good: a
    buffer that grows could not.
    """
    return np.asarray(_Lent(flat))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, not copied: one dimension of uint8.

    A contiguous tensor of a single element may have any strides (``table[:1, 0]``), which ``view`` refuses.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def sums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return 64 bits of each contiguous tensor, with its dtype and shape, equal if the bytes of two tensors are: the
    XXH3 of host memory, at 10 GB/s, and the sum of the words on a device, for which this thread waits."""
    linked = {key: one for key, one in tensors.items() if one.device.type != "cpu"}
    numbers = dict(zip(linked, _sums_on_devices(list(linked.values())), strict=True))
    found = {}
    for key, one in tensors.items():
        number = numbers[key] if key in numbers else xxhash.xxh3_64_intdigest(host_bytes(one))
        found[key] = f"{number:016x} {one.dtype} {tuple(one.shape)}".encode()
    return found


def _sums_on_devices(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the sums of the bytes of tensors, as words of 64 bits."""
    sums: list[torch.Tensor] = []
    for one in tensors:
        flat = as_bytes(one)
        whole = flat.numel() // 8 * 8
        words = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
        rest = torch.nn.functional.pad(flat[whole:], (0, whole + 8 - flat.numel()))
        sums.append(words.view(torch.int64).sum() + rest.view(torch.int64).sum())
    return [int(one) % 2**64 for one in sums]


def batches_of(items: Iterable[_T], size_of: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """Yield ``items`` in batches that are together no larger than ``most_bytes``; a larger item is a batch alone."""
    batch: list[_T] = []
    size_bytes = 0
    for one in items:
        if batch and size_bytes + size_of(one) > most_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(one)
        size_bytes += size_of(one)
    if batch:
        yield batch


def empty_for(spec: TensorSpec) -> tuple[torch.Tensor, memoryview]:
    """Return a new tensor in host memory, and its bytes to be filled."""
    if not prod(spec.shape):
        return torch.empty(spec.shape, dtype=_dtype(spec)), memoryview(bytearray())
    raw = torch.empty(spec.size_bytes, dtype=torch.uint8)
    return raw.view(_dtype(spec)).reshape(spec.shape), lent(raw).data


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValue(
            f"tensor {spec.key!r}: this torch has no dtype {spec.dtype!r}: use the one that saved it"
        )
    return dtype
