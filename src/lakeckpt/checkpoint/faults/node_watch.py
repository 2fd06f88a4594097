"""This module watches all ranks of a node in one of their agents: it is the ground of `lakeckpt.watch.watcher`.

The agents of a node try a lock on the page of its first rank. The one that has it watches; when it ends, the kernel
hands the lock on. On a stall each node that takes part in the job writes what it sees of its ranks into the
run, and reads what the others wrote, for ten seconds at most; the verdict is the same function of the same looks
everywhere. The node of the lowest rank writes the stall down, with the looks, before anything is killed, and says it in
one line where that rank's messages go.

With ``watch="restart"`` each node then kills its own ranks, if the launcher starts them again. One daemon thread does
all of this, and ends with the trainer of its agent. The module imports without torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from lakeckpt.checkpoint.faults.ending import end_trainer, is_started_again
from lakeckpt.checkpoint.faults.joining import join_looks
from lakeckpt.checkpoint.faults.notes import mates_of, note_at, page_beside
from lakeckpt.checkpoint.faults.records import habits_of, put_habits, put_slow, put_stall, stalls_of
from lakeckpt.checkpoint.faults.tracing import StallTrace
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.watch.avoid import Avoid, put_avoid
from lakeckpt.watch.beat import Page, read_page
from lakeckpt.watch.limits import ACT_S, StallLimits
from lakeckpt.watch.looks import GpuLook, RankLook
from lakeckpt.watch.rank_looks import look_at
from lakeckpt.watch.slow import SlowRank
from lakeckpt.watch.stalls import NodeLooks, Stall, nodes_to_avoid
from lakeckpt.watch.system.gpus import look_at_gpus
from lakeckpt.watch.watcher import POLL_S, Watcher

__all__ = ["Watched", "watch_node"]

_APART_S = 1.0
_TURN_S = 5.0
"""How often an agent that does not watch tries to."""
_LIST_S = 2.0
_ACT = "LAKECKPT_WATCH_ACT_S"
_NOBODY = "nobody starts this job again: it runs under no launcher that does, or has no restarts left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What an agent watches: the ranks ``here`` of its node, of ``world`` in an ``attempt`` of the run in ``storage``.
    ``acts``: stalls that do not heal end the ranks. ``page``: the path of the page of the agent's own trainer."""

    storage: Storage
    attempt: int
    world: int
    here: tuple[int, ...]
    page: str
    acts: bool


def watch_node(watched: Watched, trainer: int, *, log: Callable[[str], None]) -> None:
    """Watch, on a thread of its own, until the process of the pidfd ``trainer`` ends."""
    threading.Thread(target=_watch, args=(watched, trainer, log), name="lakeckpt-watch", daemon=True).start()


def _watch(watched: Watched, trainer: int, log: Callable[[str], None]) -> None:
    ends = select.poll()
    ends.register(trainer, select.POLLIN)
    with contextlib.suppress(OSError), _turn(page_beside(watched.page, watched.here[0]), ends) as is_mine:
        if not is_mine:
            return
        habits = habits_of(watched.storage)
        limits = StallLimits(habits, act_s=_act_s(log))
        may, node = is_started_again(), _Node(watched, ends, log)
        watcher = Watcher(
            node,
            limits,
            attempt=watched.attempt,
            world=watched.world,
            acts=watched.acts and may,
            why_not=_NOBODY if watched.acts and not may else "",
            wall=time.time,
        )
        while not ends.poll(1000 * POLL_S):
            watcher.poll(time.monotonic())
            node.keep_events()
        if limits.habits != (habits or StallLimits().habits) and any(limits.habits.longest_s.values()):
            with contextlib.suppress(StorageError):
                put_habits(watched.storage, limits.habits)


def _act_s(log: Callable[[str], None]) -> float:
    """Return for how long ranks may stand still, as the environment says it."""
    given = os.environ.get(_ACT, "")
    try:
        return float(given) if given else ACT_S
    except ValueError:
        log(f"{_ACT} is a number of seconds, got {given!r}: {ACT_S:.0f} s hold")
        return ACT_S


@contextlib.contextmanager
def _turn(page: str, ends: select.poll) -> Iterator[bool]:
    """Wait for this agent's turn to watch. Gives False if its trainer ends before."""
    while (descriptor := _locked(page)) is None:
        if ends.poll(1000 * _TURN_S):
            yield False
            return
    try:
        yield True
    finally:
        os.close(descriptor)


def _locked(page: str) -> int | None:
    """Return the opened and locked file at ``page``; None if it is not there yet, or another agent has locked it."""
    try:
        descriptor = os.open(page, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class _Node:
    """The ground of the watcher: this node, and the run."""

    def __init__(self, watched: Watched, ends: select.poll, log: Callable[[str], None]) -> None:
        self._watched, self._ends, self._log = watched, ends, log
        self._paths: list[str] = []
        self._listed_s = 0.0
        self._trace = StallTrace(log)
        self._newest: Stall | None = None
        """The newest stall that this node has written down."""

    def pages(self, *, histories: bool = False) -> Mapping[int, Page]:
        """Return the pages of the ranks of this node that train."""
        if time.monotonic() > self._listed_s + _LIST_S:
            self._paths = [self._watched.page, *mates_of(self._watched.page)]
            self._listed_s = time.monotonic()
        found = (read_page(path, histories=histories) for path in self._paths)
        return {page.rank: page for page in found if page is not None}

    def looks(self) -> NodeLooks:
        """Look at the ranks of this node twice."""
        gpus = look_at_gpus()  # which may take a second: the looks are a second apart, and so is what they compare
        first = self._looks(gpus)
        self._ends.poll(1000 * _APART_S)
        second = self._looks(gpus)
        step = max((look.step for look in second), default=0)
        return NodeLooks(here=self._watched.here, step=step, first=first, second=second)

    def _looks(self, gpus: Mapping[str, GpuLook]) -> tuple[RankLook, ...]:
        self._listed_s = 0.0
        pages = self.pages(histories=True)
        paths = {page.rank: path for path in self._paths if (page := read_page(path)) is not None}
        found = []
        for rank, page in pages.items():
            look = look_at(paths[rank], page, gpus)
            if look.ended and (note := note_at(paths[rank])) is not None:
                look = replace(look, ended=note.at_s, error=f"{note.name} {note.text}".strip())
            found.append(look)
        return tuple(found)

    def joined(self, looks: NodeLooks) -> Collection[NodeLooks]:
        """Give the looks to the other nodes, and wait for theirs."""
        watched = self._watched

        def pause(seconds: float) -> object:
            return self._ends.poll(1000 * seconds)

        return join_looks(watched.storage, watched.attempt, looks, world=watched.world, pause=pause)

    def report(self, stall: Stall) -> None:
        """Write a stall down, on the node of the lowest rank that was looked at."""
        self._log(f"stall after step {stall.step}: {stall.verdict.reason}")
        if not stall.ended_s:
            self._trace.begin([page.pid for page in self.pages().values()])
        if min((look.rank for look in stall.looks), default=0) not in self._watched.here:
            return
        storage = self._watched.storage
        stall = self._newest = replace(stall, events=self._trace.events)
        try:
            put_stall(storage, stall)
            if stall.acted and len(self._watched.here) < self._watched.world:  # else there is no other node to go to
                for node, why in nodes_to_avoid((one for _, one in stalls_of(storage)), now_s=time.time()).items():
                    put_avoid(storage, Avoid(node=node, by="lakeckpt watch", at_s=time.time(), reason=why))
        except StorageError as error:
            self._log(f"the stall cannot be written into the run: {error}")
        if stall.acted or not stall.ended_s:
            self._say(stall)

    def _say(self, stall: Stall) -> None:
        """Say a stall on the standard error stream of the lowest rank of this node."""
        what = "ends the ranks of this node: the job" if stall.acted else "the job"
        text = f"lakeckpt watch: {what} stands still after step {stall.step}: {stall.verdict.reason}. "
        text += f"{stall.remark + '. ' if stall.remark else ''}See: lakeckpt faults {describe(self._watched.storage)}\n"
        pages = self.pages()
        if pages:
            with contextlib.suppress(OSError):
                descriptor = os.open(f"/proc/{pages[min(pages)].pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
                try:
                    os.write(descriptor, text.encode(errors="backslashreplace"))
                finally:
                    os.close(descriptor)

    def keep_events(self) -> None:
        """Add what the kernel saw to the newest stall, once the scripts have ended."""
        newest = self._newest
        if newest is not None and not self._trace.runs and newest.events != self._trace.events:
            self._newest = replace(newest, events=self._trace.events)
            with contextlib.suppress(StorageError):
                put_stall(self._watched.storage, self._newest)

    def slow(self, rank: SlowRank) -> None:
        """Write down that a rank is slow, or not any more."""
        self._log(str(rank))
        with contextlib.suppress(StorageError):
            put_slow(self._watched.storage, rank)

    def act(self, stall: Stall) -> None:
        """Kill the ranks of this node."""
        for path in [self._watched.page, *mates_of(self._watched.page)]:
            page = read_page(path)
            if page is not None and page.lives:
                with contextlib.suppress(OSError):
                    pidfd = os.pidfd_open(page.pid)
                    try:
                        if page.lives:  # its number was given to no other process before
                            self._end(stall, path, page, pidfd)
                    finally:
                        os.close(pidfd)

    def _end(self, stall: Stall, path: str, page: Page, pidfd: int) -> None:
        verdict, attempt = stall.verdict, self._watched.attempt
        if page.rank in verdict.ranks:
            text, at_s = verdict.reason, stall.began_s
            end_trainer(path, page, attempt, pidfd, text=text, cause="hang", what=verdict.kind, at_s=at_s)
        else:
            text = f"it waited for rank {', '.join(map(str, verdict.ranks))}"
            end_trainer(path, page, attempt, pidfd, text=text)
