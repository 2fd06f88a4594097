"""What of a run does this node's memory still hold, and is it newer than what was committed?

A trainer that is started again finds the arenas of the one before. A generation may be restored if it goes on from the
history of the log: if it is of the attempt that restored or committed last (or is the one that this attempt itself went
on from), and not older than its newest commit. After a roll-back nothing of memory goes on from the history. It must be
complete on every rank: the newest that all ranks have is taken. What was consumed between the commit and the generation
goes on as *legs*, until a commit has it.

`Remembered` looks and reads for one rank; which generation is taken, the ranks settle in ``restorer``. Whatever is
wrong with memory, a checkpoint is taken instead. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from lakeckpt.checkpoint.agent.generations import Generations, digest_of_run, identity_of
from lakeckpt.checkpoint.agreement import Talk
from lakeckpt.checkpoint.arena.contents import Contents, contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.journal import Leg, legs_from_bytes, since
from lakeckpt.checkpoint.load import loaded_of
from lakeckpt.checkpoint.loaded import Loaded
from lakeckpt.checkpoint.manifest import Captured, Manifest, ReaderRecord, Restored
from lakeckpt.checkpoint.parts import SHARING
from lakeckpt.checkpoint.shards import wholes_of
from lakeckpt.checkpoint.sharing import sharing_from_bytes
from lakeckpt.core.skips import SkipList
from lakeckpt.errors import ArenaDamaged
from lakeckpt.lake.storage import Storage
from lakeckpt.tracking.merge import is_part, merge_states
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.skips import skips_from_wire, skips_to_wire

__all__ = ["Offer", "Recalled", "Remembered", "readers_of", "where_it_goes_on"]

_KIND, _VERSION = "recalled", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Which generations go on from the history of the log."""

    attempt: int
    """The attempt that the history has come to."""
    least: int
    """Its generations count from this optimizer step on."""
    also: Captured | None
    """What that attempt went on from, itself."""

    def takes(self, one: Captured) -> bool:
        """Whether a generation is among them."""
        return one == self.also if one.attempt != self.attempt else one.step >= self.least

    def to_text(self) -> str:
        """For the other ranks."""
        also = "" if self.also is None else self.also.to_text()
        return f"{self.attempt},{self.least},{also}"

    @classmethod
    def from_text(cls, text: str) -> Offer:
        """What `to_text` has said."""
        attempt, least, also = text.split(",")
        return cls(attempt=int(attempt), least=int(least), also=Captured.from_text(also) if also else None)


def where_it_goes_on(work: Restored | None, newest: Manifest | None) -> Offer | None:
    """What memory may offer beyond ``newest``, the commit that is chosen; ``work`` is what the attempt restored that
    the history has come to (`lakeckpt.checkpoint.ledger.at_work`). None where nothing may be."""
    if work is None or work.attempt is None:
        return None
    if newest is None:
        return None if work.restored is not None else _offer(work.attempt, work.captured, least=0)
    if newest.attempt == work.attempt:
        return _offer(work.attempt, work.captured, least=newest.step)
    if work.restored == newest.slot:
        return _offer(work.attempt, work.captured, least=newest.step + 1)
    return None  # the attempt went on from another commit: that one is damaged, or this one was


def _offer(attempt: int, captured: Captured | None, *, least: int) -> Offer:
    also = captured if captured is not None and captured.step >= least else None
    return Offer(attempt=attempt, least=least, also=also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A generation of this rank, read but for its tensors."""

    loaded: Loaded
    legs: Mapping[str, tuple[Leg, ...]]
    """reader → what was consumed since the commit."""
    last: Mapping[str, ReaderRecord]
    """reader → the record of its last leg, which ends at the cut: state and skips are this rank's own."""


class Remembered:
    """The memory of ``rank`` of ``world_size``, in ``folder``, of runs in ``storage``. Used by one thread; `let_go` of
    it at the end."""

    def __init__(self, folder: ArenaFolder, storage: Storage, *, rank: int, world_size: int) -> None:
        self._folder, self._storage, self._rank, self._world_size = folder, storage, rank, world_size
        self._held = ExitStack()

    def found(self, run: str, offer: Offer) -> dict[Captured, bytes]:
        """The generations of ``run`` that are complete here, of those that are on ``offer``, and the digests of their
        cuts: those of other ranks have the same, unless the ranks were not at one cut."""
        attempts = {offer.attempt} | ({offer.also.attempt} if offer.also is not None else set())
        generations = self._generations(run)
        try:
            every = {
                Captured(attempt=one, step=step): cut
                for one in attempts
                for step, cut in generations.cuts(str(one)).items()
            }
        finally:
            generations.close()
        return {one: cut for one, cut in every.items() if offer.takes(one)}

    def _generations(self, run: str) -> Generations:
        digest = digest_of_run(run, self._storage)
        return Generations(self._folder, identity_of(digest, rank=self._rank, world_size=self._world_size))

    def recall(self, run: str, which: Captured, *, recorded: int | None) -> Recalled:
        """Read a generation, which stays as it is until `let_go`; the log has recorded all up to step ``recorded``.

        None: it holds no commit yet, and so nothing that could replace what is found damaged when it has been copied:
        all of it is verified here, and once more as it is copied. Raises `ArenaDamaged`, `WireError` and
        `CheckpointDamaged` where it is not what was written.
        """
        self.let_go()
        generations = self._generations(run)
        self._held.callback(generations.close)
        held = self._held.enter_context(generations.hold(which.step, str(which.attempt)))
        if held is None:
            raise ArenaDamaged(f"step {which.step} of attempt {which.attempt} is not in memory any more")
        contents = contents_of(held)
        if recorded is None:
            contents.verify()
        trees = contents.documents.trees
        shared = sharing_from_bytes(trees[SHARING]) if SHARING in trees else {}
        every = {name: legs_from_bytes(data) for name, data in contents.documents.readers.items()}
        loaded = loaded_of(
            trees,
            specs=contents.specs,
            wholes=wholes_of(contents.specs, shared),
            source=_InArena(contents),
            is_new=False,
            per_rank=(),
            what=f"step {which.step} in memory",
            is_own=self._world_size > 1,
        )
        done = which.step == (recorded or 0)
        return Recalled(
            loaded=loaded,
            legs={name: () if done else since(legs, recorded or 0) for name, legs in every.items()},
            last={name: legs[-1].record for name, legs in every.items() if legs},
        )

    def let_go(self) -> None:
        """The generation that was recalled may be written again."""
        self._held.close()
        self._held = ExitStack()


class _InArena:
    """Tensors in a generation that is held."""

    __slots__ = ("_contents",)

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def fill(self, into: Mapping[str, memoryview]) -> None:
        self._contents.fill(into)

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        self._contents.fill_range(key, start, into)

    def unit_bytes(self, key: str) -> int:
        return self._contents.held.arena.layout.leaf_bytes

    def same(self, one: str, other: str) -> bool:
        return bool(self._contents.tensor(one) == self._contents.tensor(other))


def readers_of(last: Mapping[str, ReaderRecord], talk: Talk) -> dict[str, ReaderRecord]:
    """The records of readers of the whole job at the cut, of those of all ranks (see `Recalled.last`); collective."""
    mine = {
        name: [[dict(one.state)] if is_part(one.state) else [], skips_to_wire(one.skips)] for name, one in last.items()
    }
    every = _unpacked(talk.combine(_packed([mine]), _joined))
    found = {}
    for name, one in last.items():
        parts = [state for rank in every for state in rank[name][0]]
        skips = SkipList().union(*(skips_from_wire(rank[name][1]) for rank in every))
        found[name] = replace(one, state=merge_states(parts) if is_part(one.state) else one.state, skips=skips)
    return found


def _joined(messages: Sequence[bytes]) -> bytes:
    return _packed([one for message in messages for one in _unpacked(message)])


def _packed(ranks: Iterable[Mapping[str, list[Any]]]) -> bytes:
    return dumps(list(ranks), kind=_KIND, version=_VERSION)


def _unpacked(data: bytes) -> list[dict[str, list[Any]]]:
    found: list[dict[str, list[Any]]] = loads(data, kind=_KIND, supported=_VERSION).value
    return found
