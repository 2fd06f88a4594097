"""Where is a GPU in its work?  Marks on a CUDA stream, for `lakeckpt.checkpoint.bubbles.device`."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CudaMarks"]


class CudaMarks:
    """Events with times on the stream that is current when they are recorded; ``device`` is the GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Record an event; None while a graph is captured, of which an event would become a part."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, earlier: Any, later: Any) -> float | None:
        """With half a microsecond's resolution; None while the GPU has not passed both."""
        with torch.cuda.device(self._device):  # else a thread that has none begins to use the first one
            if not (earlier.query() and later.query()):
                return None
            return float(earlier.elapsed_time(later)) / 1000

    def wait(self, mark: Any) -> None:
        """Block this thread until the GPU has passed ``mark``."""
        with torch.cuda.device(self._device):
            mark.synchronize()
