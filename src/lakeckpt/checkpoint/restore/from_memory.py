"""This module reads the cuts that this node's memory still holds of a run, if they are newer than what was committed.

A trainer that is started again finds the arenas of the one before. A generation in an arena may be restored if it goes
on from the history of the log: if it is of the attempt that restored or committed last (or is the one that this attempt
itself went on from), and not older than its newest commit. After a roll-back no generation goes on from the history.
What was consumed between the commit and the generation goes on as pending records, until a commit has it.

`Remembered` states what a node holds, and reads for one rank what `lakeckpt.recovery.decide` has chosen: the rank's own
share; or one of the same id, if the rank has changed its node; or what it needs of all shares, if another number of
ranks has captured them. It then takes them apart as it takes the parts of a checkpoint. Shares that its node does not
hold are read from other nodes (`lakeckpt.checkpoint.peers`), and the first rank of a node serves what the node holds.
If no source of a share is whole, or the share does not fit, an older cut or a checkpoint is restored instead. The
module writes nothing. Its threads are those of `lakeckpt.checkpoint.peers.serve`.
"""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lakeckpt.checkpoint.agent.generations import digest_of_run, identity_of
from lakeckpt.checkpoint.arena.contents import Contents, contents_from, contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import held_share, holdings_in, lists_in
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.consumed.pending import PendingRecord, pending_from_bytes, since
from lakeckpt.checkpoint.consumed.reports import reports_of
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, digest_of_leaves, short_digest
from lakeckpt.checkpoint.format.fields import ranges
from lakeckpt.checkpoint.format.manifest import Manifest, Restored
from lakeckpt.checkpoint.format.parts import PartRecord, SaveId, TensorRecord, TreeRecord
from lakeckpt.checkpoint.peers.fetch import PeerShare
from lakeckpt.checkpoint.peers.rebuilt import RebuiltShare
from lakeckpt.checkpoint.peers.serve import ShareServer, own_address
from lakeckpt.checkpoint.peers.sources import HeldShare, ShareSource
from lakeckpt.checkpoint.peers.wire import AskShare
from lakeckpt.checkpoint.restore.compare import Candidate
from lakeckpt.checkpoint.restore.from_storage import Selection, commit_in
from lakeckpt.checkpoint.state.loaded import Loaded, loaded_of, tree_of
from lakeckpt.checkpoint.state.random_states import RANDOM, check_random
from lakeckpt.errors import ArenaDamaged, CheckpointDamaged, CheckpointMismatch, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.recovery.decide import Decision, Source
from lakeckpt.recovery.facts import CutId, NodeFacts

__all__ = ["Offer", "Remembered", "where_it_goes_on"]

_LOG = logging.getLogger("lakeckpt")


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


class Remembered:
    """The memory of ``rank`` of ``world_size``, in ``folder``, of runs in ``storage``, and that of other nodes. Used by
    one thread, which calls `close` at the end. ``count(tier, bytes)`` is called for what is read."""

    def __init__(
        self,
        folder: ArenaFolder,
        storage: Storage,
        *,
        rank: int,
        world_size: int,
        count: Callable[[str, int], None] = lambda tier, size_bytes: None,
    ) -> None:
        self._folder, self._storage, self._rank, self._world_size = folder, storage, rank, world_size
        self._count = count
        self._held = ExitStack()
        self._server: ShareServer | None = None

    def found(self, run: str, ranks: Sequence[int], *, serves: bool = False) -> NodeFacts:
        """Return what this node holds of ``run``. These ``ranks`` run here. ``serves``: other nodes may read it, once
        they are admitted. Raises `ArenaError`."""
        digest = digest_of_run(run, self._storage)
        holdings = holdings_in(self._folder, digest, ranks=ranks, world_size=self._world_size)
        return NodeFacts(
            node=socket.gethostname(),
            ranks=tuple(ranks),
            holdings=holdings,
            address=self._served_at() if serves and holdings else "",
            lists=lists_in(self._folder, digest, holdings),
        )

    def _served_at(self) -> str:
        if self._server is None:
            try:
                self._server = ShareServer(self._folder, own_address())
            except OSError as error:
                _LOG.warning("this node serves nothing of its memory to others: %s", error)
                return ""
        return self._server.address

    def admit(self, run: str, key: bytes) -> None:
        """Let all who have the ``key`` read what this node holds of ``run``."""
        if self._server is not None:
            self._server.admit(key, digest_of_run(run, self._storage))

    def recall(self, run: str, decision: Decision, *, slot: int | None, key: bytes = b"") -> Candidate:
        """Read what was decided, which goes on from the commit in ``slot``, and lock it until `release`. Other nodes
        are asked with the ``key``.

        If ``slot`` is None, no commit could replace a generation that turns out to be damaged while it is copied. Then
        all of it is verified here, and once more as it is copied. Tensors are verified only if the agent has taken the
        generation's checksums. Raises `ArenaDamaged`, `WireError` and `CheckpointDamaged` if it is not what was
        written, and `CheckpointMismatch` if this number of ranks cannot take it.
        """
        self.release()
        cut = decision.cut
        assert cut is not None
        manifest = None if slot is None else commit_in(self._storage, slot)
        recorded = 0 if manifest is None else manifest.step
        shares = self._shares(run, decision, cut, key)
        for share in shares.values() if manifest is None else ():
            share.verify()
        own = shares.get(self._rank)
        is_own = own is not None and own.rank == self._rank and decision.world == self._world_size
        every = _readers_of([own] if own is not None and is_own else shares.values())
        done = cut.step == recorded
        loaded = self._loaded(decision, cut, shares, every)
        if loaded.random is None and (source := decision.documents.get(self._rank)) is not None:
            loaded = replace(loaded, random=self._random(run, decision, cut, source, key))
        return Candidate(
            manifest=manifest,
            captured=cut,
            is_checked=all(share.is_checked for share in shares.values()),
            step=cut.step,
            readers={name: pending[-1].record for name, pending in every.items() if pending},
            pending={name: () if done else since(pending, recorded) for name, pending in every.items()},
            loaded=loaded,
        )

    def _random(self, run: str, decision: Decision, cut: CutId, source: Source, key: bytes) -> dict[str, Any] | None:
        """Read the random states of this rank from a node that has kept them; None if that cannot be done."""
        own = identity_of(digest_of_run(run, self._storage), rank=self._rank, world_size=decision.world)
        asked = AskShare(identity=replace(own, kind="documents"), cut=cut, digest=decision.digest)
        with suppress(ArenaDamaged, CheckpointDamaged, WireError), ExitStack() as stack:
            trees = _fetched(source.address, key, asked, stack).documents.trees
            return check_random(tree_of(RANDOM, trees[RANDOM])[0])
        return None

    def _shares(self, run: str, decision: Decision, cut: CutId, key: bytes) -> dict[int, HeldShare]:
        """Hold the shares to read: rank → its share, or one that stands for it."""
        digest, found = digest_of_run(run, self._storage), dict[int, HeldShare]()
        held = {
            rank
            for one in holdings_in(self._folder, digest)
            if (one.cut, one.digest, one.world) == (cut, decision.digest, decision.world)
            for rank in (one.ranks if one.has_shares else ())
        }
        gone = f"step {cut.step} of attempt {cut.attempt} is not in memory any more"

        def source_of(one: Source) -> ShareSource:
            identity = identity_of(digest, rank=one.rank, world_size=decision.world)
            if one.members:
                computed = partial(_computed, one, identity, key, cut, decision.digest)
                return ShareSource(rank=one.rank, tier="other nodes", open=computed)
            if one.address:
                asked = AskShare(identity=identity, cut=cut, digest=decision.digest)
                fetched = partial(_fetched, one.address, key, asked)
                return ShareSource(rank=one.rank, tier="other nodes", open=fetched)
            is_own = one.rank == self._rank and decision.world == self._world_size
            opened = partial(_opened, self._folder, identity, cut, decision.digest, gone)
            return ShareSource(rank=one.rank, tier="own" if is_own else "own node", open=opened)

        for rank, sources in decision.reads(self._rank, self._world_size, held).items():
            found[rank] = share = HeldShare(map(source_of, sources), self._count, missing=gone, own=rank)
            self._held.callback(share.close)
        return found

    def _loaded(
        self,
        decision: Decision,
        cut: CutId,
        shares: Mapping[int, HeldShare],
        readers: Mapping[str, Sequence[PendingRecord]],
    ) -> Loaded:
        what = f"step {cut.step} in memory"
        is_same = decision.world == self._world_size
        if is_same and not decision.is_divided:
            ((_, share),) = shares.items()
            own = loaded_of(share.documents.trees, specs=share.specs, source=share, what=what)
            return own if share.rank == self._rank else replace(own, random=None)
        if not is_same and (several := sorted(reports_of(readers))):
            raise CheckpointMismatch(
                f"the places of {', '.join(map(repr, several))} depend on the data, and each of {decision.world} ranks "
                f"has its own: from memory, {self._world_size} ranks cannot go on from them"
            )
        every = [shares[decision.stand_in(rank, shares)] for rank in range(decision.world)]
        chosen = Selection.of(
            _parts_of(every, cut), saved_by=decision.world, rank=self._rank, world_size=self._world_size
        )
        holders = {key: every[record.ranks[0][0]] for key, record in chosen.records.items()}
        loaded = chosen.loaded(_Arenas(holders, chosen.records), what=what)
        is_own = self._rank < decision.world and every[self._rank].rank == self._rank
        return loaded if is_own else replace(loaded, random=None)

    def release(self) -> None:
        """Unlock what was read: it may be written again."""
        self._held.close()
        self._held = ExitStack()

    def close(self) -> None:
        """Release everything, and serve nothing any more."""
        self.release()
        if self._server is not None:
            self._server.close()
            self._server = None


def _opened(
    folder: ArenaFolder, identity: ArenaIdentity, cut: CutId, digest: bytes, gone: str, stack: ExitStack
) -> Contents:
    """Open a share that lies on this node. `ArenaDamaged` if it is not there."""
    if (held := stack.enter_context(held_share(folder, identity, cut, digest))) is None:
        raise ArenaDamaged(gone)
    return contents_of(held)


def _fetched(address: str, key: bytes, asked: AskShare, stack: ExitStack) -> Contents:
    """Open a share that another node serves. `ArenaDamaged` if it does not."""
    share = PeerShare(address, key, asked)
    stack.callback(share.close)
    return contents_from(share, share.documents(), share.checksums(), f"what {address} has sent")


def _computed(
    source: Source, identity: ArenaIdentity, key: bytes, cut: CutId, digest: bytes, stack: ExitStack
) -> Contents:
    """Open a share that is computed from parity. `ArenaDamaged` if that cannot be done."""

    def ask(rank: int, address: str, is_parity: bool) -> PeerShare:
        which = replace(identity, rank=rank, kind="parity" if is_parity else "own")
        return PeerShare(address, key, AskShare(identity=which, cut=cut, digest=digest))

    share = RebuiltShare(source, ask)
    stack.callback(share.close)
    return contents_from(share, share.documents(), share.checksums(), "what was computed from parity")


def _readers_of(shares: Collection[HeldShare]) -> dict[str, tuple[PendingRecord, ...]]:
    """Return the pending records of each reader, with the rows that any of the ranks excluded. Raises
    `CheckpointMismatch` if the ranks recorded anything else that differs."""
    found: dict[str, tuple[PendingRecord, ...]] = {}
    for share in shares:
        for name, data in share.documents.readers.items():
            pending = pending_from_bytes(data)
            known = found.setdefault(name, pending)
            if known is pending:
                continue
            if _without_excluded(known) != _without_excluded(pending):
                raise CheckpointMismatch(f"ranks recorded different steps of {name!r}, which only they can go on from")
            found[name] = tuple(map(_with_excluded, known, pending))
    return found


def _without_excluded(pending: Sequence[PendingRecord]) -> list[PendingRecord]:
    return [replace(one, record=replace(one.record, excluded=())) for one in pending]


def _with_excluded(one: PendingRecord, other: PendingRecord) -> PendingRecord:
    """Return a record with what both exclude; what several ranks report counts once."""
    more = tuple(excluded for excluded in other.record.excluded if excluded not in one.record.excluded)
    return replace(one, record=replace(one.record, excluded=one.record.excluded + more))


def _parts_of(every: Sequence[HeldShare], cut: CutId) -> list[PartRecord]:
    """Return the shares of all ranks that captured ``cut`` as parts, each unit with the ranks that have it alike."""
    tensors: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    trees: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    digests = {
        id(share): {key: digest_of_leaves([leaves]) for key, leaves in share.leaves().items()}
        for share in {id(one): one for one in every}.values()
    }
    for rank, share in enumerate(every):
        for key, digest in digests[id(share)].items():
            tensors[key, digest].append(rank)
        for item, document in share.documents.trees.items():
            trees[item, document].append(rank)
    return [
        PartRecord(
            run="",
            save=SaveId(attempt=cut.attempt, step=cut.step, number=0),
            rank=rank,
            world_size=len(every),
            cut=b"",
            files=(),
            tensors=tuple(
                TensorRecord(spec=share.specs[key], digest=digest, slabs=(), ranks=ranges(ranks))
                for (key, digest), ranks in tensors.items()
                if ranks[0] == rank
            ),
            trees=tuple(
                TreeRecord(item=item, document=document, digest=short_digest(document), ranks=ranges(ranks))
                for (item, document), ranks in trees.items()
                if ranks[0] == rank
            ),
        )
        for rank, share in enumerate(every)
    ]


class _Arenas:
    """The tensors ``records`` in the shares of several ranks: a `lakeckpt.checkpoint.state.loaded.TensorSource`."""

    __slots__ = ("_holders", "_records")

    def __init__(self, holders: Mapping[str, HeldShare], records: Mapping[str, TensorRecord]) -> None:
        self._holders, self._records = holders, records

    def fill(self, into: Mapping[str, memoryview]) -> None:
        by_share: defaultdict[int, dict[str, memoryview]] = defaultdict(dict)
        for key, target in into.items():
            by_share[id(self._holders[key])][key] = target
        for targets in by_share.values():
            self._holders[next(iter(targets))].fill(targets)

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        self._holders[key].fill_range(key, start, into)

    def unit_bytes(self, key: str) -> int:
        return LEAF_BYTES

    def same(self, one: str, other: str) -> bool:
        return self._records[one].digest == self._records[other].digest
