"""How do torch's tensors become bytes, and bytes tensors, without a change of a single bit?

What cannot be stored as it is (a tensor without data, sharded, sparse, quantized or nested) is refused by its path.
Tensors that are one memory with one shape (tied weights) are recognised by `tied_key`.
"""

from __future__ import annotations

from math import prod

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.errors import UnsupportedValue

__all__ = ["as_bytes", "empty_for", "fill", "holds", "host_bytes", "on_host", "overlaps_itself", "spec_of", "tied_key"]


def spec_of(key: str, tensor: torch.Tensor) -> TensorSpec:
    """The name, dtype and shape of a tensor that can be stored. Raises `UnsupportedValue` naming ``key``."""
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
    return TensorSpec(key=key, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def tied_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What is equal for two tensors that are the same memory seen the same way; None for empty ones."""
    if not tensor.numel():
        return None
    seen = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), str(tensor.device), *seen)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are (or may be) one place in memory, as where it is an expanded one."""
    reach = 1  # the places that the dimensions before take
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def holds(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether memory laid out as that of ``tensor``, which overlaps itself, can hold ``values``, of its shape and
    dtype, contiguous in host memory."""
    trial = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    fill(trial, values)
    return torch.equal(as_bytes(trial.contiguous()), as_bytes(values.contiguous()))


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``tensor``, once to each place of an expanded one."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if not stride and size > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.no_grad():
        tensor.copy_(values)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in host memory with the same values; the same memory where it is that already."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied, to be read or written."""
    return as_bytes(tensor).numpy().data if tensor.numel() else memoryview(bytearray())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, not copied: one dimension of uint8.

    Where there is one element only, a contiguous tensor may have any strides (``table[:1, 0]``), which ``view`` minds.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def empty_for(spec: TensorSpec) -> tuple[torch.Tensor, memoryview]:
    """A new tensor in host memory, and its bytes to be filled."""
    if not prod(spec.shape):
        return torch.empty(spec.shape, dtype=_dtype(spec)), memoryview(bytearray())
    raw = torch.empty(spec.size_bytes, dtype=torch.uint8)
    return raw.view(_dtype(spec)).reshape(spec.shape), raw.numpy().data


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValue(
            f"tensor {spec.key!r}: this torch has no dtype {spec.dtype!r}: use the one that saved it"
        )
    return dtype
