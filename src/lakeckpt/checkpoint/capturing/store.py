"""Where does a rank's next generation lie?  Its arena: found again after a restart, made anew where it no longer fits.

`ArenaStore` holds the one arena that is being filled, with the copies of each slice made ready for each of its
generations. Making an arena takes as long as copying all of it, so this is done by the copier, beside training. An
arena that a plan has outgrown is kept until the new one holds two complete generations, unless both do not fit and the
new one alone does. So are those that the run has left from another number of ranks: nothing goes on from them, since
this attempt has begun. One whose file was removed by somebody is made anew.

Called by the copier alone, but for `ready`. It starts no threads.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.checksummer import Checksummer
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.capturing.moves import Links, Moves, early_moves, joined, late_moves
from lakeckpt.checkpoint.capturing.plan import CapturePlan
from lakeckpt.errors import ArenaError, ArenaTooLarge

__all__ = ["ArenaStore"]

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

    ``joins``: what comes from a device may be copied in larger parts than slices.
    """

    def __init__(
        self, folder: ArenaFolder, identity: ArenaIdentity, *, step: int, generations: int = 3, joins: bool = False
    ) -> None:
        self.arena: Arena | None = None
        self.checksummer: Checksummer | None = None
        """Takes the checksums of what comes from devices, where that is much."""
        self._warning: str | None = None
        self._was_removed = False
        self._folder, self._identity, self._step, self._generations = folder, identity, step, generations
        self._joins = joins
        self._outgrown: list[str] = []
        self._found: list[str] | None = None
        self._memory: torch.Tensor | None = None
        self._unpin: list[Callable[[], None]] = []
        self._moves: dict[int, tuple[CapturePlan, Moves, list[Moves]]] = {}
        self._links: Links = {}

    def ready(self, plan: CapturePlan, documents_bytes: int) -> bool:
        """Whether the arena fits, and is where it can be found."""
        layout = None if self.arena is None or not self.arena.is_there else self.arena.layout
        return layout is not None and layout.plan == plan.slices.digest and layout.documents_bytes >= documents_bytes

    def make(self, plan: CapturePlan, documents_bytes: int, links: Links) -> None:
        """Have the arena for ``plan``. `ArenaTooLarge`, `ArenaError`."""
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
        self._memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        self._links = links
        pinned = [link.pin(self._memory) for link in links.values()]
        self._unpin = [one for one in pinned if one is not None]
        if len(self._unpin) < len(pinned):
            self._warning = _SLOW
        for number in range(layout.generations):
            self.moves(plan, number)
        linked_bytes = sum(one.nbytes for one in plan.parted.late.values() if one.device in links)
        if linked_bytes >= _SUMMED_BESIDE_BYTES and not getattr(sys, "frozen", False):
            try:
                path = f"{self._folder.path}/{self.arena.name}"
                self.checksummer = Checksummer(path, leaf_bytes=layout.leaf_bytes)
            except Exception as error:  # threads take them then
                self._warning = _SUMMED_HERE.format(f"a process that takes checksums cannot be started ({error})")
        if self._was_removed:
            self._was_removed, self._warning = False, _REMOVED

    def warning(self) -> str | None:
        """What whoever trains is to be told, once."""
        told, self._warning = self._warning, None
        return told

    def _left(self) -> list[str]:
        """The names of the arenas that an earlier process of this rank has left; those of other worlds are outgrown."""
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
        """One that was left and fits, without what the history no longer holds; None where there is none."""
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
            if not self._outgrown or not self._folder.has_room(layout, instead_of=self._outgrown):
                raise
        self._remove_outgrown()  # both do not fit
        return self._folder.create(layout)

    def _remove_outgrown(self) -> None:
        for name in self._outgrown:
            self._folder.remove(name)
        self._outgrown = []

    def lose_checksummer(self, lost: Checksummer, why: str) -> None:
        """Have none any more, if it is that one: of two captures the first one tells."""
        if self.checksummer is lost:
            self._close_checksummer()
            self._warning = _SUMMED_HERE.format(why)

    def _close_checksummer(self) -> None:
        checksummer, self.checksummer = self.checksummer, None
        if checksummer is not None:
            checksummer.close()

    def _let_go(self) -> None:
        """Close the arena, which stays as it is."""
        self._close_checksummer()
        for unpin in self._unpin:
            unpin()
        self._unpin, self._memory = [], None
        self._moves.clear()
        if self.arena is not None:
            self._outgrown.append(self.arena.name)
            self.arena.close()
            self.arena = None

    def moves(self, plan: CapturePlan, number: int) -> tuple[Moves, list[Moves]]:
        """The copies of what is early, and of each slice, into generation ``number``: made ready once for a plan."""
        assert self.arena is not None and self._memory is not None
        known = self._moves.get(number)
        if known is not None and known[0] is plan:
            return known[1:]
        at = self.arena.layout.data_at(number)
        memory = self._memory[at : at + self.arena.layout.data_bytes]
        late = known[2] if known is not None and known[0].parted.late is plan.parted.late else None
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
        """A generation is complete: let go of what it replaces."""
        if self._outgrown and self.arena is not None and len({one.step for one in self.arena.complete()}) >= _ENOUGH:
            self._remove_outgrown()

    def close(self, *, remove: bool) -> None:
        """Let go of everything; ``remove``: the run ended well, and nobody needs the memory any more."""
        name = None if self.arena is None else self.arena.name
        self._let_go()
        if remove:
            self._remove_outgrown()
        elif name is not None:
            self._outgrown.remove(name)
