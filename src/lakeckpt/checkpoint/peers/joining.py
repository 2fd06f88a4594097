"""This module joins the pieces that other nodes give to this one to parity, in arenas of two slots each.

`ParityKeeper.take` serves one member that gives its pieces of a cut. The first one begins a slot, and each one adds its
pieces to it by XOR. Each leaf is compared with its checksum as it comes. When all members have given theirs, the slot
is whole, and only then each of them is told so: a share is protected by the parity of all. If a member fails, or gives
a newer cut, the slot is abandoned, and those that wait learn why. The slot before stays.

The module starts no threads: each connection has one (`lakeckpt.checkpoint.peers.serve`). Imports without torch.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.filling import Filling, checksum
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaLayout, DataChecksums
from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, LEAF_BYTES, leaf_digests, short_digest
from lakeckpt.checkpoint.peers.parity import Contribution, contributions_to_bytes, kept_leaves, pieces_for, xor_into
from lakeckpt.checkpoint.peers.wire import NoShare, PutShare, ShareTaken, receive_into, send
from lakeckpt.errors import ArenaDamaged, ArenaError

__all__ = ["JOIN_S", "ParityKeeper"]

JOIN_S = 60.0
"""So long a member waits for the others while no leaf comes."""
_SLOTS = 2
_DOCUMENTS_BYTES = 2**20
_FRAME_BYTES = 1024
"""What the names and sizes of the documents of a member take beside them, and more."""
_PLAN = short_digest(b"parity")


class _Joining:
    """The parity of one cut, while it is made in ``arena``. ``changed`` guards it, and is told of its end."""

    def __init__(self, arena: Arena, filling: Filling, put: PutShare, changed: threading.Condition) -> None:
        self.arena, self.filling, self.put = arena, filling, put
        self.changed = changed
        self.begun = {put.giver}
        """Who gives, or has given. A member whose connection broke gives all pieces again, to a slot of zeros."""
        self.given: dict[int, Contribution] = {}
        self.came_s = time.monotonic()
        """When a leaf came."""
        self.result: str | None = None  # empty: the parity is whole; else why it will never be

    def end(self, result: str) -> None:
        """End it with this result, unless it has one."""
        if self.result is None:
            self.result, self.given = result, {}
            if result:
                self.filling.abandon()
            self.arena.close()
            self.changed.notify_all()


class ParityKeeper:
    """Keeps parity in ``folder``. Any threads may call it."""

    def __init__(self, folder: ArenaFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._changed: dict[str, threading.Condition] = {}
        self._under_way: dict[str, _Joining] = {}

    def close(self) -> None:
        """Abandon what is under way. Nobody waits any more."""
        with self._lock:
            under_way = list(self._under_way.values())
        for one in under_way:
            self._end(one, "the node that keeps the parity ends")

    def take(self, connection: socket.socket, run: bytes, put: PutShare) -> None:
        """Take pieces of a share of the run with this digest, and answer on the ``connection``: that they may come,
        that they were joined, and that the parity is whole. Raises ``OSError`` and ``EOFError`` if the other end is
        gone: the parity of this cut will not be made then."""
        try:
            joining = self._joining(run, put)
        except (ArenaError, OSError) as error:
            send(connection, NoShare(why=str(error)[:1000]))
            return
        try:
            send(connection, ShareTaken())
            wrong = self._join(connection, joining, put)
        except BaseException as error:
            self._end(joining, f"rank {put.giver} has not given its pieces: {error}")
            raise
        if wrong:
            self._end(joining, wrong)
            send(connection, NoShare(why=wrong))
            return
        send(connection, ShareTaken())
        with joining.changed:
            while not joining.changed.wait_for(lambda: joining.result is not None, JOIN_S):
                if time.monotonic() < joining.came_s + JOIN_S:
                    continue  # a large share is on its way
                missing = sorted({*put.identity.members} - {put.identity.rank, *joining.given})
                self._end(joining, f"ranks {missing} gave nothing of step {put.cut.step} for {JOIN_S:.0f} s")
            result = joining.result
        send(connection, NoShare(why=result) if result else ShareTaken())

    # --- what is under way

    def _joining(self, run: bytes, put: PutShare) -> _Joining:
        """Return the parity to which the pieces belong; it is begun if need be. Raises `ArenaError` and ``OSError``."""
        layout = _layout(put, run)
        name = self._folder.name_of(put.identity)
        with self._lock:
            changed = self._changed.setdefault(name, threading.Condition())
        with changed:
            known = self._under_way.get(name)
            if known is not None and known.result is None:
                same = (known.put.cut, known.put.digest, known.put.identity) == (put.cut, put.digest, put.identity)
                if same and put.giver not in known.begun:
                    known.begun.add(put.giver)
                    if not _has_room(known.arena.layout, layout):
                        self._grow(known, layout)
                    return known
                if known.put.cut.age > put.cut.age:
                    raise ArenaError(f"the parity of step {known.put.cut.step}, which is newer, is being made")
                again = " again, as its connection broke" if same else ""
                self._end(known, f"rank {put.giver} gives its pieces of step {put.cut.step}{again}")
            found = _Joining(*self._begun(layout, put), put, changed)
            with self._lock:
                self._under_way[name] = found
            return found

    def _begun(self, layout: ArenaLayout, put: PutShare) -> tuple[Arena, Filling]:
        """Begin a slot, of zeros. Raises `ArenaError` and ``OSError``."""
        arena = self._again(layout) or self._folder.create(layout)
        try:
            arena.forget(put.cut.step)
            filling = arena.begin(common=max((one.cut.step for one in arena.complete()), default=None))
            if filling is None:
                raise ArenaError("the slot for the parity is being read")
            if filling.data:
                np.frombuffer(filling.data, np.uint8)[:] = 0
        except BaseException:
            arena.close()
            raise
        return arena, filling

    def _grow(self, joining: _Joining, layout: ArenaLayout) -> None:
        """Make the arena anew, for a share that is larger than those before. Raises `ArenaError` and ``OSError``."""
        found, joined = joining.arena.layout, bytes(joining.filling.data)
        joining.filling.abandon()
        joining.arena.close()
        try:
            larger = replace(
                layout,
                data_bytes=max(found.data_bytes, layout.data_bytes),
                documents_bytes=max(found.documents_bytes, layout.documents_bytes),
            )
            joining.arena, joining.filling = self._begun(larger, joining.put)
        except BaseException as error:
            joining.result = f"the parity cannot be made: {error}"
            joining.changed.notify_all()
            raise
        joining.filling.data[: len(joined)] = joined

    def _again(self, layout: ArenaLayout) -> Arena | None:
        """Return the arena that the node has already, if it is large enough. `ArenaError`."""
        with suppress(ArenaDamaged, FileNotFoundError):
            arena = self._folder.open(self._folder.name_of(layout.identity), writes=True)
            found = arena.layout  # it may have been made for a larger share
            sizes = replace(layout, data_bytes=found.data_bytes, documents_bytes=found.documents_bytes)
            if found == sizes and _has_room(found, layout):
                return arena
            arena.close()
        return None

    def _end(self, joining: _Joining, why: str) -> None:
        with joining.changed:
            joining.end(why)

    # --- the pieces of one member

    def _join(self, connection: socket.socket, joining: _Joining, put: PutShare) -> str:
        """Receive the pieces, and join them. Return what is wrong; empty: nothing is."""
        sizes, members = put.sizes, put.identity.members
        documents, leaves = memoryview(bytearray(sizes.documents_bytes)), memoryview(bytearray(sizes.checksums_bytes))
        receive_into(connection, documents)
        receive_into(connection, leaves)
        wrong = ""
        if checksum(documents) != sizes.documents_checksum or checksum(leaves) != sizes.checksums_checksum:
            wrong = "the documents or the checksums are not what was captured"
        leaf = memoryview(bytearray(LEAF_BYTES))
        for piece, number in pieces_for(members, put.giver, put.identity.rank, sizes.data_bytes):
            came = leaf[: min(LEAF_BYTES, sizes.data_bytes - piece * LEAF_BYTES)]
            receive_into(connection, came)
            at = piece * DIGEST_BYTES
            if not wrong and leaf_digests(came, LEAF_BYTES) != leaves[at : at + DIGEST_BYTES]:
                wrong = f"leaf {piece} is not what rank {put.giver} captured"
            with joining.changed:
                joining.came_s = time.monotonic()
                if joining.result is None and not wrong:
                    xor_into(joining.filling.data[number * LEAF_BYTES :], came)
        if not wrong:
            given = Contribution(
                rank=put.giver, data_bytes=sizes.data_bytes, documents=bytes(documents), checksums=bytes(leaves)
            )
            with joining.changed:
                wrong = joining.result or ""
                if joining.result is None:
                    joining.given[put.giver] = given
                    if joining.given.keys() | {put.identity.rank} == {*members}:
                        self._complete(joining)
                        self._end(joining, "")
        return wrong

    def _complete(self, joining: _Joining) -> None:
        """Make the slot whole: all have given their pieces."""
        filling, put = joining.filling, joining.put
        documents = contributions_to_bytes([joining.given[rank] for rank in sorted(joining.given)])
        leaves = leaf_digests(filling.data, LEAF_BYTES)
        known = DataChecksums(sequence=filling.sequence + 1, leaves=bytes(leaves))
        filling.put(filling.layout.checksums_at(filling.number), known.to_bytes())
        filling.complete(put.cut, digest=put.digest, documents=documents, shares=put.shares, divided=put.divided)


def _has_room(found: ArenaLayout, needed: ArenaLayout) -> bool:
    documents_bytes = needed.documents_bytes // 2 + _FRAME_BYTES * len(needed.identity.members)
    return found.data_bytes >= needed.data_bytes and found.documents_bytes >= documents_bytes


def _layout(put: PutShare, run: bytes) -> ArenaLayout:
    """Return the least layout of an arena that takes the pieces. Raises `ArenaError` if the message makes no sense."""
    identity, sizes = put.identity, put.sizes
    leaves = max(1, -(-sizes.data_bytes // LEAF_BYTES))
    if identity.run != run or put.giver not in identity.members or identity.rank not in identity.members:
        raise ArenaError("this node keeps parity of another run, or of another group")
    is_empty = not sizes.data_bytes and not sizes.documents_bytes  # another node captures the share, too
    if put.giver == identity.rank or sizes.checksums_bytes != (0 if is_empty else DIGEST_BYTES * leaves):
        raise ArenaError(f"a share of {sizes.data_bytes} bytes has not {sizes.checksums_bytes} bytes of checksums")
    others, documents_bytes = len(identity.members) - 1, sizes.documents_bytes + sizes.checksums_bytes
    return ArenaLayout(
        identity=identity,
        plan=_PLAN,
        data_bytes=LEAF_BYTES * kept_leaves(identity.members, sizes.data_bytes),
        documents_bytes=max(_DOCUMENTS_BYTES, 2 * others * documents_bytes),
        generations=_SLOTS,
    )
