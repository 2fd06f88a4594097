"""This module takes copies of shares that other nodes give to this one, into arenas of two slots each.

Copies of what one rank captures lie in an arena of their own, beside those that ranks fill here. One slot keeps the
copy before, which is whole, while the other one is filled. A slot that is not whole is no generation, so nobody finds
it. Each leaf is compared with its checksum as it comes. An arena is refused if memory has no room for it. The copies of
steps that come later than the one that is given are of a history that no longer holds: they are discarded.

The module starts no threads: each connection has one (`lakeckpt.checkpoint.peers.serve`). Imports without torch.
"""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from dataclasses import replace

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.filling import Filling, checksum
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaLayout, DataChecksums
from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, LEAF_BYTES, leaf_digests
from lakeckpt.checkpoint.peers.wire import NoShare, PutShare, ShareTaken, receive_into, send
from lakeckpt.errors import ArenaDamaged, ArenaError

__all__ = ["take_share"]

_SLOTS = 2
_DOCUMENTS_BYTES = 256 * 2**10
_MOST_DOCUMENTS_BYTES = 2**30


def take_share(connection: socket.socket, folder: ArenaFolder, run: bytes, put: PutShare) -> None:
    """Take a copy of a share of the run with this digest into ``folder``, and answer on the ``connection``. Raises
    ``OSError`` and ``EOFError`` if the other end is gone: the slot is then not whole."""
    try:
        layout = _layout(put, run)
        arena = _again(folder, layout) or folder.create(layout)
    except (ArenaError, OSError) as error:
        send(connection, NoShare(why=str(error)[:1000]))
        return
    with closing(arena):
        arena.forget(put.cut.step)
        filling = arena.begin(common=max((one.cut.step for one in arena.complete()), default=None))
        if filling is None:
            send(connection, NoShare(why="the slot for the copy is being read"))
            return
        try:
            send(connection, ShareTaken())
            wrong = _fill(connection, filling, put)
        except BaseException:
            filling.abandon()
            raise
    send(connection, NoShare(why=wrong) if wrong else ShareTaken())


def _layout(put: PutShare, run: bytes) -> ArenaLayout:
    """Return the layout of the arena for a copy. Raises `ArenaError` if the sizes make no sense."""
    sizes = put.sizes
    layout = ArenaLayout(
        identity=put.identity,
        plan=put.plan,
        data_bytes=sizes.data_bytes,
        documents_bytes=max(_DOCUMENTS_BYTES, 2 * sizes.documents_bytes),
        generations=_SLOTS,
    )
    if put.identity.run != run or put.identity.kind not in ("copy", "documents"):
        raise ArenaError("this node keeps copies of another run")
    if sizes.documents_bytes > _MOST_DOCUMENTS_BYTES or sizes.checksums_bytes != DIGEST_BYTES * layout.num_leaves:
        raise ArenaError(
            f"a share of {sizes.data_bytes} bytes has not {sizes.documents_bytes} bytes of documents and "
            f"{sizes.checksums_bytes} of checksums"
        )
    return layout


def _again(folder: ArenaFolder, layout: ArenaLayout) -> Arena | None:
    """Return the arena that holds copies of the same rank already, if a copy of ``layout`` fits. `ArenaError`."""
    with suppress(ArenaDamaged, FileNotFoundError):
        arena = folder.open(folder.name_of(layout.identity), writes=True)
        room_bytes = arena.layout.documents_bytes
        if room_bytes >= layout.documents_bytes // 2 and arena.layout == replace(layout, documents_bytes=room_bytes):
            return arena
        arena.close()
    return None


def _fill(connection: socket.socket, filling: Filling, put: PutShare) -> str:
    """Receive the parts of a share. The slot is complete if they are whole; else return what is wrong."""
    documents = memoryview(bytearray(put.sizes.documents_bytes))
    leaves = memoryview(bytearray(put.sizes.checksums_bytes))
    wrong = ""
    receive_into(connection, documents)
    receive_into(connection, leaves)
    data = filling.data
    for number in range(filling.layout.num_leaves):
        leaf = data[number * LEAF_BYTES : (number + 1) * LEAF_BYTES]
        receive_into(connection, leaf)
        at = number * DIGEST_BYTES
        if leaf_digests(leaf, LEAF_BYTES) != leaves[at : at + DIGEST_BYTES]:
            wrong = wrong or f"leaf {number} of the copy is not what was captured"
    if checksum(documents) != put.sizes.documents_checksum or checksum(leaves) != put.sizes.checksums_checksum:
        wrong = wrong or "the documents or the checksums of the copy are not what was captured"
    if wrong:
        filling.abandon()
        return wrong
    known = DataChecksums(sequence=filling.sequence + 1, leaves=bytes(leaves))
    filling.put(filling.layout.checksums_at(filling.number), known.to_bytes())
    filling.complete(put.cut, digest=put.digest, documents=bytes(documents), shares=put.shares, divided=put.divided)
    return ""
