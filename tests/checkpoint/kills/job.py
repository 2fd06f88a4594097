"""Trainers and their agents that are killed, and what is found afterwards.

`Site` is the place of a run. Its trainers are whole ones (`Trainer`), one for each rank, in processes that are forked
from one that has torch loaded; each has an agent, a process, too, forked by whoever forks the trainers instead of being
started anew, which would take half a second. Ranks have a node each, with memory of its own, or share one.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from lakeckpt.checkpoint.agent import process
from lakeckpt.checkpoint.agent.leftovers import kept_in, reclaim
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.interop.run_state import RunState
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import LOG
from lakeckpt.errors import ArenaDamaged
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.agent.test_agent import ended
from tests.checkpoint.capturing.stamped import Own, check_stamps
from tests.checkpoint.kills.points import MOST_RANKS, Doom, Notes, Points, agent, trainer
from tests.checkpoint.kills.trainer import ASKS_AGENT, WAITS, Trainer
from tests.patience import PATIENCE_S

__all__ = ["Site", "adopt"]

_PR_SET_CHILD_SUBREAPER = 36
_HANGS_S = PATIENCE_S / 2


class Site:
    """Where a run of ``ranks`` lies, and what is known of it from outside.

    ``shares``: its ranks share a node. ``device``: the state lies on a (simulated) device, and not in host memory.
    ``waits``: in its midst, trainers wait for what is being persisted. Where they never do, captures want memory that
    is being persisted, some are left out, on one rank these and on another one those, and ranks need not keep a step
    that all of them had. ``agents_count_after``: the points of agents count when this many kills have happened.
    """

    def __init__(
        self,
        root: Path,
        *,
        ranks: int = 1,
        shares: bool = False,
        device: bool = False,
        persist_every: int = 2,
        waits: bool = True,
        agents_count_after: int = 0,
    ) -> None:
        self.root, self.run = root, root / "run"
        self.ranks, self.shares, self.device = ranks, shares, device
        self.persist_every, self.waits = persist_every, waits
        self.agents_count_after = agents_count_after
        self.notes = Notes()
        self.agents: list[int] = []
        self.trainings = 0
        root.mkdir(parents=True, exist_ok=True)

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return 0 if self.shares else rank

    @property
    def nodes(self) -> list[int]:
        """All nodes."""
        return sorted({self.node(rank) for rank in range(self.ranks)})

    def arenas(self, node: int) -> Path:
        """The memory of a node."""
        return self.root / f"memory of node {node}"

    def lose(self, node: int) -> None:
        """The memory of a node is gone."""
        shutil.rmtree(self.arenas(node), ignore_errors=True)

    # --- processes

    def train(
        self,
        *dooms: Doom,
        modules: tuple[ModuleType, ...] = (),
        ranks: int | None = None,
        leaves: bool = False,
    ) -> list[int]:
        """Run a trainer for each rank to its end, with agents as they ask for them; their exit codes.

        ``modules``: those whose lines are points. ``ranks``: from now on there are so many. Where a trainer dies the
        others are killed; or, if it ``leaves`` them, they find that out for themselves, but for those that wait for an
        agent, which waits for as long as a save may take.
        """
        before, self.ranks = self.ranks, self.ranks if ranks is None else ranks
        self.trainings += 1
        trainers: dict[socket.socket, int] = {}
        for rank in range(self.ranks):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not (child := os.fork()):
                for one in (ours, *trainers):
                    one.close()
                self._be(trainer(rank), dooms, modules, self._trainer(rank, before, theirs).train)
            self.notes[trainer(rank)] = child
            theirs.close()
            trainers[ours] = rank
        started: Counter[int] = Counter()
        waiting: set[int] = set()
        codes = [0] * self.ranks
        while trainers:
            found = select.select(list(trainers), [], [], PATIENCE_S)[0]
            assert found, f"trainers hang: {self.failure}"
            for one in found:
                rank = trainers[one]
                asked, pipes = _asked(one)
                if asked == WAITS:
                    waiting.add(rank)
                elif asked == ASKS_AGENT:
                    pid = self._start_agent(rank, pipes, *(() if started[rank] else (dooms, modules)))
                    started[rank] += 1
                    with contextlib.suppress(OSError):  # the trainer may be dead
                        one.send(b"%d" % pid)
                else:
                    codes[rank] = self._ended(rank)
                    del trainers[one]
                    one.close()
            if any(codes):
                for rank in trainers.values():
                    if not leaves or rank in waiting:
                        os.kill(self.notes[trainer(rank)], signal.SIGKILL)
        return codes

    def _trainer(self, rank: int, before: int, asks: socket.socket) -> Trainer:
        return Trainer(
            run=self.run,
            arenas=self.arenas(self.node(rank)),
            rank=rank,
            ranks=self.ranks,
            before=before,
            node=self.node(rank),
            meet=self.root / f"meet {self.trainings}",
            device=self.device,
            persist_every=self.persist_every,
            waits=self.waits,
            notes=self.notes,
            asks=asks,
        )

    def _ended(self, rank: int) -> int:
        child = self.notes[trainer(rank)]
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        self.notes[trainer(rank)] = 0  # from here on its number may be another's
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def met(self, process: str) -> Counter[str]:
        """The points that a process met, if it came to its end."""
        return Counter(json.loads((self.root / f"points of {process}").read_text()))

    @property
    def failure(self) -> str:
        """Why a process failed."""
        every = [one.read_text() for one in sorted(self.root.glob("failure of *"))]
        return "\n".join(filter(None, every)) or "a process ended that nobody has killed"

    def _be(
        self, name: str, dooms: Sequence[Doom], modules: tuple[ModuleType, ...], body: Callable[[Points], None]
    ) -> None:
        """Be the process that was just forked, to its end."""
        status = 1
        failure = (self.root / f"failure of {name}").open("a")
        try:
            faulthandler.dump_traceback_later(_HANGS_S, exit=True, file=failure)
            after = self.agents_count_after if name.startswith("agent") else 0
            points = Points(self.notes, name, dooms, after=after)
            if points.doom is not None or not any(":" in one.label for one in dooms):
                points.watch(modules)
            body(points)
            sys.settrace(None)
            (self.root / f"points of {name}").write_text(json.dumps(points.met))
            status = 0
        except BaseException:
            failure.write(f"{name}: {traceback.format_exc()}")
            failure.flush()
        finally:
            os._exit(status)

    def _start_agent(
        self, rank: int, pipes: Sequence[int], dooms: Sequence[Doom] = (), modules: tuple[ModuleType, ...] = ()
    ) -> int:
        """Start an agent as `AgentLink` does, by a fork."""
        name = agent(rank)
        orders, outcomes, watched, log = pipes

        def be(_: Points) -> None:
            os.setsid()
            for one, its in ((orders, 0), (outcomes, 1), (log, 2)):
                os.dup2(one, its)
                os.close(one)
            process.main(watched)

        if not (child := os.fork()):
            self._be(name, dooms, modules, be)
        for one in pipes:
            os.close(one)
        self.notes[name] = child
        self.agents.append(child)
        return child

    # --- what is found

    def drain(self, ranks: Iterable[int] | None = None) -> None:
        """Wait for the end of the agents of ranks (None: all), which do first what is left to do."""
        for rank in () if ranks is None else ranks:
            assert ended(self.notes[agent(rank)]), "an agent does not end"
        if ranks is None:
            self.join()

    def join(self) -> None:
        """Wait until all agents have ended. They are children of this process."""
        for pid in self.agents:
            assert ended(pid), "an agent does not end"
            os.waitpid(pid, 0)
        self.agents.clear()
        for rank in range(MOST_RANKS):
            self.notes[agent(rank)] = 0

    def kill(self) -> None:
        """Leave no agent behind."""
        for pid in self.agents:
            os.kill(pid, signal.SIGKILL)

    def committed(self) -> int:
        """The step of the newest checkpoint, 0 where there is none; all of them are whole, and of one step each."""
        storage = LocalStorage(self.run)
        if not storage.list(LOG):
            return 0  # nobody has begun yet
        damaged = verify(storage).every_damage
        assert damaged == (), damaged
        chain = read_history(storage).chain
        for one in chain[-3:]:
            for rank in range(one.world_size):
                self._check(one, rank)
        return chain[-1].step if chain else 0

    def _check(self, one: Manifest, rank: int) -> None:
        whole = RunState(LocalStorage(self.run), one, rank)
        state = whole.read(whole.tree)
        own = state.pop("own")["stamps"]
        assert torch.equal(own, Own.of(one.step, rank)), f"the checkpoint of step {one.step}, rank {rank}: {own}"
        found = {float(value) for tensor in _tensors(state) for value in tensor.flatten().tolist()}
        assert found == {float(one.step)}, f"the checkpoint of step {one.step} holds {sorted(found)}"

    def captured(self) -> int:
        """The newest step that is complete in the memory of all ranks; every generation there is of one step."""
        of_ranks: list[set[CutId]] = [set() for _ in range(self.ranks)]
        for node in self.nodes:
            folder = ArenaFolder(self.arenas(node))
            for info in folder.found():
                # It may be being made, or an agent removes it when its steps are in storage: `committed` finds them.
                with contextlib.suppress(ArenaDamaged, FileNotFoundError), folder.open(info.name) as arena:
                    check_stamps(arena)
                    if arena.layout.identity.world == self.ranks:
                        of_ranks[arena.layout.identity.rank] |= {one.cut for one in arena.complete()}
        return max((one.step for one in set.intersection(*of_ranks)), default=0)

    def left(self, *, reclaimed: bool) -> list[str]:
        """The arenas that lie anywhere; ``reclaimed``: when what nobody needs any more is."""
        every = [ArenaFolder(one) for one in self.root.glob("memory of *")]
        for folder in every if reclaimed else ():
            reclaim(folder, kept_in(folder))
        return [info.name for folder in every for info in folder.found()]


def _asked(trainer: socket.socket) -> tuple[bytes, list[int]]:
    """What a trainer asks for, and with which open files; nothing where it has ended."""
    try:
        asked, pipes, _, _ = socket.recv_fds(trainer, 4096, 8)
    except ConnectionResetError:  # it was killed before it heard an answer
        return b"", []
    return asked, pipes


def adopt() -> None:
    """Processes whose parents have ended become children of this one: their numbers are taken until it lets them go."""
    assert ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _tensors(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state] if state.is_floating_point() else []
    if isinstance(state, dict):
        return [one for value in state.values() for one in _tensors(value)]
    return [one for value in state for one in _tensors(value)] if isinstance(state, (list, tuple)) else []
