"""This module announces optimizer steps, so that a capture ends before the state changes.

The first `StepFence` registers torch's global pre-step hook, which calls ``fence`` of every `StepFence` before each
``step()`` of any optimizer of the process. The compiler does not compile the hook: a compiled step leaves its graph for
each call of the hook. The hook stays registered, because torch's table of hooks must not change while another thread
steps. A step that is captured into a CUDA graph is refused, because replays of the graph call no hook. The thread that
steps runs the hook. The module copies nothing and starts no threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lakeckpt.checkpoint.capture.state_watch import address_of
from lakeckpt.errors import UnannouncedChange

__all__ = ["StepFence", "captures_a_graph", "owners", "versions_of"]


_fences: tuple[StepFence, ...] = ()
_registered = False
_lock = threading.Lock()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in _fences:
        one.before_step(optimizer)


class StepFence:
    """The fence of one capture engine before each optimizer step, from construction to `remove`.

    Both methods are held weakly: an engine that nobody closes is collected, and its fence then does nothing.

    Args:
        fence: a method of the engine; returns when no live tensor will be read any more.
        captured: a method of the engine; returns key → tensor for the tensors that captures copy beside training.
    """

    __slots__ = ("_captured", "_fence")

    def __init__(self, fence: Callable[[], None], captured: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        global _fences, _registered
        self._fence, self._captured = weakref.WeakMethod(fence), weakref.WeakMethod(captured)
        with _lock:
            if not _registered:
                # dynamo would trace the hook once and never call it again.
                register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
            _registered, _fences = True, (*_fences, self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Fence, or refuse a step that is captured into a CUDA graph."""
        if captures_a_graph():
            self._refuse(optimizer)
        elif (fence := self._fence()) is not None:
            fence()

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UnannouncedChange` if the step changes a tensor that captures copy: a graph cannot wait for a copy."""
        places = {address_of(one) for group in optimizer.param_groups for one in group["params"]}
        captured = self._captured()
        for key, tensor in ({} if captured is None else captured()).items():
            if address_of(tensor) in places:
                raise UnannouncedChange(
                    f"a step of {type(optimizer).__name__}, which changes {key!r}, is captured into a CUDA graph: "
                    "replays call no hook, so that captures would mix two steps. Leave optimizer.step() out of the "
                    "graph, or save without capture_every"
                )

    def remove(self) -> None:
        """Remove this fence. Optimizer steps do not call it any more."""
        global _fences
        with _lock:
            _fences = tuple(one for one in _fences if one is not self)


def owners() -> list[object]:
    """Return the engines whose fence is not removed."""
    return [getattr(fence, "__self__", None) for one in _fences if (fence := one._fence()) is not None]


def captures_a_graph() -> bool:
    """Return whether the work that this thread queues now becomes part of a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often torch has counted a change in place of each tensor; 0 for tensors that it does not count."""
    every = list(tensors)
    try:
        return [one._version for one in every]
    except RuntimeError:  # made in inference mode
        return [0 if one.is_inference() else one._version for one in every]
