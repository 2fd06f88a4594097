"""Arenas filled by hand, and agents as threads over a storage in memory: what the tests of agents stand on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.orders import Bye, Order, Outcome
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.checksums import checked
from lakeckpt.checkpoint.arena.contents import GenerationDocuments, TensorPlace, TensorTable, contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaKind, ArenaLayout
from lakeckpt.checkpoint.arena.slices import SlicePlan, plan_slices
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Begin
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.log import put_entry
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.lake.storage.base import Storage
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.shares import ShareList
from lakeckpt.tracking.waiting import Waiter
from tests.patience import PATIENCE_S

RUN = "0123456789abcdef" * 2
DIGEST = bytes(range(16))
"""By what the node knows it."""
SIZE = 256
SPEC = TensorSpec(key="m/w", dtype="uint8", shape=(SIZE,))
OWN = TensorSpec(key="m/own", dtype="uint8", shape=(SIZE,))
SETTINGS = Settings(keep=Keep(last=3), timeout_s=20.0)


def content(step: int, rank: int | None = None) -> bytes:
    """What a tensor holds at a step: the same on all ranks, or a rank's own."""
    return bytes([step % 251, 0 if rank is None else rank + 1]) * (SIZE // 2)


def plan() -> SlicePlan:
    return plan_slices({one.key: one.size_bytes for one in (SPEC, OWN)}, slice_bytes=128)


def make_arena(
    folder: str | Path, rank: int = 0, world_size: int = 1, *, generations: int = 3, kind: ArenaKind = "own"
) -> Arena:
    slices = plan()
    layout = ArenaLayout(
        identity=replace(identity_of(DIGEST, rank=rank, world_size=world_size), kind=kind),
        plan=slices.digest,
        data_bytes=slices.data_bytes,
        documents_bytes=8192,
        generations=generations,
    )
    return ArenaFolder(folder).create(layout)


def fill(
    arena: Arena, step: int, *, attempt: int = 0, common: int | None = None, shares: ShareList | None = None
) -> None:
    """Capture a step, which names the list of ``shares``."""
    slices, rank = plan(), arena.layout.identity.rank
    filling = arena.begin(common=step if common is None else common)
    assert filling is not None, "no generation to spare"
    places = {}
    for spec, data in ((SPEC, content(step)), (OWN, content(step, rank))):
        start, size = slices.places[spec.key]
        filling.data[start : start + size] = data
        places[spec.key] = TensorPlace(spec=spec, start=start)
    trees = {RANDOM: b"random of rank %d" % rank, "m": b"tree of step %d" % step}
    listed, document = (b"", b"") if shares is None else (shares.digest, shares.document)
    documents = GenerationDocuments(trees=trees, table=TensorTable(places=places), shares=document)
    cut = CutId(attempt=attempt, step=step)
    filling.complete(cut, digest=bytes(16), documents=documents.to_bytes(), shares=listed)


def take_checksums(folder: str | Path) -> None:
    """Do what agents do that have nothing else to do, for all generations in a folder."""
    arenas = ArenaFolder(folder)
    for info in arenas.found():
        is_parity = info.identity is not None and info.identity.kind == "parity"  # its agents have taken its checksums
        with arenas.open(info.name) as arena:
            for step in () if is_parity else info.steps:
                with arena.hold(step=step) as held:
                    assert held is not None
                    checked(contents_of(held))


def begin(storage: Storage, *, slot: int = 0, world_size: int = 1) -> None:
    """An attempt begins."""
    entry = Begin(run=RUN, slot=slot, world_size=world_size, library="x", created_s=0.0, write_id=f"begin {slot}")
    put_entry(storage, entry)


def attempt(number: int = 0) -> Attempt:
    return Attempt(run=RUN, number=number, last=number, parent=None, seed=1)


class ThreadPersister(Persister):
    """A persister on a thread of its own."""

    def __init__(self, *args: Any, rank: int, **options: Any) -> None:
        super().__init__(*args, rank=rank, **options)
        self._runs = threading.Thread(target=self.run, name=f"lakeckpt-persister-{rank}", daemon=True)

    def start(self) -> None:
        self._runs.start()

    def join(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until all is done; False where it is not by then."""
        self._runs.join(timeout_s)
        return not self._runs.is_alive()

    def leave(self) -> None:
        """The trainer ends well."""
        self.take(Bye())

    def die(self) -> None:
        """The trainer dies."""
        self.take(Bye(well=False))


class Desk:
    """A persister of one rank, and what it reported."""

    def __init__(
        self,
        storage: Storage,
        folder: str | Path,
        waiter: Waiter,
        *,
        rank: int = 0,
        world_size: int = 1,
        settings: Settings = SETTINGS,
        linger_s: float = 0.0,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.log: list[str] = []
        self.settled = threading.Event()  # something was reported since it was cleared
        self.persister = ThreadPersister(
            storage,
            Generations(ArenaFolder(folder), identity_of(DIGEST, rank=rank, world_size=world_size)),
            attempt(),
            rank=rank,
            world_size=world_size,
            settings=settings,
            waiter=waiter,
            report=self._report,
            log=self.log.append,
            linger_s=linger_s,
        )

    def _report(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.settled.set()

    def order(self, step: int, number: int) -> None:
        self.persister.take(Order(step=step, number=number))

    def said(self) -> list[tuple[int, str]]:
        """For each order that was answered, in order: its step, and what kind of an error it was ("" if none)."""
        return [(one.step, one.kind) for one in self.outcomes]
