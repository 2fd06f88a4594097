"""This module reports to a gate when a rank waits for other ranks under DDP, and when the forward pass frees the link.

DDP sums gradients bucket after bucket during the backward pass, and the rank does not wait. After the last bucket
nothing remains to compute, so the rank waits for the sums that are under way, mostly for slower ranks. A DDP
communication hook sees each bucket. Our hook wraps the hook that does the work (by default torch's own all-reduce).

The collectives of FSDP2 are not reported: on a GPU they are queued on streams of their own while the rank computes.
`watch_forward` reports the free link there. All hooks are public hooks of torch. The module starts no threads.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its own types.

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lakeckpt.checkpoint.bubbles.gate import BubbleGate

__all__ = ["watch_ddp", "watch_forward"]

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


def watch_forward(gate: BubbleGate, model: torch.nn.Module) -> None:
    """Report to ``gate`` that the link to the host is free while ``model`` goes forward.

    This is for models on a GPU, where copies and computation use different engines. On a CPU a forward pass leaves
    nothing free.
    """
    model.register_forward_pre_hook(lambda module, args: gate.begin("forward", "free"))
    model.register_forward_hook(lambda module, args, output: gate.end("free"), always_call=True)
