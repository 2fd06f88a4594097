"""This module reads the cuts that this node's memory still holds of a run, if they are newer than what was committed.

A trainer that is started again finds the arenas of the one before. A generation in an arena may be restored if it goes
on from the history of the log: if it is of the attempt that restored or committed last (or is the one that this attempt
itself went on from), and not older than its newest commit. After a roll-back no generation goes on from the history.
The newest generation that is complete on all ranks is restored. What was consumed between the commit and the generation
goes on as pending records, until a commit has it.

`Remembered` finds and reads generations for one rank; ``restorer`` agrees with the other ranks which one is restored.
If a generation is damaged or does not fit, a checkpoint is restored instead. The module writes nothing, and starts no
threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from lakeckpt.checkpoint.agent.generations import Generations, digest_of_run, identity_of
from lakeckpt.checkpoint.arena.contents import Contents, contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.consumed.pending import PendingRecord, pending_from_bytes, since
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.format.fields import CutId
from lakeckpt.checkpoint.format.manifest import Manifest, ReaderRecord, Restored
from lakeckpt.checkpoint.format.parts import SHARING
from lakeckpt.checkpoint.format.sharing import sharing_from_bytes
from lakeckpt.checkpoint.state.loaded import Loaded, loaded_of
from lakeckpt.checkpoint.state.wholes import wholes_of
from lakeckpt.errors import ArenaDamaged
from lakeckpt.lake.storage.base import Storage

__all__ = ["Offer", "Recalled", "Remembered", "where_it_goes_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Which generations go on from the history of the log."""

    attempt: int
    """The attempt that the history has come to."""
    least: int
    """Its generations count from this optimizer step on."""
    also: CutId | None
    """What that attempt went on from, itself."""

    def takes(self, one: CutId) -> bool:
        """Return whether a generation is among them."""
        return one == self.also if one.attempt != self.attempt else one.step >= self.least

    def to_text(self) -> str:
        """Return a text for the other ranks."""
        also = "" if self.also is None else self.also.to_text()
        return f"{self.attempt},{self.least},{also}"

    @classmethod
    def from_text(cls, text: str) -> Offer:
        """Return what `to_text` was given."""
        attempt, least, also = text.split(",")
        return cls(attempt=int(attempt), least=int(least), also=CutId.from_text(also) if also else None)


def where_it_goes_on(work: Restored | None, newest: Manifest | None) -> Offer | None:
    """Return which generations go on from ``newest``, the commit that is chosen; None if none does.

    ``work`` is what the attempt restored that the history has come to
    (`lakeckpt.checkpoint.persist.history.at_work`)."""
    if work is None or work.attempt is None:
        return None
    if newest is None:
        return None if work.restored is not None else _offer(work.attempt, work.captured, least=0)
    if newest.attempt == work.attempt:
        return _offer(work.attempt, work.captured, least=newest.step)
    if work.restored == newest.slot:
        return _offer(work.attempt, work.captured, least=newest.step + 1)
    return None  # the attempt went on from another commit: that one is damaged, or this one was


def _offer(attempt: int, captured: CutId | None, *, least: int) -> Offer:
    also = captured if captured is not None and captured.step >= least else None
    return Offer(attempt=attempt, least=least, also=also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A generation of this rank, read but for its tensors."""

    loaded: Loaded
    is_checked: bool
    """True if its tensors are compared with checksums as they are copied: the agent has taken them."""
    pending: Mapping[str, tuple[PendingRecord, ...]]
    """reader → what was consumed since the commit."""
    last: Mapping[str, ReaderRecord]
    """reader → its last pending record, which ends at the cut; its state is the same on every rank."""


class Remembered:
    """The memory of ``rank`` of ``world_size``, in ``folder``, of runs in ``storage``. Used by one thread, which calls
    `release` at the end."""

    def __init__(self, folder: ArenaFolder, storage: Storage, *, rank: int, world_size: int) -> None:
        self._folder, self._storage, self._rank, self._world_size = folder, storage, rank, world_size
        self._held = ExitStack()

    def found(self, run: str, offer: Offer) -> dict[CutId, bytes]:
        """Return the generations of ``run`` on ``offer`` that are complete here, with the digests of their cuts, which
        are the same on all ranks that were at one cut."""
        with closing(self._generations(run)) as generations:
            return {cut: digest for cut, digest in generations.cuts().items() if offer.takes(cut)}

    def _generations(self, run: str) -> Generations:
        digest = digest_of_run(run, self._storage)
        return Generations(self._folder, identity_of(digest, rank=self._rank, world_size=self._world_size))

    def recall(self, run: str, which: CutId, *, recorded: int | None) -> Recalled:
        """Read a generation, and lock it until `release`; the log has recorded all up to step ``recorded``.

        If ``recorded`` is None, no commit could replace a generation that turns out to be damaged while it is copied.
        Then all of it is verified here, and once more as it is copied. Tensors are verified only if the agent has taken
        the generation's checksums. Raises `ArenaDamaged`, `WireError` and
        `CheckpointDamaged` if it is not what was written.
        """
        self.release()
        generations = self._generations(run)
        self._held.callback(generations.close)
        held = self._held.enter_context(generations.hold(which))
        if held is None:
            raise ArenaDamaged(f"step {which.step} of attempt {which.attempt} is not in memory any more")
        contents = contents_of(held)
        if recorded is None:
            contents.verify()
        trees = contents.documents.trees
        shared = sharing_from_bytes(trees[SHARING]) if SHARING in trees else {}
        every = {name: pending_from_bytes(data) for name, data in contents.documents.readers.items()}
        loaded = loaded_of(
            trees,
            specs=contents.specs,
            wholes=wholes_of(contents.specs, shared),
            source=_InArena(contents),
            what=f"step {which.step} in memory",
        )
        done = which.step == (recorded or 0)
        return Recalled(
            loaded=loaded,
            is_checked=contents.checksums is not None,
            pending={name: () if done else since(pending, recorded or 0) for name, pending in every.items()},
            last={name: pending[-1].record for name, pending in every.items() if pending},
        )

    def release(self) -> None:
        """Unlock the generation that was read: it may be written again."""
        self._held.close()
        self._held = ExitStack()


class _InArena:
    """Tensors in a generation that is locked."""

    __slots__ = ("_contents",)

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def fill(self, into: Mapping[str, memoryview]) -> None:
        self._contents.fill(into)

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        self._contents.fill_range(key, start, into)

    def unit_bytes(self, key: str) -> int:
        return LEAF_BYTES

    def same(self, one: str, other: str) -> bool:
        return self._contents.read(one) == self._contents.read(other)
