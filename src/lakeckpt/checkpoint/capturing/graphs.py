"""Is a CUDA graph about to be captured, or being captured?  Then no copy may be under way, and none may begin.

While a graph is captured, CUDA forbids every thread of the process to wait for events, and what is queued becomes part
of the graph: a copy beside training would spoil the graph, or the copy. torch captures by ``CUDAGraph.capture_begin``,
whoever calls it (``torch.cuda.graph``, ``make_graphed_callables``, compiled code). `before_graphs` has something done
ahead of that: it wraps the method, while anybody wants it. Replays are another matter: see ``hooks``.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lakeckpt.checkpoint.report import CaptureWarning

__all__ = ["before_graphs", "refuses_within_a_graph"]

_lock = threading.Lock()
_calls: list[Callable[[], None]] = []
_unwrapped: Any = None


def before_graphs(call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called before a graph is captured, on the thread that captures it; returns what ends that."""
    with _lock:
        if not _calls:
            _wrap()
        _calls.append(call)

    def undo() -> None:
        with _lock:
            if call in _calls:
                _calls.remove(call)
                if not _calls:
                    _unwrap()

    return undo


def refuses_within_a_graph(step: int) -> bool:
    """Whether what this thread queues now becomes part of a graph: no cut of ``step`` can be made, and a warning says
    so."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    warnings.warn(
        f"the cut of step {step} is left out: a CUDA graph is being captured, and what is copied would become a part "
        "of it. Make cuts outside of graphs",
        CaptureWarning,
        stacklevel=4,
    )
    return True


def _wrap() -> None:
    global _unwrapped
    inner = _unwrapped = torch.cuda.CUDAGraph.capture_begin

    @functools.wraps(inner)
    def capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        for one in list(_calls):
            one()
        inner(graph, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign, assignment]


def _unwrap() -> None:
    """As it was; where somebody else has wrapped it since, ours stays below, and calls nobody."""
    if getattr(torch.cuda.CUDAGraph.capture_begin, "__wrapped__", None) is _unwrapped:
        torch.cuda.CUDAGraph.capture_begin = _unwrapped  # type: ignore[method-assign, assignment]
