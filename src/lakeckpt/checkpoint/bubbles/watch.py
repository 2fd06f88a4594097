"""This module finds the idle windows of a training script: `Bubbles` watches the objects for which the script waits.

`Bubbles.watch` takes a pipeline schedule, a model under DDP, any model on a GPU, or a loader. A script reports other
waits with ``with bubbles.idle("site"):``. The training thread makes all calls. The module starts no threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lakeckpt.checkpoint.bubbles.device import CudaMarks, DeviceGate
from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.errors import ConfigError

__all__ = ["Bubbles", "watch_data"]


class Bubbles:
    """The idle windows of this rank, and the gate that admits captures in them.

    ``device`` is the device on which the rank computes; default: the CPU. A CUDA device has a timeline of its own, and
    its link to the host is free during the forward pass of a watched model.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        is_cuda = self._device.type == "cuda"
        self.gate: BubbleGate = DeviceGate(CudaMarks(self._device)) if is_cuda else BubbleGate()
        """The gate that captures ask."""

    def watch(self, what: Any, **how: Any) -> Any:
        """Watch ``what`` from now on, and return the object to use in its place.

        A schedule of ``torch.distributed.pipelining`` and a ``DistributedDataParallel`` (``hook`` and ``state``: its
        communication hook, if it has one) are returned as they are. For an iterable, the returned object iterates over
        the same items and passes all other attributes through. A module on a GPU, also under ``fully_shard``, is
        watched for the link that its forward pass leaves free.

        `ConfigError` if no part of it can be watched.
        """
        if isinstance(what, torch.nn.Module):
            self._watch_module(what, how)
        elif _is_schedule(what):
            from lakeckpt.checkpoint.bubbles.pipeline import watch_schedule

            watch_schedule(self.gate, what)
        elif hasattr(what, "__iter__"):
            return _Watched(self.gate, what)
        else:
            raise ConfigError(
                f"{type(what).__name__} cannot be watched: give a pipeline schedule, a model under DDP, a GPU model or "
                "a loader, or report its waits with idle()"
            )
        return what

    def idle(self, site: str) -> AbstractContextManager[None]:
        """Report that the rank waits while the block runs; ``site`` names what it waits for."""
        return self.gate.idle(site)

    def _watch_module(self, module: torch.nn.Module, how: dict[str, Any]) -> None:
        from lakeckpt.checkpoint.bubbles.collectives import watch_ddp, watch_forward

        is_cuda = self._device.type == "cuda"
        if isinstance(module, DistributedDataParallel):
            watch_ddp(self.gate, module, **how)
        elif not is_cuda:
            raise ConfigError(
                f"{type(module).__name__} is not under DDP: on the CPU no other module is watched. "
                "Report its waits with idle()"
            )
        if is_cuda:
            watch_forward(self.gate, module)


def _is_schedule(what: Any) -> bool:
    """Return whether ``what`` is a pipeline schedule. This does not import torch's module of schedules, which takes
    seconds: a schedule exists only if the script has imported the module."""
    if "torch.distributed.pipelining.schedules" not in sys.modules:
        return False
    from lakeckpt.checkpoint.bubbles.pipeline import is_schedule

    return is_schedule(what)


def watch_data(gate: BubbleGate, batches: Any) -> Iterator[Any]:
    """Yield the items of ``batches``; each wait for the next item is a bubble at the site ``data``."""
    iterator = iter(batches)
    while True:
        with gate.idle("data"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


class _Watched:
    """An iterable whose iterators report their waits; everything else is passed through."""

    def __init__(self, gate: BubbleGate, batches: Any) -> None:
        self._gate, self._batches = gate, batches

    def __iter__(self) -> Iterator[Any]:
        return watch_data(self._gate, self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
