"""This module reports to a gate when a rank of a pipeline waits for its transfers.

All schedules of ``torch.distributed.pipelining`` (GPipe, 1F1B, looped, interleaved, zero-bubble, V, DualPipe) wait for
their transfers in one function of torch's module. torch has no public hook there. So `watch_schedule` replaces this
function once in a process. The replacement reports the waits of threads that step a watched schedule, and does nothing
else. It does not change the order in which schedules work.

A window is one wait. The n-th wait of an iteration is the same wait in every iteration, so its number names it. The
time between two waits is not a window: the rank computes, or posts transfers for which its neighbours wait. The module
starts no threads.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.errors import ConfigError

__all__ = ["is_schedule", "watch_schedule"]

_WAIT = "_wait_batch_p2p"
_MARK = "_lakeckpt_reports"
_stepping = threading.local()
"""``gate`` is the gate of the schedule that this thread steps."""


def is_schedule(what: Any) -> bool:
    """Return whether ``what`` is a schedule of ``torch.distributed.pipelining``."""
    return isinstance(what, (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti))


def watch_schedule(gate: BubbleGate, schedule: Any) -> None:
    """Report the waits of ``schedule`` to ``gate`` from now on, as bubbles at the site ``pipeline``.

    `ConfigError` if it is no schedule of ``torch.distributed.pipelining``, or this version of torch waits elsewhere.
    """
    if not is_schedule(schedule):
        raise ConfigError(
            f"a schedule of torch.distributed.pipelining was expected, such as Schedule1F1B, got {schedule!r}"
        )
    _replace_wait()
    step = schedule.step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        outer, _stepping.gate = getattr(_stepping, "gate", None), gate
        try:
            return step(*args, **kwargs)
        finally:
            _stepping.gate = outer

    schedule.step = watched


def _replace_wait() -> None:
    wait = getattr(schedules, _WAIT, None)
    if not callable(wait):
        raise ConfigError(f"torch {torch.__version__} has no {_WAIT}: say where the pipeline waits with idle()")
    if hasattr(wait, _MARK):
        return

    @functools.wraps(wait)
    def reported(work: Any, *args: Any, **kwargs: Any) -> Any:
        gate: BubbleGate | None = getattr(_stepping, "gate", None)
        if gate is None or not work:
            return wait(work, *args, **kwargs)
        with gate.idle("pipeline"):
            return wait(work, *args, **kwargs)

    setattr(reported, _MARK, True)
    setattr(schedules, _WAIT, reported)
