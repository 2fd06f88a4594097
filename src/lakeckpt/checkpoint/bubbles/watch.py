"""What does a training script say so that captures find its bubbles?  `Bubbles`: what is to be watched, in one place.

A pipeline schedule, a model under DDP or FSDP2, a loader: each is watched by what it is. Whatever else a rank waits for
is told by ``with bubbles.idle("what"):``. All of it belongs to the thread that trains.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lakeckpt.checkpoint.bubbles.cuda_marks import CudaMarks
from lakeckpt.checkpoint.bubbles.data import watch_data
from lakeckpt.checkpoint.bubbles.ddp import watch_ddp
from lakeckpt.checkpoint.bubbles.device import DeviceGate
from lakeckpt.checkpoint.bubbles.fsdp import watch_forward, watch_fsdp
from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.bubbles.keeper import ProfileKeeper
from lakeckpt.checkpoint.bubbles.pipeline import watch_schedule
from lakeckpt.checkpoint.bubbles.profile import BubbleProfile, save_profile
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage import Storage

__all__ = ["Bubbles"]


class Bubbles:
    """The idle windows of this rank, and the gate that lets captures through in them.

    ``device``: where the rank computes; a CUDA device has its own line of time, and its link is free while a watched
    model goes forward. Default: the CPU.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        is_cuda = self._device.type == "cuda"
        self.gate: BubbleGate = DeviceGate(CudaMarks(self._device)) if is_cuda else BubbleGate()
        """What captures ask."""

    def watch(self, what: Any, **how: Any) -> Any:
        """Watch ``what`` from now on, and return what to use in its place.

        A schedule of ``torch.distributed.pipelining``, a ``DistributedDataParallel`` (``hook`` and ``state``: its
        communication hook, if it is to have one) and a module with parts under ``fully_shard`` are returned as they
        are. Of anything that is iterated over, something is returned that iterates over the same, and is it in all
        else. Any other module on a GPU is watched for the link that its forward pass leaves free.

        `ConfigError` where nothing of it can be watched.
        """
        if isinstance(what, DistributedDataParallel):
            watch_ddp(self.gate, what, **how)
        elif isinstance(what, torch.nn.Module):
            self._watch_module(what)
        elif hasattr(what, "_stages") or hasattr(what, "_stage"):
            watch_schedule(self.gate, what)
        elif hasattr(what, "__iter__"):
            return _Watched(self.gate, what)
        else:
            raise ConfigError(
                f"{type(what).__name__} cannot be watched: give a pipeline schedule, a model under DDP or fully_shard, "
                "or a loader, or say where it waits with idle()"
            )
        if isinstance(what, DistributedDataParallel) and self._device.type == "cuda":
            watch_forward(self.gate, what)
        return what

    def idle(self, site: str) -> AbstractContextManager[None]:
        """The rank waits while the block runs; ``site`` names for what."""
        return self.gate.idle(site)

    def save(self, storage: Storage, *, attempt: int, rank: int, world_size: int) -> None:
        """Write the last iterations beside the checkpoints of a run, for ``lakeckpt report``."""
        epoch_s = time.time() - self.gate.clock()
        records = self.gate.records()
        profile = BubbleProfile(attempt=attempt, rank=rank, world_size=world_size, epoch_s=epoch_s, records=records)
        save_profile(storage, profile)

    def kept(self, storage: Storage, *, attempt: int, rank: int, world_size: int) -> ProfileKeeper:
        """Do so once a minute from now on, until it is told to end."""
        save = functools.partial(self.save, storage, attempt=attempt, rank=rank, world_size=world_size)
        keeper = ProfileKeeper(save, f"rank {rank}")
        keeper.begin()
        return keeper

    def _watch_module(self, module: torch.nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        sharded = any(isinstance(one, FSDPModule) for one in module.modules())
        if sharded:
            watch_fsdp(self.gate, module)
        if self._device.type == "cuda":
            watch_forward(self.gate, module)
        elif not sharded:
            raise ConfigError(
                f"{type(module).__name__} is neither under DDP nor under fully_shard: on the CPU it waits for nothing"
            )


class _Watched:
    """What is iterated over, with the waits of its iterators told."""

    def __init__(self, gate: BubbleGate, batches: Any) -> None:
        self._gate, self._batches = gate, batches

    def __iter__(self) -> Iterator[Any]:
        return watch_data(self._gate, self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
