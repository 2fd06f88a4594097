"""This module sends what a rank captures to the nodes that keep copies or parity of it, from the rank's agent.

`CopySender.look` takes the newest complete cut that falls due, and gives its share to the keeper's server
(`lakeckpt.checkpoint.peers.slots`). Any rank's copies are of use only together with the same cut of all other ranks. So
the steps that count are multiples of one stride: so many captures that ``every_s`` goes by, and twice as long as a
transfer takes. Rank 0 measures it in its first transfers, and publishes it for the attempt. Ranks also keep the share
of the last two cuts that were copied in their own arena: captures cannot begin these generations anew.

A share that a rank of another node captures, too, needs no copy: the list of shares says so. Of each such cut only the
documents are sent, some kilobytes, for the random states in them are the rank's own. Until the list can be there, a few
cuts after the attempt began, nothing is copied. If the keeper takes no copy, the share is unprotected, and is tried
again ever later. `start_copying` starts a daemon thread, which ends with the trainer. Imports without torch.

For parity, each keeper gets some pieces of the share (`lakeckpt.checkpoint.peers.parity`), and answers when all members
of the group have given theirs. Members must look at about the same time, so a stride takes at least a second, and a cut
that others have not given is not tried again: the next one is. Nobody waits for the answer while rank 0 measures. A
share that another node captures, too, counts as empty.
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from lakeckpt.checkpoint.arena.arena import Arena, HeldGeneration
from lakeckpt.checkpoint.arena.checksums import checked
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaKind
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests
from lakeckpt.checkpoint.peers.grouping import Keeping
from lakeckpt.checkpoint.peers.next_node import NodeNote, connected_to
from lakeckpt.checkpoint.peers.parity import pieces_for
from lakeckpt.checkpoint.peers.serve import send_data, sizes_of
from lakeckpt.checkpoint.peers.wire import NoShare, PutShare, ShareTaken, limit_waits, receive, send
from lakeckpt.errors import ArenaDamaged, ArenaError, WireError
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.shares import ShareList

__all__ = ["CopySender", "start_copying"]

_KEPT, _MEASURED = 2, 2
_NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))
_SPARED_CUTS = 8
"""The list of shares is there after so many cuts: `lakeckpt.checkpoint.peers.alike`."""
_LOOK_S, _LEAST_LOOK_S, _SILENT_S = 0.1, 0.005, 60.0
_RETRY_S, _ASK_S, _LONGEST_RETRY_S, _LONGEST_JOIN_S = 1.0, 0.5, 60.0, 3600.0
_APART_S = 1.0
"""The least time between two cuts of parity: members that look a step apart must mean the same cut."""


class _Unjoined(Exception):
    """A keeper has no parity of this cut: other members have given another one, or none."""


class CopySender:
    """Copies the cuts of ``attempt`` in the arena of ``identity`` as ``keeping`` says. ``note`` returns where the agent
    of a keeper is asked, None if that is not known; ``now`` the time in seconds. ``agree`` publishes the stride that
    rank 0 gives, and returns what rank 0 has published; None if that is not known. Given 0, it publishes nothing."""

    def __init__(
        self,
        folder: ArenaFolder,
        identity: ArenaIdentity,
        attempt: int,
        keeping: Keeping,
        *,
        note: Callable[[int], NodeNote | None],
        agree: Callable[[int], int | None],
        now: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._folder, self._identity, self._attempt, self._keeping = folder, identity, attempt, keeping
        self._note, self._agree, self._now, self._log = note, agree, now, log
        self._name = folder.name_of(identity)
        self._arena: Arena | None = None
        self._kept: deque[ExitStack] = deque()  # the locks of the cuts that were copied last
        self._connections: dict[int, socket.socket] = {}
        self._first: tuple[int, float] | None = None  # the first step of the attempt that was seen, and when
        self._stride: int | None = None
        self._sent, self._last, self._took_s, self._cut_s = 0, -1, 0.0, 0.0
        self._ask_s, self._next_ask_s = _ASK_S, float("-inf")
        self._last_documents = -1
        self._alike: tuple[bytes, bool] = b"", False  # the list of shares, and whether it names a replica elsewhere
        self.pause_s = _LOOK_S
        """How soon `look` is to be called again, so that it sees each cut that falls due."""
        self._retry_s, self._next_s = _RETRY_S, float("-inf")
        self._wrong = ""

    def look(self) -> CutId | None:
        """Copy the newest cut that falls due, if there is one. Return it if it is protected now. Raises `ArenaError` if
        the process can open no more files."""
        arena = self._opened()
        if arena is None or self._now() < self._next_s:
            return None
        newest = next(iter(arena.cuts()), None)
        if newest is not None and newest.attempt == self._attempt and newest.step > self._last_documents:
            with arena.hold(newest) as held:
                is_sent = held is not None and self._is_elsewhere(held) and self._is_sent(held, "documents")
            if is_sent:
                self._copied(arena)  # keeps generations of the cuts that other ranks copy
                return newest
        return self._copied(arena)

    def _copied(self, arena: Arena) -> CutId | None:
        """Copy the newest cut that falls due, and keep its generation. Return it if it was copied."""
        if (cut := self._due(arena)) is None:
            return None
        stack = ExitStack()
        held = stack.enter_context(arena.hold(cut))
        if held is None:
            return None
        while len(self._kept) >= _KEPT:
            self._kept.popleft().close()
        self._kept.append(stack)
        self._sent += 1
        if self._is_elsewhere(held) and not self._keeping.members:
            self._last = cut.step
            return None
        is_measured = self._is_measuring
        if self._is_sent(held, "parity" if self._keeping.members else "copy"):
            return None if self._keeping.members and is_measured else cut
        self._kept.pop().close()
        return None

    def _is_sent(self, held: HeldGeneration, kind: ArenaKind) -> bool:
        """Give a share to the keeper, or its documents. Return whether the keeper has it."""
        begun_s, cut = self._now(), held.record.cut
        try:
            if kind == "parity":
                self._give(held, waits=not self._is_measuring)
            else:
                self._put(held, kind)
        except _Unjoined as error:
            self._last = cut.step
            self._failed(cut, error, again_s=0.0)
            return False
        except (OSError, EOFError, WireError, ArenaError) as error:
            self._failed(cut, error, again_s=self._retry_s)
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            return False
        if kind == "documents":
            self._last_documents = cut.step
        else:
            took_s = self._now() - begun_s  # the first transfer makes the arena of the keeper, too
            self._last, self._took_s = cut.step, min(took_s, self._took_s or took_s)
        if kind != "documents" or not self._keeping.members:
            self._retry_s, self._wrong = _RETRY_S, ""
        return True

    def close(self) -> None:
        """Hang up, and release the generations."""
        self._hang_up()
        while self._kept:
            self._kept.popleft().close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    # --- which cut

    def _due(self, arena: Arena) -> CutId | None:
        """Return the newest cut that falls due."""
        steps = [one.cut for one in arena.complete() if one.cut.attempt == self._attempt]
        if not steps:
            return None
        if self._first is None:
            self._first = steps[0].step, self._now()
        first, since_s = self._first
        unit = self._keeping.capture_every
        if steps[0].step < first + _SPARED_CUTS * unit and not any(one.shares for one in arena.complete()):
            return None
        self._cut_s = unit * (self._now() - since_s) / max(1, steps[0].step - first)
        self.pause_s = min(_LOOK_S, max(self._cut_s, _LEAST_LOOK_S))
        if (stride := self._agreed()) is None:
            return None
        due = [one for one in steps if one.step > self._last and one.step % (unit * stride) == 0]
        return max(due, key=lambda one: one.step, default=None)

    def _agreed(self) -> int | None:
        """Return the stride of all ranks; None if it is not known. Rank 0's first transfers come before it is."""
        if self._identity.rank == 0 and not self._sent and self._stride is None:
            self._stride = self._agree(0)  # of an agent before this one
        if self._identity.rank == 0 and self._sent < _MEASURED and self._stride is None:
            return 1
        if self._stride is None and self._now() >= self._next_ask_s:
            apart_s = _APART_S if self._keeping.members else 0.0
            self._stride = self._agree(_stride(max(self._keeping.every_s, 2 * self._took_s, apart_s), self._cut_s))
            self._next_ask_s = self._now() + self._ask_s
            self._ask_s = min(2 * self._ask_s, _LONGEST_RETRY_S)
        return self._stride

    @property
    def _is_measuring(self) -> bool:
        """True for the first transfers of rank 0, if no stride was published before."""
        return self._identity.rank == 0 and self._stride is None and self._sent <= _MEASURED

    def _is_elsewhere(self, held: HeldGeneration) -> bool:
        """Return whether a rank of another node has captured the same."""
        listed = held.record.shares
        if listed and listed != self._alike[0]:
            found = ShareList.from_document(contents_of(held).documents.shares)
            own, here = found.id_of(self._identity.rank), frozenset(self._keeping.here)
            is_there = any(found.id_of(rank) == own for rank in range(found.world) if rank not in here)
            self._alike = listed, is_there
        return bool(listed) and self._alike[1]

    # --- the transfer

    def _put(self, held: HeldGeneration, kind: ArenaKind) -> None:
        """Give the share to the keeper, or its documents. Raises why it does not have it then."""
        documents, leaves = held.documents(), leaf_digests(b"", LEAF_BYTES)
        if kind == "copy":
            leaves = checked(contents_of(held)).checksums or b""
        connection = self._connected(self._keeping.keepers[0])
        identity = replace(self._identity, kind=kind)
        self._offer(connection, held, identity, documents, leaves, has_data=kind == "copy")
        connection.sendall(documents)
        connection.sendall(leaves)
        if kind == "copy":
            send_data(connection, held, 0, held.data_bytes)
        _require(connection)

    def _give(self, held: HeldGeneration, *, waits: bool) -> None:
        """Give the pieces of the share to all keepers, and wait until the parity is whole, if ``waits``. Raises why it
        is not."""
        is_empty, members, rank = self._is_elsewhere(held), self._keeping.members, self._identity.rank
        documents = b"" if is_empty else held.documents()
        leaves = b"" if is_empty else checked(contents_of(held)).checksums or b""
        connections = [self._connected(keeper) for keeper in self._keeping.keepers]
        try:
            for connection, other in zip(connections, self._keeping.parity_of, strict=True):
                identity = replace(self._identity, kind="parity", rank=other, members=members)
                self._offer(connection, held, identity, documents, leaves, has_data=not is_empty)
            for connection, other in zip(connections, self._keeping.parity_of, strict=True):
                connection.sendall(documents)
                connection.sendall(leaves)
                for piece, _ in () if is_empty else pieces_for(members, rank, other, held.data_bytes):
                    send_data(connection, held, piece * LEAF_BYTES, LEAF_BYTES)
                _require(connection)
            for connection in connections if waits else ():
                limit_waits(connection, _SILENT_S, idle_s=_LONGEST_JOIN_S)
                _require(connection)
                limit_waits(connection, _SILENT_S)
        except ArenaError as error:
            raise _Unjoined(str(error)) from error
        if not waits:
            self._hang_up()

    def _offer(
        self,
        connection: socket.socket,
        held: HeldGeneration,
        identity: ArenaIdentity,
        documents: bytes,
        leaves: bytes,
        *,
        has_data: bool,
    ) -> None:
        """Ask the keeper whether it takes a share, of which these parts and the data will come."""
        record, sizes = held.record, sizes_of(held, documents, leaves)
        asked = PutShare(
            identity=identity,
            cut=record.cut,
            digest=record.digest,
            plan=held.arena.layout.plan,
            sizes=sizes if has_data else replace(sizes, data_bytes=0),
            shares=record.shares,
            divided=record.divided,
            giver=self._identity.rank,
        )
        send(connection, asked)
        _require(connection)

    def _connected(self, keeper: int) -> socket.socket:
        """Return the connection to the node whose first rank is ``keeper``."""
        if keeper not in self._connections:
            if (note := self._note(keeper)) is None:
                raise ArenaError("the node that keeps what it is given cannot be found in the run")
            connection = self._connections[keeper] = connected_to(note, _SILENT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)  # it may be busy for a while
        return self._connections[keeper]

    def _failed(self, cut: CutId, error: Exception, *, again_s: float) -> None:
        """Report once why a share is unprotected, and try again that much later."""
        self._hang_up()
        why = str(error) or type(error).__name__
        if (kind := why.translate(_NO_DIGITS)) != self._wrong:
            what = "parity was not made" if self._keeping.members else "copy was not taken"
            self._log(f"step {cut.step} is unprotected, as its {what}: {why}")
        self._wrong = kind
        self._next_s = self._now() + again_s

    def _hang_up(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _opened(self) -> Arena | None:
        """Return the arena of the rank; None if there is none."""
        if self._arena is not None and not self._arena.is_there:
            while self._kept:
                self._kept.popleft().close()
            self._arena.close()
            self._arena = None
        if self._arena is None:
            with suppress(ArenaDamaged, FileNotFoundError):
                self._arena = self._folder.open(self._name)
        return self._arena


def start_copying(
    sender: CopySender, trainer: int, *, report: Callable[[CutId], None], log: Callable[[str], None]
) -> None:
    """Send copies until the process of the pidfd ``trainer`` ends, on a thread of its own. ``report`` is called for
    each cut that is protected now."""
    work = (sender, trainer, report, log)
    threading.Thread(target=_copy, args=work, name="lakeckpt-copies", daemon=True).start()


def _copy(sender: CopySender, trainer: int, report: Callable[[CutId], None], log: Callable[[str], None]) -> None:
    ends = select.poll()
    ends.register(trainer, select.POLLIN)
    wrong = ""
    while not ends.poll(1000 * sender.pause_s):
        try:
            if (cut := sender.look()) is not None:
                report(cut)
        except (ArenaError, OSError) as error:  # this process is short of files: a save reports that, too
            if str(error) != wrong:
                log(f"no copies are made now: {error}")
            wrong = str(error)
    sender.close()


def _stride(least_s: float, cut_s: float) -> int:
    """Return how many cuts take at least ``least_s``, if each takes ``cut_s``.

    >>> _stride(10.0, 0.7), _stride(0.0, 0.7), _stride(10.0, 30.0)
    (15, 1, 1)
    """
    return max(1, math.ceil(least_s / cut_s)) if cut_s > 0 else 1


def _require(connection: socket.socket) -> None:
    """Wait for the keeper's answer. Raises `ArenaError` unless it takes the share."""
    answer = receive(connection)
    if isinstance(answer, NoShare):
        raise ArenaError(answer.why)
    if not isinstance(answer, ShareTaken):
        raise ArenaError(f"the keeper answers {type(answer).__name__}")
