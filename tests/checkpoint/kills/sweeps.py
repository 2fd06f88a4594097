"""Sweeps of kills: at which points, who is killed, what becomes of the job meanwhile, and what is to hold after it."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import random
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lakeckpt.checkpoint import async_save as background
from lakeckpt.checkpoint import opening
from lakeckpt.checkpoint.agent import final_save, generations, link, persister
from lakeckpt.checkpoint.agent import process as agent_process
from lakeckpt.checkpoint.arena import arena, contents, folder
from lakeckpt.checkpoint.capture import copier, engine, fence, moves, slice_copier, store
from lakeckpt.checkpoint.persist import agreement, commit, publish, records
from lakeckpt.checkpoint.restore import choosing, restorer
from lakeckpt.checkpoint.restore import from_memory as remembered
from lakeckpt.tracking import votes as together
from tests.checkpoint.kills.job import Site, adopt
from tests.checkpoint.kills.points import Doom, agent, trainer
from tests.checkpoint.kills.trainer import LAST, LEFT
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes

__all__ = ["EVERY", "Fate", "Sweep", "swept"]

EVERY = os.environ.get("LAKECKPT_EVERY_KILL") == "1"
SWEEP_S = 14000.0 if EVERY else PATIENCE_S
Modules = tuple[ModuleType, ...]
CAPTURING: Modules = (
    *(engine, slice_copier, fence, copier, store, moves),
    *(arena, folder, background, link, generations),
)
PERSISTING: Modules = (agent_process, persister, generations, arena, contents, publish, commit, agreement, records)
FINAL_SAVES: Modules = (agent_process, persister, final_save, records, commit)
RESTORING: Modules = (restorer, opening, arena, folder, contents, generations, choosing, together, remembered)
MODULES: dict[str, Modules] = {
    "midst": (),
    "hurried": (),
    "behind": (),
    "capturing": CAPTURING,
    "persisting": PERSISTING,
    "final saves": FINAL_SAVES,
    "restoring": RESTORING,
}
"""kind of sweep → of which modules the lines are points. Without any, the points are those in the midst of copies and
updates (``hurried``: of a job that never waits for what is being persisted), or where a rank is a step behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Who is killed, and what becomes of the job until it is started again.

    ``leaves``: trainers that were not killed find out for themselves, and end. ``drains``: agents make the final save
    first, and end. ``lost``: the memory of these nodes is gone. ``ranks``: there are so many then.
    """

    victims: tuple[str, ...]
    leaves: bool = False
    drains: bool = False
    lost: tuple[int, ...] = ()
    ranks: int | None = None

    @property
    def moves(self) -> bool:
        """Whether the job does not come back to the memory that it has left."""
        return bool(self.lost) or self.ranks is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Which jobs are killed where, and how often at the most: see `Site` and `MODULES`."""

    kind: str
    ranks: int = 1
    shares: bool = False
    device: bool = False
    most: int

    @property
    def of_agents(self) -> bool:
        """Whether the points are those of agents."""
        return self.kind in ("persisting", "final saves")

    def site(self, root: Path) -> Site:
        """The place of one of its jobs."""
        every = 3 if self.kind == "behind" else 2  # the newest step of all ranks is not in storage then
        waits = self.kind != "hurried"
        return Site(
            root,
            ranks=self.ranks,
            shares=self.shares,
            device=self.device,
            persist_every=every,
            waits=waits,
            agents_count_after=len(self.begins()),  # the points of a final save are those behind its trainer's death
        )

    def prepare(self, site: Site) -> None:
        """Where it is to be restored, a job was under way, and all of it was killed."""
        if self.kind == "restoring":
            site.train(self._ahead(*map(trainer, range(self.ranks)), *map(agent, range(self.ranks))))

    def begins(self) -> list[Doom]:
        """What happens before a point is met."""
        return [self._ahead(*map(trainer, range(self.ranks)))] if self.kind == "final saves" else []

    @staticmethod
    def _ahead(*victims: str) -> Doom:
        """All ranks have captured one step more than is in storage."""
        return Doom(process=trainer(0), label="before a cut", hit=LAST, victims=victims)

    def points(self, site: Site) -> list[tuple[str, str, int]]:
        """Those of a job that nothing happens to: process, label, and how often it was met."""
        if self.kind == "behind":
            return [(trainer(rank), "before a cut", LAST - 1) for rank in range(self.ranks) for _ in range(self.most)]
        modules, begins = MODULES[self.kind], self.begins()
        self.prepare(site)
        codes = site.train(*begins, modules=modules)
        assert begins or not any(codes), site.failure
        site.drain() if begins else site.join()
        assert site.committed() == (LAST - 1 if begins else LAST)
        processes = map(agent, range(self.ranks)) if self.of_agents else map(trainer, range(self.ranks))
        return [
            (process, label, hits)
            for process in processes
            for label, hits in sorted(site.met(process).items())
            if (":" in label) == bool(modules)
        ]

    def dooms(self, points: Sequence[tuple[str, str, int]]) -> Iterator[tuple[Doom, Fate]]:
        """At most so many of the points, evenly; of each one meeting, with all fates in turn."""
        hits = [(process, label, 1 + number * 7919 % met) for number, (process, label, met) in enumerate(points)]
        if self.kind == "behind":
            hits = list(points)
        elif not MODULES[self.kind]:
            hits = [(*one, max(1, met * part // 4)) for *one, met in points for part in (1, 2, 3, 4)]  # type: ignore[misc]
        stride = 1 if EVERY else max(1, -(-len(hits) // self.most))
        chosen = hits[stride // 2 :: stride]
        chance = random.Random(repr(self))
        chance.shuffle(chosen)
        turns = list(range(len(self.fates(chosen[0][0]))))
        chance.shuffle(turns)
        for (process, label, hit), turn in zip(chosen, itertools.cycle(turns), strict=False):
            fate = self.fates(process)[turn]
            awaits = ((number_of(process) + 1) % self.ranks, hit) if self.kind == "behind" else None
            yield Doom(process=process, label=label, hit=hit, victims=fate.victims, awaits=awaits), fate

    def fates(self, process: str) -> list[Fate]:
        """What may happen when ``process`` comes to its point."""
        here = number_of(process)
        node = 0 if self.shares else here
        own_agent = agent(here)
        trainers, agents = tuple(map(trainer, range(self.ranks))), tuple(map(agent, range(self.ranks)))
        own = (trainer(here),)
        of_node = (*trainers, *agents) if self.shares else (*own, own_agent)
        other = trainer((here + 1) % self.ranks)
        if self.kind == "final saves":
            return [Fate(victims=(own_agent,)), Fate(victims=agents), Fate(victims=agents, ranks=self.ranks % 3 + 1)]
        if self.ranks == 1:
            if self.of_agents:
                return [Fate(victims=agents), Fate(victims=of_node)]
            if self.kind == "restoring":
                return [Fate(victims=own), Fate(victims=of_node)]
            every = [Fate(victims=own, drains=True), Fate(victims=of_node), Fate(victims=agents)]
            return [*every, Fate(victims=own), Fate(victims=of_node), Fate(victims=agents)]
        if self.kind == "behind":
            every = [Fate(victims=own), Fate(victims=own, drains=True), Fate(victims=trainers, drains=True)]
            return [*every, Fate(victims=of_node), Fate(victims=(*trainers, *agents))]
        if self.kind == "restoring":
            every = [Fate(victims=own), Fate(victims=(other,)), Fate(victims=of_node), Fate(victims=trainers)]
            return [*every, Fate(victims=of_node, lost=(node,)), Fate(victims=(*trainers, *agents))]
        return [
            Fate(victims=own),
            Fate(victims=(own_agent,)),
            Fate(victims=own, leaves=True),
            Fate(victims=(*own, own_agent)),
            Fate(victims=of_node, lost=(node,)),
            Fate(victims=trainers, drains=True),
            Fate(victims=(*trainers, *agents)),
            Fate(victims=(other,), drains=True),
            Fate(victims=agents),
            Fate(victims=trainers, drains=True, ranks=self.ranks % 3 + 1),
            Fate(victims=(other,), leaves=True, drains=True),
            Fate(victims=(*trainers, *agents), ranks=self.ranks - 1),
            Fate(victims=(other, agents[-1])),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A job that meets its doom, and goes on to its end."""

    site: Site
    doom: Doom
    fate: Fate

    def __str__(self) -> str:
        return f"{self.doom}, {self.fate}"

    def survive(self, sweep: Sweep) -> None:
        """Run the job to its doom, look at what is there, and go on to its end."""
        site, modules, begins = self.site, MODULES[sweep.kind], sweep.begins()
        site.notes["killed"] = 0
        codes = site.train(self.doom, *begins, modules=modules, leaves=self.fate.leaves)
        if begins:
            site.drain([number_of(self.doom.process)])
        if any(codes):  # else agents were killed, or nobody was, or an agent came to its point behind trainers' ends
            victims = [one for doom in (self.doom, *begins) for one in doom.victims]
            # A trainer whose agent is killed raises `SaveFailed` if a save was pending.
            assert site.notes["killed"] and (any(map(is_trainer, victims)) or LEFT in codes), site.failure
            assert {*codes} <= {0, -signal.SIGKILL, LEFT}, site.failure
            self._go_on()

    def _go_on(self) -> None:
        """What is there when trainers have died is whole, nothing known is gone, and a job goes on from it."""
        site, notes, fate = self.site, self.site.notes, self.fate
        told = max(notes.of_ranks("committed", site.ranks))
        complete = functools.reduce(operator.and_, notes.of_ranks("completed", site.ranks)).bit_length() - 1
        captured, known = site.captured(), max(complete, told) if site.waits else told
        if fate.drains:
            site.drain()
            assert site.committed() >= known, f"step {known} was captured, and did not come to storage"
        committed = site.committed()
        assert committed >= told, f"the commit of step {told} is gone"
        assert max(captured, committed) >= known, f"step {known} was complete in memory: {captured}, {committed}"
        for node in fate.lost:
            site.lose(node)
        least = committed if fate.moves else max(known, captured)
        codes = site.train(ranks=fate.ranks)
        assert not any(codes), site.failure
        restored = {*notes.of_ranks("restored", site.ranks)}
        assert len(restored) == 1 and min(restored) >= least, f"went on from {restored}, {least} was known"

    def settle(self) -> None:
        """The job came to its end, and nothing is left of it but checkpoints, and what only `lakeckpt doctor` knows."""
        site, fate = self.site, self.fate
        site.drain() if fate.moves else site.join()
        assert site.committed() == LAST
        agents_ended = site.trainings > 1 or all(map(is_trainer, fate.victims))
        assert site.left(reclaimed=fate.moves or not agents_ended) == []


def sweep(rank: int, folder: str, what: Sweep) -> None:
    """Run a sweep in a process of its own, which adopts the agents; what failed is written down."""
    adopt()
    met, at = 0, "without a doom"
    trials: list[Trial] = []
    first = what.site(Path(folder, "first"))
    try:
        points = what.points(first)
        for number, (doom, fate) in enumerate(what.dooms(points)):
            trials.append(trial := Trial(site=what.site(Path(folder, str(number))), doom=doom, fate=fate))
            at = str(trial)
            what.prepare(trial.site)
            trial.survive(what)
            met += trial.site.notes["killed"] > len(what.begins())
            if number:  # an agent takes a second to end: of the one before, meanwhile
                at = str(trials[-2])
                trials[-2].settle()
        trials[-1].settle()
        assert met >= len(trials) // 2, f"only {met} of {len(trials)} came to their points"
    except BaseException:
        Path(folder, "failed").write_text(f"{at}: {traceback.format_exc()}")
        for site in (first, *(one.site for one in trials)):
            site.kill()
        raise


def is_trainer(process: str) -> bool:
    """Or else it is an agent."""
    return process.startswith("trainer")


def number_of(process: str) -> int:
    """The rank of a trainer or of its agent."""
    return int(process.partition(" ")[2])


def swept(what: Sweep) -> None:
    """Run a sweep; AssertionError saying where what did not hold."""
    with tempfile.TemporaryDirectory(prefix="lakeckpt-kills-") as folder:
        try:
            run_processes(1, sweep, folder, what, patience_s=SWEEP_S)
        except AssertionError as error:
            failed = Path(folder, "failed")
            raise AssertionError(failed.read_text() if failed.exists() else str(error)) from error
