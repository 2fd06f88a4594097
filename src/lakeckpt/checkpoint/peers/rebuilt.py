"""This module computes a share that no node holds from parity, and from the shares of the other members of its group.

`RebuiltShare` has what `lakeckpt.checkpoint.arena.contents.Contents` needs of a generation. A piece is the XOR of a
leaf of parity and of the pieces that the other members gave to it. Documents and checksums lie beside the parity, and
`Contents` verifies each leaf that was computed. So it does not matter which of the sources was damaged: `ArenaDamaged`
is raised, and an older cut is taken. The module starts no threads. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.peers.fetch import PeerShare
from lakeckpt.checkpoint.peers.parity import Contribution, contributions_from, group_of, xor_into
from lakeckpt.errors import ArenaDamaged, WireError
from lakeckpt.recovery.decide import Source

__all__ = ["RebuiltShare"]


class RebuiltShare:
    """The share of a ``source`` with members: a `lakeckpt.checkpoint.arena.contents.Generation`. Any thread may read.

    ``ask(rank, address, is_parity)`` opens what the node at an address has: the share of the rank, or the parity that
    is kept for it. Raises `ArenaDamaged`.
    """

    def __init__(self, source: Source, ask: Callable[[int, str, bool], PeerShare]) -> None:
        self.rank = source.rank
        self._group = group_of(source.members)
        self._stack = ExitStack()
        self._parity: dict[str, PeerShare] = {}
        self._shares: dict[str, PeerShare] = {}
        try:
            for rank, address in zip(source.members, source.addresses, strict=True):
                if rank != source.rank:
                    for is_parity, into in ((True, self._parity), (False, self._shares)):
                        into[str(rank)] = share = ask(rank, address, is_parity)
                        self._stack.callback(share.close)
            given: dict[int, Contribution] = {}
            for share in [*self._parity.values()][:2]:  # beside the parity on a node lies nothing of its own share
                given |= contributions_from(share.documents())
        except WireError as error:
            self._stack.close()
            raise ArenaDamaged(f"what lies beside the parity cannot be read: {error}") from error
        except BaseException:
            self._stack.close()
            raise
        self._own = given.get(source.rank)
        if self._own is None or not self._own.documents:
            self._stack.close()
            raise ArenaDamaged(f"rank {source.rank} gave nothing to the parity of its group")
        self._sizes = {name: 0 if (one := given.get(int(name))) is None else one.data_bytes for name in self._shares}

    @property
    def data_bytes(self) -> int:
        """How many bytes its data have."""
        assert self._own is not None
        return self._own.data_bytes

    def documents(self) -> bytes:
        """Return the documents of the share."""
        assert self._own is not None
        return self._own.documents

    def checksums(self) -> bytes:
        """Return the digests of the leaves of the data."""
        assert self._own is not None
        return self._own.checksums

    def read_into(self, start: int, into: memoryview) -> None:
        """Compute data from byte ``start`` on, not verified. `ArenaDamaged`."""
        done = 0
        while done < len(into):
            piece, within = divmod(start + done, LEAF_BYTES)
            target = into[done : done + LEAF_BYTES - within]
            self._compute(piece, within, target)
            done += len(target)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the data, not verified. `ArenaDamaged`."""
        found = memoryview(bytearray(stop - start))
        self.read_into(start, found)
        return found

    def damaged(self, what: str) -> ArenaDamaged:
        """Return the error that says that ``what`` of the share is not what was captured."""
        return ArenaDamaged(
            f"{what} of what rank {self.rank} captured is not what was written, as it was computed from parity: take "
            "an older cut, or a checkpoint"
        )

    def close(self) -> None:
        """Hang up."""
        self._stack.close()

    def _compute(self, piece: int, within: int, target: memoryview) -> None:
        """Compute bytes of one piece, from ``within`` it on."""
        stripe = self._group.stripe_of(str(self.rank), piece)
        keeper = self._group.parity_at(stripe)
        self._parity[keeper].read_into(stripe // len(self._group.members) * LEAF_BYTES + within, target)
        scratch = memoryview(bytearray(len(target)))
        for name, share in self._shares.items():
            other = self._group.piece_of(name, stripe)
            if other is None:
                continue
            at = other * LEAF_BYTES + within
            more = scratch[: max(0, min(len(target), self._sizes[name] - at))]
            if more:
                share.read_into(at, more)
                xor_into(target, more)
