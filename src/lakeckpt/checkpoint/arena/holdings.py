"""This module lists what a node's memory holds of a run: which cuts, and whose shares of each cut.

A share is what one rank has captured of a cut. It lies in the arena of the rank, or in one with copies of what the rank
has captured on another node. Shares of one id restore the same state. If a cut names a list of shares
(`lakeckpt.recovery.shares`), this has the ids. Else the id is a digest of the tensors, of the documents without the
random states, and of the records of readers. To compute it, documents are read, and the checksums of the data must have
been taken; so it is computed only if a rank may read a share that another rank has captured. The module writes nothing
but `remove_other_worlds`. Imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from lakeckpt.checkpoint.arena.arena import HeldGeneration
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder, ArenaInfo
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaKind
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.errors import ArenaDamaged, ArenaError
from lakeckpt.recovery.facts import CutId, Holding
from lakeckpt.recovery.shares import UNKNOWN

__all__ = ["held_share", "holdings_in", "lists_in", "remove_copies", "remove_other_worlds"]

_KINDS: tuple[ArenaKind, ...] = ("own", "copy")
"""Where a share is looked for, the best place first."""


def holdings_in(
    folder: ArenaFolder, run: bytes, *, ranks: Collection[int] = (), world_size: int = 0
) -> tuple[Holding, ...]:
    """Return what ``folder`` holds of the run with this digest, or whose digest begins so, the newest cut first.

    ``ranks`` of ``world_size`` run here now: the ids of shares are computed if others have captured them; 0: they are
    not computed. Raises `ArenaError` if the arenas cannot be looked at.
    """
    found: defaultdict[tuple[CutId, bytes, int, bytes, bool, tuple[int, ...]], dict[int, ArenaInfo]] = defaultdict(dict)
    whose: set[int] = set()  # the ranks of a job of as many ranks that have arenas here
    for info in folder.found():
        if info.identity is not None and info.identity.run.startswith(run):
            is_whose = (info.identity.world, info.identity.kind) == (world_size, "own")
            whose |= {info.identity.rank} if is_whose else set()
            is_paper, members = info.identity.kind == "documents", info.identity.members
            for cut, digest in info.cuts.items():
                arenas = found[cut, digest, info.identity.world, info.listed.get(cut, b""), is_paper, members]
                if info.identity.kind == "own" or info.identity.rank not in arenas:
                    arenas[info.identity.rank] = info
    every = []
    for (cut, digest, world, listed, is_paper, members), arenas in sorted(
        found.items(), key=lambda one: one[0][0].age, reverse=True
    ):
        is_own = (
            is_paper or bool(members) or bool(listed) or not world_size or (world == world_size and whose == set(ranks))
        )
        shares = b"" if is_own else b"".join(_share_id(folder, arenas[rank], cut) for rank in sorted(arenas))
        ranks_here = tuple(sorted(arenas))
        divided = any(cut in info.divided for info in arenas.values())
        every.append(
            Holding(
                cut=cut,
                digest=digest,
                world=world,
                ranks=ranks_here,
                shares=shares,
                listed=listed,
                divided=divided,
                documents=is_paper,
                members=members,
            )
        )
    return tuple(every)


def lists_in(folder: ArenaFolder, run: bytes, holdings: Iterable[Holding]) -> tuple[bytes, ...]:
    """Return the documents of the lists of shares that ``holdings`` of the run with this digest name. A list that
    cannot be read is missing."""
    found: dict[bytes, bytes] = {}
    for one in holdings:
        for rank in one.ranks:
            if one.listed and not one.members and one.listed not in found:
                identity = ArenaIdentity(run=run, rank=rank, world=one.world)
                with contextlib.suppress(ArenaError), held_share(folder, identity, one.cut, one.digest) as held:
                    if held is not None:
                        found[one.listed] = contents_of(held).documents.shares
    return tuple(found.values())


@contextlib.contextmanager
def held_share(
    folder: ArenaFolder, identity: ArenaIdentity, cut: CutId, digest: bytes
) -> Iterator[HeldGeneration | None]:
    """Lock what the rank of ``identity`` has captured of the ``cut`` with this digest while the block runs: in the
    rank's arena, else in one with copies; if the identity is of documents, these alone. Yields None if the node does
    not have it. Raises `ArenaError`."""
    kinds = _KINDS if identity.kind == "own" else (identity.kind,)
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            with contextlib.suppress(FileNotFoundError):
                arena = stack.enter_context(folder.open(folder.name_of(replace(identity, kind=kind))))
                held = stack.enter_context(arena.hold(cut))
                if held is not None and held.record.digest == digest:
                    yield held
                    return
        yield None


def _share_id(folder: ArenaFolder, info: ArenaInfo, cut: CutId) -> bytes:
    """Return the id of the share of ``cut`` in an arena; `UNKNOWN` if it has no checksums, or cannot be read."""
    with (
        contextlib.suppress(ArenaDamaged, FileNotFoundError),
        folder.open(info.name) as arena,
        arena.hold(cut) as held,
    ):
        if held is not None and (contents := contents_of(held)).checksums is not None:
            documents = contents.documents
            named = [*sorted(documents.trees.items()), *sorted(documents.readers.items())]
            parts = [part for name, document in named if name != RANDOM for part in (name.encode(), document)]
            return short_digest(documents.table.document, contents.checksums, *parts)
    return UNKNOWN


def remove_other_worlds(folder: ArenaFolder, identity: ArenaIdentity) -> bool:
    """Remove the arenas that the run of ``identity`` has left here from other numbers of ranks, and that nobody fills.
    Return whether there were any."""
    found = [
        info.name
        for info in folder.found()
        if info.identity is not None and info.identity.run == identity.run and info.identity.world != identity.world
    ]
    for name in found:
        with contextlib.suppress(ArenaError):
            folder.remove(name)
    return bool(found)


def remove_copies(folder: ArenaFolder, run: bytes, *, but: Mapping[ArenaKind, Collection[int]] | None = None) -> None:
    """Remove what this node keeps of shares of other nodes, of the run with this digest, ``but`` of these ranks, by the
    kind of arena. What is under way stays."""
    for info in folder.found():
        identity = info.identity
        if identity is None or identity.run != run or identity.kind == "own":
            continue
        if identity.rank not in (but or {}).get(identity.kind, ()):
            with contextlib.suppress(ArenaError):
                folder.remove(info.name)
