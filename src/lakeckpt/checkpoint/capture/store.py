"""This module holds the arena that a rank fills: it finds the arena of an earlier process, or makes a new arena.

`ArenaStore` holds one arena, with the copies of each slice prepared for each generation. To make an arena takes as long
as to copy all of it, so the copier makes it, beside training. An arena that is too small for a plan is kept until the
new arena holds two complete generations, unless only the new one fits into memory. Arenas that the run has left from
another number of ranks are kept as long: no attempt goes on from them, because this attempt has begun. An arena whose
file was removed by others is made again.

Only the copier calls the store, except for `ready`. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.capture.moves import Links, Moves, early_moves, joined, late_moves
from lakeckpt.checkpoint.capture.plan import CapturePlan
from lakeckpt.errors import ArenaError, ArenaTooLarge

__all__ = ["ArenaStore"]

_LOG = logging.getLogger("lakeckpt")
_ENOUGH = 2
_DOCUMENTS_BYTES = 256 * 2**10
_JOINED_BYTES = 512 * 2**20
"""Ten milliseconds on the link of a GPU."""
_SUMMED_BESIDE_BYTES = 256 * 2**20
"""Less, and helpers of the copier take the checksums in no time."""
_SLOW = """CUDA cannot pin the memory of the arena: captures are correct, and training waits for copies at its fences. \
Let arenas lie in host memory (/dev/shm), not on a disk"""
_SUMMED_HERE = "{}: checksums are taken by threads of this one from now on, which costs what queues kernels some time"
_REMOVED = """the file of an arena was removed while its trainer lived; another one was made. Until the next cut is \
complete, what is not in storage can be lost. Where nobody has emptied the folder, systemd does so as a user logs out: \
RemoveIPC=no in logind.conf, or another folder for arenas, prevents that"""


class ArenaStore:
    """The arenas of ``identity`` in ``folder``, for a history that goes on after ``step``.

    ``joins``: the copies of adjacent slices of a device may be made together.
    """

    def __init__(
        self,
        folder: ArenaFolder,
        identity: ArenaIdentity,
        *,
        step: int,
        generations: int = 3,
        joins: bool = False,
        checksummer: Callable[[], Checksummer | None] = lambda: None,
    ) -> None:
        self.arena: Arena | None = None
        self.checksummer: Checksummer | None = None
        """Takes the checksums of bytes from devices, where they are many."""
        self._warning: str | None = None
        self._was_removed = False
        self._folder, self._identity, self._step, self._generations = folder, identity, step, generations
        self._joins = joins
        self._asks = checksummer
        self._outgrown: list[str] = []
        self._found: list[str] | None = None
        self._memory: torch.Tensor | None = None
        self._unpin: list[Callable[[], None]] = []
        self._moves: dict[int, tuple[CapturePlan, Moves, list[Moves]]] = {}
        self._links: Links = {}

    def ready(self, plan: CapturePlan, documents_bytes: int) -> bool:
        """Return whether the arena fits, and its file is still there."""
        layout = None if self.arena is None or not self.arena.is_there else self.arena.layout
        return layout is not None and layout.plan == plan.slices.digest and layout.documents_bytes >= documents_bytes

    def make(self, plan: CapturePlan, documents_bytes: int, links: Links) -> None:
        """Make or find the arena for ``plan``. Raises `ArenaTooLarge`, `ArenaError`."""
        layout = ArenaLayout(
            identity=self._identity,
            plan=plan.slices.digest,
            data_bytes=plan.slices.data_bytes,
            slice_bytes=plan.slices.slice_bytes,
            documents_bytes=max(_DOCUMENTS_BYTES, 2 * documents_bytes),
            generations=self._generations,
        )
        if self._found is None:
            self._found = self._left()
        self._was_removed = self._was_removed or (self.arena is not None and not self.arena.is_there)
        self._let_go()
        self.arena = self._again(layout) or self._new(layout)
        self.arena.touch()
        _LOG.info(
            "captures of rank %d take %.2f GiB of memory in %s: %d generations of its state",
            self._identity.rank,
            layout.size_bytes / 2**30,
            self._folder.path,
            layout.generations,
        )
        self._memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        self._links = links
        pinned = [link.pin(self._memory) for link in links.values()]
        self._unpin = [one for one in pinned if one is not None]
        if len(self._unpin) < len(pinned):
            self._warning = _SLOW
        for number in range(layout.generations):
            self.moves(plan, number)
        linked_bytes = sum(one.nbytes for one in plan.late.values() if one.device in links)
        if linked_bytes >= _SUMMED_BESIDE_BYTES and (checksummer := self._asks()) is not None:
            checksummer.use(self.arena.name, leaf_bytes=layout.leaf_bytes)
            self.checksummer = checksummer
        if self._was_removed:
            self._was_removed, self._warning = False, _REMOVED

    def warning(self) -> str | None:
        """Return the warning for the user, if there is one. Each warning is returned once."""
        warning, self._warning = self._warning, None
        return warning

    def _left(self) -> list[str]:
        """Return the arenas of an earlier process of this rank. Arenas of another number of ranks count as outgrown."""
        found = []
        for one in self._folder.found():
            if one.identity is None or one.identity.run != self._identity.run or one.is_filled:
                continue
            if one.identity.world != self._identity.world:
                self._outgrown.append(one.name)
            elif one.identity == self._identity:
                found.append(one.name)
        return found

    def _again(self, layout: ArenaLayout) -> Arena | None:
        """Return a left arena that fits, without the steps that the history no longer holds; None if there is none."""
        assert self._found is not None
        for name in self._found:
            with contextlib.suppress(ArenaError, FileNotFoundError):
                arena = self._folder.open(name, writes=True)
                same = (arena.layout.plan, arena.layout.slice_bytes, arena.layout.data_bytes, arena.layout.generations)
                if same == (layout.plan, layout.slice_bytes, layout.data_bytes, layout.generations) and (
                    arena.layout.documents_bytes >= layout.documents_bytes // 2
                ):
                    arena.forget(self._step)
                    self._outgrown += [one for one in self._found if one != name]
                    self._found = []
                    return arena
                arena.close()
        return None

    def _new(self, layout: ArenaLayout) -> Arena:
        assert self._found is not None
        self._outgrown += self._found
        self._found = []
        try:
            return self._folder.create(layout)
        except ArenaTooLarge:
            if not self._outgrown:
                raise
        self._remove_outgrown()  # both do not fit
        return self._folder.create(layout)

    def _remove_outgrown(self) -> None:
        for name in self._outgrown:
            self._folder.remove(name)
        self._outgrown = []

    def lose_checksummer(self, lost: Checksummer, why: str) -> None:
        """Drop the process, if it is still in use: of two captures the first one reports it."""
        if self.checksummer is lost:
            self.checksummer = None
            self._warning = _SUMMED_HERE.format(why)

    def _let_go(self) -> None:
        """Close the arena; its file stays."""
        self.checksummer = None
        for unpin in self._unpin:
            unpin()
        self._unpin, self._memory = [], None
        self._moves.clear()
        if self.arena is not None:
            self._outgrown.append(self.arena.name)
            self.arena.close()
            self.arena = None

    def moves(self, plan: CapturePlan, number: int) -> tuple[Moves, list[Moves]]:
        """Return the copies of the early tensors and of each slice into generation ``number``, made once per plan."""
        assert self.arena is not None and self._memory is not None
        known = self._moves.get(number)
        if known is not None and known[0] is plan:
            return known[1:]
        at = self.arena.layout.data_at(number)
        memory = self._memory[at : at + self.arena.layout.data_bytes]
        late = known[2] if known is not None and known[0].late is plan.late else None
        found = (
            plan,
            early_moves(plan, memory, self._links),
            self._late(plan, memory) if late is None else late,
        )
        self._moves[number] = found
        return found[1:]

    def _late(self, plan: CapturePlan, memory: torch.Tensor) -> list[Moves]:
        moves = late_moves(plan, memory, self._links)
        return joined(moves, most_bytes=_JOINED_BYTES) if self._joins else moves

    def completed(self) -> None:
        """Remove the outgrown arenas if the arena has enough complete generations. Called after each complete one."""
        if self._outgrown and self.arena is not None and len({one.step for one in self.arena.complete()}) >= _ENOUGH:
            self._remove_outgrown()

    def close(self, *, remove: bool) -> None:
        """Close everything. ``remove``: the run ended well, and nobody needs the memory any more."""
        name = None if self.arena is None else self.arena.name
        self._let_go()
        if remove:
            self._remove_outgrown()
        elif name is not None:
            self._outgrown.remove(name)
