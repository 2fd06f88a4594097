"""This module makes faults in a job on purpose: a rank that dies or stops at a moment of a step, a node that is lost.

`fail_at` arms one fault in this process; a training script calls it before it trains, on every rank. The fault happens
on one rank, in one start of the job by its launcher, when the loop comes to the moment::

    restore      restore() has been called
    batch        the loop has got a micro-batch for the step
    step         the step's update is done, and manager.step() has been called: the cut is not taken yet
    after step   manager.step() returns

`lose_node` is called from outside: it ends all processes below a launcher at once, and removes what their node kept in
memory. Faults of stores are made by `FaultyStorage`. The module starts no threads. Nothing of it is active before
`fail_at` is called.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.data.position.deliveries import Deliveries
from lakeckpt.errors import ConfigError

__all__ = ["Moment", "fail_at", "lose_node"]

Moment = Literal["restore", "batch", "step", "after step"]


class _Armed:
    """The faults of this process, and its manager. Methods of lakeckpt are replaced when the first fault is armed."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, int, Moment, Callable[[], object]]] = []
        self.manager: CheckpointManager | None = None
        self._is_ready = False

    def arm(self, fault: tuple[int, int, Moment, Callable[[], object]]) -> None:
        self.faults.append(fault)
        if self._is_ready:
            return
        self._is_ready = True
        restore, step, delivered = CheckpointManager.restore, CheckpointManager.step, Deliveries.delivered

        def restoring(manager: CheckpointManager, *args: Any, **named: Any) -> int:
            self.manager = manager
            self.meet("restore", None)
            return restore(manager, *args, **named)

        def stepping(manager: CheckpointManager, *args: Any, **named: Any) -> None:
            self.manager = manager
            self.meet("step", manager.steps_done + 1)
            step(manager, *args, **named)
            self.meet("after step", manager.steps_done)

        def delivering(deliveries: Deliveries, *args: Any, **named: Any) -> None:
            delivered(deliveries, *args, **named)
            if deliveries.is_saved and self.manager is not None:
                self.meet("batch", self.manager.steps_done + 1)

        for owner, name, method in (
            (CheckpointManager, "restore", restoring),
            (CheckpointManager, "step", stepping),
            (Deliveries, "delivered", delivering),
        ):
            setattr(owner, name, method)

    def meet(self, moment: Moment, step: int | None) -> None:
        """The loop has come to a moment of a step."""
        assert self.manager is not None
        for fault in list(self.faults):
            rank, at, when, happen = fault
            if when == moment and rank == self.manager._exchange.rank and (step is None or step == at):
                self.faults.remove(fault)
                happen()


_armed = _Armed()


def fail_at(
    rank: int,
    step: int,
    moment: Moment = "after step",
    *,
    by: str | BaseException | Callable[[], object] = "SIGKILL",
    attempt: int | None = 0,
) -> None:
    """Let ``rank`` fail at a ``moment`` of optimizer step ``step``, once in this process.

    Args:
        rank: the rank in the manager's group.
        step: the optimizer step, counted from 1 over all attempts; not looked at for ``"restore"``.
        moment: where in the step: ``"restore"``, ``"batch"``, ``"step"`` or ``"after step"``.
        by: the name of a signal that the process sends itself (``"SIGSTOP"`` stops it, and only ``"SIGCONT"`` or the
            launcher ends that), an exception that is raised, or a function that is called.
        attempt: the start of the job in which it happens, as torchrun counts restarts; None: in every start.

    Raises `ConfigError` for a moment or signal that does not exist.
    """
    if moment not in get_args(Moment):
        raise ConfigError(f"moment is one of {', '.join(map(repr, get_args(Moment)))}, got {moment!r}")
    happen = _happening(by)
    if attempt is None or attempt == int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        _armed.arm((rank, step, moment, happen))


def _happening(by: str | BaseException | Callable[[], object]) -> Callable[[], object]:
    if isinstance(by, str):
        if by not in signal.Signals.__members__:
            raise ConfigError(f"by names a signal, such as 'SIGKILL', got {by!r}")
        number = signal.Signals[by]
        return lambda: os.kill(os.getpid(), number)
    if isinstance(by, BaseException):

        def fail() -> None:
            raise by

        return fail
    if not callable(by):
        raise ConfigError(f"by is a signal's name, an exception or a function, got {by!r}")
    return by


def lose_node(launcher: int, *, arenas: str | os.PathLike[str] | None = None) -> int:
    """End the process ``launcher`` and all below it at once, as a node does that loses its power.

    ``arenas``: the folder with the node's arenas, which is removed, too; None: memory outlives the processes. Returns
    how many processes there were. They are stopped first, so that none sees another one end.
    """
    found: list[int] = []
    while new := [pid for pid in _tree(launcher) if pid not in found]:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found += new
    for pid in reversed(found):
        _send(pid, signal.SIGKILL)
    if arenas is not None:
        shutil.rmtree(arenas, ignore_errors=True)
    return len(found)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tree(root: int) -> list[int]:
    """Return a process and all below it, parents first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found
