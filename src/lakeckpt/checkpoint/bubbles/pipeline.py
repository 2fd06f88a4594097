"""When does a rank of a pipeline wait?  While a ``torch.distributed.pipelining`` schedule waits for its transfers.

The stages' calls (forward, backward, backward of weights) are wrapped on the very objects of one schedule, and the wait
for transfers (``transfers``). A window is one wait, and named by the call before it, as schedules write their actions
(``after 1F2``), so that it is the same one in the next iteration. How long it will be is predicted from the schedule's
own table of actions, by what the calls take, until it was measured.

What lies between a call and its wait is no window: there the rank posts its transfers, for which the next one waits.
Only where nobody tells of waits (another torch, or a schedule that waits in its own way), all that lies between two
calls is taken for one.

All schedules of torch are known by what they share: GPipe, 1F1B, looped, interleaved, zero-bubble, V and DualPipe. The
order in which they do things is not touched.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.bubbles.transfers import can_be_told, told_of_waits
from lakeckpt.core.pipeline_slots import Computation, pipeline_slots
from lakeckpt.errors import ConfigError

__all__ = ["PipelineWatch", "tables_of", "watch_schedule"]

_KEEP = 32
_BEGIN = "begin"
_FORWARD = "forward_one_chunk"
_BACKWARD = "backward_one_chunk"
_WEIGHTS = "backward_weight_one_chunk"
_OTHERS = ("perform_reduce_grad", "scale_grads")
_KINDS = ("F", "B", "I", "W")


def watch_schedule(gate: BubbleGate, schedule: Any) -> PipelineWatch:
    """Tell ``gate`` of the windows of ``schedule``, from now until `PipelineWatch.close`.

    `ConfigError` where it is no schedule of ``torch.distributed.pipelining``.
    """
    return PipelineWatch(gate, schedule)


class PipelineWatch:
    """The wrapped calls of one schedule on this rank. Everything happens in the thread that steps the schedule."""

    def __init__(self, gate: BubbleGate, schedule: Any) -> None:
        stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        if not callable(getattr(schedule, "step", None)) or any(not hasattr(one, _FORWARD) for one in stages):
            raise ConfigError(
                f"a schedule of torch.distributed.pipelining was expected, such as Schedule1F1B, got {schedule!r}"
            )
        self._gate = gate
        self._schedule = schedule
        self._rank = int(stages[0].group_rank)
        self._took: dict[tuple[int, str], deque[float]] = {}
        self._stepping = False
        self._predicted = False
        self._by_waits = can_be_told()
        self._waits = 0  # that were told of in this step
        self._site = _site(None)
        self._undo: list[Callable[[], None]] = []
        self._wrap(schedule, "step", self._step)
        self._wrap(schedule, "_compute_loss", functools.partial(self._busy, lambda args, kwargs: "loss", None))
        for stage in stages:
            self._wrap_stage(stage)

    def close(self) -> None:
        """Put everything back as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def predicted(self) -> dict[str, float]:
        """How long the windows of this rank should be, by the table of actions and what the calls took: name →
        seconds. Empty while no call was timed, or where the schedule has no table."""
        tables = tables_of(self._schedule)
        if self._rank not in tables or not self._took:
            return {}
        try:
            slots = pipeline_slots(tables, self._seconds)[self._rank]
        except ValueError:
            return {}  # a table whose order torch changes when it runs it: what is measured will have to do
        return {_site(None if slot.after is None else str(slot.after)): slot.length_s for slot in slots}

    # --- the wrapped calls

    def _step(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._stepping = True
        if not self._predicted and (found := self.predicted()):
            self._predicted = True
            for site, length_s in found.items():
                self._gate.predict(f"{site} 0", length_s)
        self._site = _site(None)
        try:
            if self._by_waits:
                self._waits = 0
                with told_of_waits(self._wait):
                    found = call(*args, **kwargs)
                self._by_waits = self._waits > 0
                return found
            self._gate.begin(self._site)
            return call(*args, **kwargs)
        finally:
            self._stepping = False
            self._gate.end()

    def _wait(self, wait: Callable[[], Any]) -> Any:
        self._waits += 1
        self._gate.begin(self._site)
        try:
            return wait()
        finally:
            self._gate.end()

    def _busy(
        self,
        name: Callable[[Sequence[Any], Mapping[str, Any]], str],
        stage: int | None,
        call: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A call that computes: what is waited for next is named by it."""
        if not self._stepping:
            return call(*args, **kwargs)  # torch tries shapes out on its stages before it runs them
        if not self._by_waits:
            self._gate.end()
        action = name(args, kwargs)
        begin_s = self._gate.clock()
        try:
            return call(*args, **kwargs)
        finally:
            if stage is not None:
                kind = action.lstrip("0123456789")[:1]
                self._took.setdefault((stage, kind), deque(maxlen=_KEEP)).append(self._gate.clock() - begin_s)
            if self._by_waits:
                self._site = _site(action) if stage is not None else self._site
            else:
                self._gate.begin(_site(action))

    def _wrap_stage(self, stage: Any) -> None:
        index = int(stage.stage_index)

        def forward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
            return f"{index}F{args[0] if args else kwargs['fwd_chunk_id']}"

        def backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
            kind = "B" if kwargs.get("full_backward", args[2] if len(args) > 2 else True) else "I"
            return f"{index}{kind}{args[0] if args else kwargs['bwd_chunk_id']}"

        def weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
            return f"{index}W{args[0] if args else kwargs['bwd_chunk_id']}"

        for method, name in ((_FORWARD, forward), (_BACKWARD, backward), (_WEIGHTS, weights)):
            self._wrap(stage, method, functools.partial(self._busy, name, index))
        for method in _OTHERS:
            self._wrap(stage, method, functools.partial(self._busy, lambda args, kwargs: f"{index} gradients", None))

    def _wrap(self, owner: Any, method: str, around: Callable[..., Any]) -> None:
        call = getattr(owner, method, None)
        if call is None:
            return
        mine = vars(owner).get(method)

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(call, *args, **kwargs)

        def undo() -> None:
            if mine is None:
                delattr(owner, method)
            else:
                setattr(owner, method, mine)

        setattr(owner, method, wrapped)
        self._undo.append(undo)

    def _seconds(self, one: Computation) -> float:
        """What this rank's calls took; of a stage of another rank, what its own stages take for the like of it."""
        found = self._took.get((one.stage, one.kind))
        if not found:
            alike = [took for (_, kind), lengths in self._took.items() if kind == one.kind for took in lengths]
            return statistics.median(alike) if alike else 0.0
        return statistics.median(found)


def tables_of(schedule: Any) -> dict[int, list[Computation]]:
    """What each rank computes in which order, by the schedule's own table; empty where it has none."""
    orders: Mapping[int, Iterable[Any]] = getattr(schedule, "pipeline_order", None) or {}
    tables = {rank: list(_computations(actions)) for rank, actions in orders.items()}
    return {rank: _numbered(table) for rank, table in tables.items()} if hasattr(schedule, "_stage") else tables


def _numbered(table: Iterable[Computation]) -> list[Computation]:
    """A table of one stage, with its micro-batches as they come: torch 2.13 counts some of 1F1B's from 1."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [dataclasses.replace(one, microbatch=next(numbers[one.kind])) for one in table]


def _computations(actions: Iterable[Any]) -> Iterator[Computation]:
    for action in actions:
        if action is None:
            continue
        if parts := getattr(action, "sub_actions", None):
            yield from _computations(parts)
            continue
        kind = getattr(action.computation_type, "value", action.computation_type)
        if kind in _KINDS and action.microbatch_index is not None:
            yield Computation(
                stage=int(action.stage_index),
                kind=cast(Literal["F", "B", "I", "W"], kind),
                microbatch=int(action.microbatch_index),
            )


def _site(after: str | None) -> str:
    return f"pipeline {_BEGIN}" if after is None else f"pipeline after {after}"
