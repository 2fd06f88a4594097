"""This module holds the arena that a rank fills: it finds the arena of an earlier process, or makes a new arena.

`ArenaStore` holds one arena, with the copies of each slice prepared for each generation. To make an arena takes as long
as to copy all of it, so the copier makes it, beside training. A new arena takes the place of the arena before: if a
state has outgrown its arena, no cut is in memory until the next one is complete. Arenas that the run has left from
another number of ranks stay until two newer cuts are complete here, as another rank may be a cut behind, or until their
room is needed. An arena whose file was removed by others is made again.

Only the copier calls the store, except for `ready`. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import remove_other_worlds
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.capture.kept import KeptTensors
from lakeckpt.checkpoint.capture.moves import Links, Moves, early_moves, joined, late_moves
from lakeckpt.checkpoint.capture.plan import CapturePlan
from lakeckpt.errors import ArenaDamaged, ArenaError

__all__ = ["ArenaStore"]

_LOG = logging.getLogger("lakeckpt")
_DOCUMENTS_BYTES = 256 * 2**10
_JOINED_BYTES = 512 * 2**20
"""Ten milliseconds on the link of a GPU."""
_SLOW = """CUDA cannot pin the memory of the arena: captures are correct, and training waits for copies at its fences. \
Let arenas lie in host memory (/dev/shm), not on a disk"""
_REMOVED = """the file of an arena was removed while its trainer lived; another one was made. Until the next cut is \
complete, what is not in storage can be lost. If nobody has emptied the folder, systemd does so as a user logs out: \
RemoveIPC=no in logind.conf, or another folder for arenas, prevents that"""


class ArenaStore:
    """The arena of ``identity`` in ``folder``, for a history that goes on after ``step``.

    ``joins``: the copies of adjacent slices of a device may be made together. ``ranks_here``: so many ranks of the run
    fill arenas in the folder. All of them make their stores before any makes an arena.
    """

    def __init__(
        self,
        folder: ArenaFolder,
        identity: ArenaIdentity,
        *,
        step: int,
        generations: int = 3,
        joins: bool = False,
        ranks_here: int = 1,
    ) -> None:
        self.arena: Arena | None = None
        self._was_removed = False
        self._has_others = True  # of another number of ranks, perhaps
        self._folder, self._identity, self._step, self._generations = folder, identity, step, generations
        self._joins = joins
        self._ranks_here = ranks_here
        self._room_bytes = folder.room_bytes(identity.run) if ranks_here > 1 else 0
        self._memory: torch.Tensor | None = None
        self._unpin: list[Callable[[], None]] = []
        self._moves: dict[int, tuple[CapturePlan, Moves, dict[frozenset[str], list[Moves]]]] = {}
        self.kept = KeptTensors()
        """The tensors that each generation holds already."""
        self._links: Links = {}

    def ready(self, plan: CapturePlan, documents_bytes: int) -> bool:
        """Return whether the arena fits, and its file is still there."""
        layout = None if self.arena is None or not self.arena.is_there else self.arena.layout
        return layout is not None and layout.plan == plan.slices.digest and layout.documents_bytes >= documents_bytes

    def make(self, plan: CapturePlan, documents_bytes: int, links: Links) -> str | None:
        """Make or find the arena for ``plan``. Returns a warning for the user, or None.

        Raises `ArenaError` if no room is free for it, or another process fills it.
        """
        layout = ArenaLayout(
            identity=self._identity,
            plan=plan.slices.digest,
            data_bytes=plan.slices.data_bytes,
            documents_bytes=max(_DOCUMENTS_BYTES, 2 * documents_bytes),
            generations=self._generations,
        )
        self._was_removed = self._was_removed or (self.arena is not None and not self.arena.is_there)
        self.close()
        self.arena = self._again(layout) or self._made(layout)
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
        for number in range(layout.generations):
            self.moves(plan, number)
        was_removed, self._was_removed = self._was_removed, False
        if was_removed:
            return _REMOVED
        return _SLOW if len(self._unpin) < len(pinned) else None

    def _made(self, layout: ArenaLayout) -> Arena:
        """Return a new arena. Cuts of another number of ranks are removed for it only if there is no other room.

        The first is refused if there is no room for the arenas of all ranks of this node. So all ranks refuse, and none
        takes memory that the system then takes from others.
        """
        if self._ranks_here > 1:
            self._folder.refuse_without_room(layout, self._room_bytes, ranks=self._ranks_here)
            self._ranks_here = 1
        try:
            return self._folder.create(layout)
        except ArenaError:
            if not remove_other_worlds(self._folder, self._identity):
                raise
            return self._folder.create(layout)

    def completed(self) -> None:
        """A generation is complete."""
        if self._has_others and self.arena is not None and sum(cut.step > self._step for cut in self.arena.cuts()) > 1:
            self._has_others = False
            with contextlib.suppress(ArenaError):
                remove_other_worlds(self._folder, self._identity)

    def _again(self, layout: ArenaLayout) -> Arena | None:
        """Return the arena of an earlier process of this rank, without the steps that the history no longer holds; None
        if there is none that fits."""
        with contextlib.suppress(ArenaDamaged, FileNotFoundError):
            arena = self._folder.open(self._folder.name_of(self._identity), writes=True)
            fits = arena.layout.documents_bytes >= layout.documents_bytes // 2
            if fits and replace(arena.layout, documents_bytes=layout.documents_bytes) == layout:
                arena.forget(self._step)
                return arena
            arena.close()
        return None

    def close(self) -> None:
        """Close the arena, if there is one. Its file stays."""
        for unpin in self._unpin:
            unpin()
        self._unpin, self._memory = [], None
        self._moves.clear()
        self.kept.clear()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def moves(self, plan: CapturePlan, number: int, skips: frozenset[str] = frozenset()) -> tuple[Moves, list[Moves]]:
        """Return the copies of the early tensors and of each slice into generation ``number``, made once per plan.
        Late tensors that ``skips`` names lie there already."""
        assert self.arena is not None and self._memory is not None
        known = self._moves.get(number)
        at = self.arena.layout.data_at(number)
        memory = self._memory[at : at + self.arena.layout.data_bytes]
        if known is None or known[0] is not plan:
            late = known[2] if known is not None and known[0].late is plan.late else {}
            self._moves[number] = known = plan, early_moves(plan, memory, self._links), late
        _, early, late = known
        if skips not in late:
            for other in [other for other in late if other]:  # which tensors are frozen has changed
                del late[other]
            late[skips] = self._late(plan, memory, skips)
        return early, late[skips]

    def _late(self, plan: CapturePlan, memory: torch.Tensor, skips: frozenset[str]) -> list[Moves]:
        moves = late_moves(plan, memory, self._links, skips=skips)
        return joined(moves, most_bytes=_JOINED_BYTES) if self._joins else moves
