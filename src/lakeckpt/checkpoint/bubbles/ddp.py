"""When does a rank under DDP wait for the others?  From its last bucket of gradients until the sums of all are there.

DDP sums bucket after bucket while the backward pass goes on, which is no wait. When the last bucket is on its way there
is nothing left to compute: the rank waits for whatever is still under way, above all for ranks that are slower. DDP
lets a hook see each bucket, and this is one, around the hook that does the work (by default torch's own all-reduce).

A model has one communication hook: where there is one already, give it as ``hook`` instead of registering it.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its own types.

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lakeckpt.checkpoint.bubbles.gate import BubbleGate

__all__ = ["watch_ddp"]

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, Any], Future]


def watch_ddp(gate: BubbleGate, ddp: Any, *, hook: Hook | None = None, state: Any = None, site: str = "ddp") -> None:
    """Register a hook on ``ddp`` (a ``DistributedDataParallel``) that tells ``gate`` when its rank waits.

    ``hook`` and ``state`` are what ``register_comm_hook`` would have been given; None: an all-reduce over the model's
    process group, as DDP does without a hook. Raises what ``register_comm_hook`` raises.
    """
    inner: Hook = allreduce_hook if hook is None else hook
    inner_state = ddp.process_group if hook is None else state
    ddp.register_comm_hook(None, _Watched(gate, inner, inner_state, site))


class _Watched:
    """The hook. Called in the training thread (or autograd's); sums are finished in threads of the backend."""

    def __init__(self, gate: BubbleGate, inner: Hook, state: Any, site: str) -> None:
        self._gate, self._inner, self._state, self._site = gate, inner, state, site
        self._lock = threading.Lock()
        self._pending = 0
        self._waits = False
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)  # DDP knows some hooks' needs by name,
        self.__qualname__ = getattr(inner, "__qualname__", self.__name__)  # and puts it into its log

    def __call__(self, _: Any, bucket: GradBucket) -> Future:
        is_last = bucket.is_last()
        future = self._inner(self._state, bucket)
        with self._lock:
            self._pending += 1
            self._waits = is_last
            if is_last:
                self._gate.begin(self._site)
        # DDP waits for what comes after the gate knows: a mere callback may come when the next iteration has begun.
        return future.then(self._done)

    def _done(self, future: Future) -> torch.Tensor:
        with self._lock:
            self._pending -= 1
            if self._waits and self._pending == 0:
                self._waits = False
                self._gate.end()
        return future.value()
