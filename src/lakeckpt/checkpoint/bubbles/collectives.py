"""This module reports to a gate when a rank waits for other ranks under DDP and FSDP2, by torch's public hooks.

DDP sums gradients bucket after bucket during the backward pass, and the rank does not wait. After the last bucket
nothing remains to compute, so the rank waits for the sums that are under way, mostly for slower ranks. A DDP
communication hook sees each bucket. Our hook wraps the hook that does the work (by default torch's own all-reduce).

For FSDP2, ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` replace the collectives of a module under
``fully_shard`` by ours, which call the same functions of ``torch.distributed``. On the CPU such a call returns when the
other ranks have called it, too. On a GPU it returns when the work is queued; there `watch_forward` reports the free
link instead. The module starts no threads.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its own types.

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.errors import ConfigError

__all__ = ["watch_ddp", "watch_forward", "watch_fsdp"]

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, Any], Future]


def watch_ddp(gate: BubbleGate, ddp: Any, *, hook: Hook | None = None, state: Any = None) -> None:
    """Register a communication hook on ``ddp`` (a ``DistributedDataParallel``) that reports its waits to ``gate``.

    A model has only one communication hook: pass the script's own ``hook`` and its ``state`` here instead of to
    ``register_comm_hook``. Without a hook, gradients are averaged over the model's process group. Raises the errors of
    ``register_comm_hook``.
    """
    inner: Hook = allreduce_hook if hook is None else hook
    ddp.register_comm_hook(None, _BucketHook(gate, inner, ddp.process_group if hook is None else state))


class _BucketHook:
    """The communication hook. The training thread or autograd's thread calls it; sums end in threads of the backend."""

    def __init__(self, gate: BubbleGate, inner: Hook, state: Any) -> None:
        self._gate, self._inner, self._state = gate, inner, state
        self._lock = threading.Lock()
        self._pending = 0
        self._waits = False
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)  # DDP logs it, and knows some hooks by name
        self.__qualname__ = getattr(inner, "__qualname__", self.__name__)

    def __call__(self, _: Any, bucket: GradBucket) -> Future:
        is_last = bucket.is_last()
        future = self._inner(self._state, bucket)
        with self._lock:
            self._pending += 1
            self._waits = is_last
            if is_last:
                self._gate.begin("ddp")
        # DDP waits for this second future. A callback on the first one may run after the next iteration has begun.
        return future.then(self._done)

    def _done(self, future: Future) -> torch.Tensor:
        with self._lock:
            self._pending -= 1
            if self._waits and self._pending == 0:
                self._waits = False
                self._gate.end()
        return future.value()


def watch_fsdp(gate: BubbleGate, model: torch.nn.Module) -> None:
    """Report the collectives of ``model`` and all modules below it to ``gate``.

    This replaces collectives that were set on the modules before. `ConfigError` if no part of the model is under
    ``fully_shard``, or this version of torch cannot replace its collectives.
    """
    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if not modules:
        raise ConfigError(f"{type(model).__name__} has no module under fully_shard: call it before it is watched")
    try:
        for module in modules:
            module.set_custom_all_gather(cast(Any, _AllGather(gate)))
            module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(gate)))
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"torch {torch.__version__} cannot replace the collectives of this model: {error}") from None


class _Collective:
    """The base of both collectives, with torch's default allocation."""

    def __init__(self, gate: BubbleGate) -> None:
        self._gate = gate

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the tensor that the collective fills."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._gate.idle("fsdp gather"):
            return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self._gate.idle("fsdp scatter"):
            return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def watch_forward(gate: BubbleGate, model: torch.nn.Module) -> None:
    """Report to ``gate`` that the link to the host is free while ``model`` goes forward.

    This is for models on a GPU, where copies and computation use different engines. On a CPU a forward pass leaves
    nothing free.
    """
    model.register_forward_pre_hook(lambda module, args: gate.begin("forward", "free"))
    model.register_forward_hook(lambda module, args, output: gate.end("free"), always_call=True)
