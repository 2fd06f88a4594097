"""A trainer and its agent that are killed, and what is found afterwards.

`Site` is the place of a run. Its trainer is a whole one: `CheckpointManager` with a capture at every step, over a model
of which every element says its step (`Stamped`), in a process that is forked from one that has torch loaded; its agent
is a process, too, forked by whoever forks the trainer instead of being started anew, which would take half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint import background, commit, opening, publish, restorer
from lakeckpt.checkpoint.agent import generations, link, persister, server
from lakeckpt.checkpoint.agent.place import AgentPlace
from lakeckpt.checkpoint.arena import arena as arena_module
from lakeckpt.checkpoint.arena import contents, folder
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.bubbles.keeper import ProfileKeeper
from lakeckpt.checkpoint.capturing import capture, copier, engine, hooks, job, moves, store
from lakeckpt.checkpoint.capturing.engine import CaptureEngine
from lakeckpt.checkpoint.foreign.convert import read_state
from lakeckpt.checkpoint.gate import OpenGate
from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.checkpoint.log import LOG
from lakeckpt.checkpoint.verify import verify
from lakeckpt.errors import ArenaDamaged
from lakeckpt.lake.local import LocalStorage
from tests.checkpoint.agent.test_agent import ended
from tests.checkpoint.capturing.device import Device, SimulatedLink
from tests.checkpoint.capturing.stamped import Stamped, Stamper, check_stamps
from tests.checkpoint.kills.points import Doom, Notes, Points
from tests.patience import PATIENCE_S

LAST = 6
_PR_SET_CHILD_SUBREAPER = 36
CAPTURING: tuple[ModuleType, ...] = (
    *(engine, capture, copier, hooks, job, store, moves),
    *(arena_module, folder, background, link, generations),
)
PERSISTING: tuple[ModuleType, ...] = (server, persister, generations, arena_module, contents, publish, commit)
RESTORING: tuple[ModuleType, ...] = (restorer, opening, arena_module, folder, contents, generations)


class HalfShut(OpenGate):
    """Keeps every other slice until the fence: the copier copies, and the fence."""

    def __init__(self) -> None:
        self._asked = 0

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        self._asked += 1
        assert self._asked % 2 or urgent.wait(PATIENCE_S)

    def cut(self, step: int) -> None:
        """A bubble's gate is told of cuts."""


class Watched:
    """Stands in for `lakeckpt.Bubbles`: only its gate counts here."""

    def __init__(self) -> None:
        self.gate = HalfShut()

    def kept(self, *_: object, **__: object) -> ProfileKeeper:
        """Nothing was watched, and nothing is written of it."""
        keeper = ProfileKeeper(lambda: None, "nobody")
        keeper.begin()
        return keeper


class Site:
    """Where a run lies, and what is known of it from outside."""

    def __init__(self, root: Path, *, device: bool = False) -> None:
        self.run, self.arenas, self.said = root / "run", root / "arenas", root / "said"
        self.device = device  # the state lies on a (simulated) device, and not in host memory
        self.notes = Notes()
        self.agents: list[int] = []
        self.arenas.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- processes

    def train(self, doom: Doom | None = None, *, modules: tuple[ModuleType, ...] = ()) -> int:
        """Run a trainer to its end, with agents as it asks for them; its exit code. ``modules``: those whose lines are
        points of it."""
        ours, theirs = socket.socketpair()
        started = 0
        if not (child := os.fork()):
            ours.close()
            self._be("trainer", doom, modules, functools.partial(self._train, theirs))
        self.notes["trainer"] = child
        theirs.close()
        with ours:
            while asked := _asked(ours):
                self._start_agent(*json.loads(asked), doom if not started else None)
                started += 1
                self.agents.append(self.notes["agent"])
                with contextlib.suppress(OSError):  # the trainer may be dead
                    ours.send(b"+")
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        self.notes["trainer"] = 0  # from here on its number may be another's
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def met(self, process: str) -> Counter[str]:
        """The points that a process met, if it came to its end."""
        return Counter(json.loads(self.said.with_suffix(f".{process}").read_text()))

    @property
    def failure(self) -> str:
        """Why a process failed."""
        failed = self.said.with_suffix(".failed")
        return failed.read_text() if failed.exists() else "a process ended that nobody has killed"

    def _be(
        self, name: Any, doom: Doom | None, modules: tuple[ModuleType, ...], body: Callable[[Points], None]
    ) -> None:
        """Be the process that was just forked, to its end."""
        status = 1
        try:
            points = Points(self.notes, name, doom)
            points.watch(modules if doom is None or doom.process == name else ())
            body(points)
            sys.settrace(None)
            self.said.with_suffix(f".{name}").write_text(json.dumps(points.met))
            status = 0
        except BaseException:
            self.said.with_suffix(".failed").write_text(f"{name}: {traceback.format_exc()}")
        finally:
            os._exit(status)

    def _start_agent(self, arenas: str, run: str, doom: Doom | None) -> None:
        """Start an agent as `AgentLink` does, by a process that ends when trainers can connect."""

        def be(_: Points) -> None:
            log = os.open(f"{self.said}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 2)
            asked, listener = os.getpid(), AgentPlace.listener

            def noted(place: AgentPlace) -> socket.socket:
                self.notes["agent"] = os.getpid()
                return listener(place)

            AgentPlace.listener = noted  # type: ignore[method-assign]
            status = server.main(arenas, run, linger_s=PATIENCE_S)
            if os.getpid() == asked:
                os._exit(status)

        if not (child := os.fork()):
            self._be("agent", doom, PERSISTING, be)
        if os.waitpid(child, 0)[1] != 0:
            assert self.notes["killed"], f"an agent cannot be started: {self.failure}"
            self._start_agent(arenas, run, None)

    # --- the trainer

    def _train(self, asks: socket.socket, points: Points) -> None:
        def start(agent: link.AgentLink, log: str) -> None:
            asks.send(json.dumps([agent._hello.arenas, agent._hello.digest.hex()]).encode())
            assert asks.recv(1) == b"+"

        link.AgentLink._start = start  # type: ignore[method-assign]
        model, simulated = Stamped(), Device(os.getpid())
        if self.device:
            linked = {torch.device("cpu"): SimulatedLink(simulated)}
            opening.CaptureEngine = functools.partial(  # type: ignore[attr-defined]
                CaptureEngine, slice_bytes=256, scratch_bytes=2000, links=linked
            )
        else:
            opening.CaptureEngine = functools.partial(CaptureEngine, slice_bytes=256)  # type: ignore[attr-defined]
        _halve_copies(points)

        def launch(work: Callable[[], object]) -> None:
            points.meet("in the midst of an update")
            simulated.queue(0, work) if self.device else work()

        optimizer = Stamper(model, launch)
        manager = CheckpointManager(
            self.run,
            {"model": model, "optimizer": optimizer},
            capture_every=1,
            persist_every=2,
            arenas=self.arenas,
            bubbles=Watched(),  # type: ignore[arg-type]
            timeout_s=PATIENCE_S,
            on_save_failure="raise",
        )
        with manager:
            done = manager.restore()
            check_state(model, optimizer, done)
            self.notes["restored"], optimizer.stamp = done, done
            points.meet("restored")
            _note_completed(self.notes)
            while manager.steps_done < LAST:
                optimizer.step()
                launch(functools.partial(model.seen.fill_, optimizer.stamp))
                points.meet("before a cut")
                self._committed(manager.step())
                points.meet("after a cut")
                if manager.steps_done % 2:
                    assert manager._background is not None
                    manager._background._engine.wait()  # of other cuts, captures are under way when the next one comes
                if manager.steps_done == 4:
                    self._committed(manager.wait())
            simulated.run()

    def _committed(self, info: Any) -> None:
        if info is not None:
            self.notes["committed"] = max(self.notes["committed"], info.step)

    # --- what is found

    def drain(self) -> None:
        """Have agents do what is left to do, and wait for their end."""
        for pid in {*self.agents}:
            os.kill(pid, signal.SIGTERM)
        self.join()

    def join(self) -> None:
        """Wait until all agents have ended. They are children of this process, which is told to adopt them."""
        for pid in {*self.agents}:
            assert ended(pid), "an agent does not end"
            os.waitpid(pid, 0)
        self.agents.clear()

    def kill(self) -> None:
        """Leave no agent behind."""
        for pid in {*self.agents}:
            os.kill(pid, signal.SIGKILL)

    def committed(self) -> int:
        """The step of the newest checkpoint, 0 where there is none; all of them are whole, and of one step each."""
        storage = LocalStorage(self.run)
        if not storage.list(LOG):
            return 0  # nobody has begun yet
        assert verify(storage).every_damage == ()
        chain = read_history(storage).chain
        for one in chain[-3:]:
            state = read_state(self.run, slot=one.slot)
            found = {float(value) for tensor in _tensors(state) for value in tensor.flatten().tolist()}
            assert found == {float(one.step)}, f"the checkpoint of step {one.step} holds {sorted(found)}"
        return chain[-1].step if chain else 0

    def captured(self) -> int:
        """The newest step that is complete in memory; every generation there is of one step."""
        newest = 0
        for info in ArenaFolder(self.arenas).found():
            with contextlib.suppress(ArenaDamaged):  # it was being made
                with ArenaFolder(self.arenas).open(info.name) as arena:
                    newest = max([newest, *check_stamps(arena)])
        return newest


def _asked(trainer: socket.socket) -> bytes:
    """What a trainer asks for; nothing where it has ended."""
    try:
        return trainer.recv(4096)
    except ConnectionResetError:  # it was killed before it heard an answer
        return b""


def adopt() -> None:
    """Processes whose parents have ended become children of this one: their numbers are taken until it lets them go."""
    assert ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _note_completed(notes: Notes) -> None:
    complete = job.Job.complete

    def noted(one: job.Job, documents: bytes) -> None:
        complete(one, documents)
        notes["completed"] = one.facts.step

    job.Job.complete = noted  # type: ignore[method-assign]


def _halve_copies(points: Points) -> None:
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


def check_state(model: Stamped, optimizer: Stamper, step: int) -> None:
    """All of it is of ``step``."""
    every = [*model.state_dict().values(), *(state["moment"] for state in optimizer.state.values())]
    assert all(bool((one == step).all()) for one in every), f"restored to step {step}: {every}"


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state] if state.is_floating_point() else []
    if isinstance(state, dict):
        return [one for value in state.values() for one in _tensors(value)]
    return [one for value in state for one in _tensors(value)] if isinstance(state, (list, tuple)) else []
