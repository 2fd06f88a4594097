"""This module reads batches ahead of a training loop, and moves them to its device, without counting them too early.

`prefetch` wraps a `LakeLoader`. It holds up to ``depth`` batches back, on the thread that iterates, and the loader
counts a batch as delivered when the loop gets it. So the loader's state, its last receipt and a checkpoint's cut are
those of the batches that the loop has, and each batch keeps its receipt. It starts no threads: the loader reads ahead
already, and copies to a CUDA device run on a stream of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lakeckpt.core.receipts import Receipt
from lakeckpt.data.base.batch import Received, moved
from lakeckpt.data.base.options import positive
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.errors import ConfigError
from lakeckpt.reading.columns.ragged import Ragged

__all__ = ["Prefetched", "prefetch"]


def prefetch(loader: LakeLoader, *, depth: int = 2, device: torch.device | str | int | None = None) -> Prefetched:
    """Return what iterates ``loader`` and holds the next batches ready, on ``device``.

    Iterate it in place of the loader. In the state of the `CheckpointManager` both mean the same, and all other members
    are the loader's, too. Each batch keeps its ``receipt``, and what is held back counts as not delivered: nothing is
    lost at a restart.

    Args:
        loader: the `LakeLoader` to iterate.
        depth: how many batches to hold back, at least 1. They take so much more memory, on the device if one is given.
        device: where tensors are moved, as by ``tensor.to(device, non_blocking=True)``; on a CUDA device beside the
            work of the loop. Give the loader ``pin_memory=True`` then. None: batches stay where they are.

    Raises `ConfigError` if ``loader`` is no `LakeLoader`, or ``depth`` no positive integer.
    """
    if not isinstance(loader, LakeLoader):
        raise ConfigError(f"prefetch takes a lakeckpt.LakeLoader, got {type(loader).__name__}")
    return Prefetched(loader, depth=positive("depth", depth), device=None if device is None else torch.device(device))


class Prefetched:
    """Iterates a loader with batches held ready, and has all members of the loader; made by `prefetch`."""

    def __init__(self, loader: LakeLoader, *, depth: int, device: torch.device | None) -> None:
        self._loader = loader
        self._depth = depth
        self._device = device

    def __getattr__(self, name: str) -> Any:
        """Return a member of the loader, such as ``epoch`` or ``state_dict``."""
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Return the length of the loader."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate what is left of the loader's epoch, as ``iter(loader)`` does."""
        return self._loader._iterate(self._stage)

    def _stage(self, found: Iterator[Received]) -> Iterator[Received]:
        move = _mover(self._device)
        held: deque[tuple[Receipt, Callable[[], Any]]] = deque()
        failure: Exception | None = None
        is_over = False
        while True:
            while not is_over and len(held) <= self._depth:
                try:
                    receipt, batch = next(found)
                    held.append((receipt, move(batch)))
                except StopIteration:
                    is_over = True
                except Exception as error:  # it comes to the loop behind the batches before it
                    is_over, failure = True, error
            if not held:
                break
            receipt, ready = held.popleft()
            yield receipt, ready()
        if failure is not None:
            raise failure


def _mover(device: torch.device | None) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that begins to move a batch, and returns a function that waits for the moved batch."""
    if device is None:
        return lambda batch: lambda: batch
    if device.type == "cuda":
        return _CudaMover(device)

    def move(batch: Any) -> Callable[[], Any]:
        there = moved(batch, (device,), {"non_blocking": True})
        return lambda: there

    return move


class _CudaMover:
    """Copies batches on a stream of its own; the loop's stream waits for a copy when the loop gets the batch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._sources: deque[tuple[Any, Any]] = deque()
        """Batches in host memory, with what tells that they were copied: their memory may be used again then."""

    def __call__(self, batch: Any) -> Callable[[], Any]:
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        with torch.cuda.stream(self._stream):
            there = moved(batch, (self._device,), {"non_blocking": True})
            copied = self._stream.record_event()
        self._sources.append((copied, batch))

        def ready() -> Any:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            _each_tensor(there, lambda tensor: tensor.record_stream(stream))
            return there

        return ready


def _each_tensor(value: Any, do: Callable[[torch.Tensor], object]) -> None:
    if isinstance(value, torch.Tensor):
        do(value)
    elif isinstance(value, dict):
        for one in value.values():
            _each_tensor(one, do)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _each_tensor(one, do)
    elif isinstance(value, Ragged):
        for array in (value.values, value.offsets, *value.masks.values()):
            _each_tensor(array, do)
