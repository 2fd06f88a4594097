"""A trainer that is killed: a whole one, of one rank or of several, with points in the midst of all that it does.

Its manager captures at every step, with everything between two halves: updates, copies, what is written of an arena.
Its state says its step in every element, what is its own says the rank, too, and of several ranks some is divided.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lakeckpt.checkpoint import opening
from lakeckpt.checkpoint.agent import link
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture import copier, moves
from lakeckpt.errors import AgentError, MissingRanksError, SaveFailed
from lakeckpt.tracking.exchange import exchange_of_group
from tests.checkpoint.capturing.device import Device, LinkedEngine, SimulatedLink
from tests.checkpoint.capturing.stamped import Own, Stamped, Stamper, local
from tests.checkpoint.kills.points import Notes, Points
from tests.checkpoint.seams import manager_with
from tests.patience import PATIENCE_S

__all__ = ["ASKS_AGENT", "LAST", "LEFT", "WAITS", "Trainer"]

LAST = 6
LEFT = 3
"""With what a trainer ends that has noticed that another one is gone."""
ASKS_AGENT = b"agent"
"""What it says, with an agent's pipes, when it wants one."""
WAITS = b"waits"
"""What it says when it waits for its agent, which may wait for those of others."""


class ForkedAgent:
    """Stands in for the process that a link has started: it is no child of the trainer."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid, self._watched = pid, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Whether it has ended."""
        if select.select([self._watched], [], [], 0)[0]:
            self.returncode = 0
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end."""
        select.select([self._watched], [], [], timeout_s)
        return self.poll()


class HalfShut(Gate):
    """Keeps every other slice until the fence: the copier copies, and the fence."""

    def __init__(self) -> None:
        self._asked = 0

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        self._asked += 1
        assert self._asked % 2 or urgent.wait(PATIENCE_S)

    def cut(self, step: int) -> None:
        """A bubble's gate is told of cuts."""


class Watched:
    """Stands in for `lakeckpt.bubbles.Bubbles`: only its gate counts here."""

    def __init__(self) -> None:
        self.gate = HalfShut()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer of ``rank`` of ``ranks``, which meet at the file ``meet``, on ``node``; ``before``: of how many ranks
    the job was until now. It asks for agents at ``asks``."""

    run: Path
    arenas: Path
    rank: int
    ranks: int
    before: int
    node: int
    meet: Path
    device: bool
    persist_every: int
    waits: bool
    notes: Notes
    asks: socket.socket

    def train(self, points: Points) -> None:
        """Train to the end."""
        try:
            self._train(points)
        except (RuntimeError, MissingRanksError, SaveFailed, AgentError) as error:
            # Where there is one rank, only the death of its agent ends a trainer: with a save pending, or at the start.
            if not self.notes["killed"] or (self.ranks == 1 and not isinstance(error, (SaveFailed, AgentError))):
                raise
            os._exit(LEFT)

    def _train(self, points: Points) -> None:
        opening.LINGER_S = 0.0
        link._spawned = self._start_agent  # type: ignore[assignment]
        simulated = Device(os.getpid())
        links = {torch.device("cpu"): SimulatedLink(simulated)} if self.device else {}
        opening.CaptureEngine = functools.partial(  # type: ignore[misc,assignment]
            LinkedEngine, slice_bytes=256, links=links
        )
        halve_copies(points)

        def launch(work: Callable[[], object]) -> None:
            points.meet("in the midst of an update")
            simulated.queue(0, work) if self.device else work()

        mesh, exchange = self._meet()
        model, own = Stamped(divided=(7, 2), mesh=mesh), Own()
        optimizer = Stamper(model, launch)
        manager = manager_with(
            self.run,
            {"model": model, "optimizer": optimizer, "own": own},
            capture_every=1,
            persist_every=self.persist_every,
            arenas=self.arenas,
            bubbles=Watched(),  # type: ignore[arg-type]
            timeout_s=PATIENCE_S,
            fail_after=0,
            exchange=exchange,
        )
        with manager:
            done = manager.restore()
            self._check(model, optimizer, own, done)
            self.notes[f"restored {self.rank}"], optimizer.stamp = done, done
            self._note_completed(done)
            points.meet("restored")
            while manager.steps_done < LAST:
                self._with_others()
                optimizer.step()
                launch(functools.partial(model.seen.fill_, optimizer.stamp))
                own.stamp(optimizer.stamp, self.rank)
                points.meet("before a cut")
                self._committed(manager.step())
                points.meet("after a cut")
                if manager.steps_done % 2:
                    assert manager._saves is not None
                    manager._saves._engine.wait()  # of other cuts, captures are under way when the next one comes
                if manager.steps_done == 4 and self.waits:
                    self.asks.send(WAITS)
                    self._committed(manager.wait())
            simulated.run()
            self.asks.send(WAITS)

    def _meet(self) -> tuple[Any, Any]:
        if self.ranks == 1:
            return None, None
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{self.meet}", rank=self.rank, world_size=self.ranks)
        exchange = exchange_of_group(None, timeout_s=20.0, node=str(self.arenas))  # a killed rank is waited for
        return init_device_mesh("cpu", (self.ranks,)), exchange

    def _with_others(self) -> None:
        """What data-parallel ranks do before each update: none is further ahead than one."""
        if self.ranks > 1:
            dist.all_reduce(torch.ones(1))

    def _start_agent(
        self, python: str, orders: Connection, outcomes: Connection, *, trainer: int, log: int
    ) -> ForkedAgent:
        socket.send_fds(self.asks, [ASKS_AGENT], [orders.fileno(), outcomes.fileno(), trainer, log])
        return ForkedAgent(int(self.asks.recv(32)))

    def _check(self, model: Stamped, optimizer: Stamper, own: Own, step: int) -> None:
        """All of it is of ``step``, and what is this rank's own is what it had itself."""
        every = [*model.state_dict().values(), *(state["moment"] for state in optimizer.state.values())]
        assert all(bool((local(one) == step).all()) for one in every), f"restored to step {step}: {every}"
        stamps = own.of(step, self.rank % self.before) if step else own.of(0, 0)
        assert torch.equal(own.stamps, stamps), f"restored to step {step}, rank {self.rank}: {own.stamps}"

    def _committed(self, info: Any) -> None:
        if info is not None:
            name = f"committed {self.rank}"
            self.notes[name] = max(self.notes[name], info.step)

    def _note_completed(self, done: int) -> None:
        """Note which cuts are complete: a bit for each step. Those behind ``done`` are not of this history."""
        complete, notes, name = copier.Capture.complete, self.notes, f"completed {self.rank}"
        notes[name] &= (2 << done) - 1

        def noted(one: copier.Capture, documents: bytes) -> None:
            complete(one, documents)
            notes[name] |= 1 << one.cut.step

        copier.Capture.complete = noted  # type: ignore[method-assign]


def halve_copies(points: Points) -> None:
    """Copies of tensors, and what is written of an arena's own, are made in two halves, with a point between them."""
    put = Arena._put

    def half_put(arena: Arena, at: int, data: bytes | memoryview) -> None:
        put(arena, at, data[: len(data) // 2])
        points.meet(f"half of {'a sequence number' if len(data) == 8 else 'a document or record'} is written")
        put(arena, at + len(data) // 2, data[len(data) // 2 :])

    def foreach(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        for part in (slice(None, None, 2), slice(1, None, 2)):
            for one, other in zip(to, source, strict=True):
                one.reshape(-1)[part].copy_(other.reshape(-1)[part])
            points.meet("half of a slice is copied")

    Arena._put = half_put  # type: ignore[method-assign]
    moves.torch._foreach_copy_ = foreach  # type: ignore[attr-defined]
