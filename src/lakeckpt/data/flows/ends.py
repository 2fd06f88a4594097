"""This module lets the ranks of a job agree on the last step of an epoch whose rows nobody can count in advance.

A rank that has no more rows must go on with empty micro-batches as long as another rank has rows. So each rank states,
in the key-value store of torch.distributed, whether it has rows after a *border* (the instant before a step). Borders
come in chunks of up to eight. A rank states a chunk's borders before it takes the last batch before the first of them,
for which it reads so far ahead. A rank without rows waits for the statements of the others. Rank 0, whose process may
hold the store, does not leave the epoch before the others have seen its end.

A rank that has stated a border never waits for a rank that has not come there, so there is no deadlock. The statements
of a rank follow from the state that all ranks began with, whose digest names the keys. So a key that another iteration
from the same state, or an earlier attempt, has left holds the same value. So such iterations share the statements, and
only the ends that a process has seen are numbered. There is no collective, and a step that no rank waits at costs an
eighth of one write. The module starts no threads.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import timedelta
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.distributed_c10d import PrefixStore

from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.data.base.torch_private import job_store
from lakeckpt.errors import ConfigError, MissingRanksError
from lakeckpt.wire.envelope import dumps

__all__ = ["Ends", "JobEnds", "ends_of", "last_border"]

_PATIENCE = timedelta(minutes=30)
_LEAVE = timedelta(seconds=30)
_CHUNK = 8
_KEPT = 64
"""Chunks whose statements stay in the store."""
_MORE = b"+"
_ITERATIONS: WeakKeyDictionary[Any, Counter[tuple[str, int, str]]] = WeakKeyDictionary()
"""By the store of a job: how many iterations from a state a rank of this process has "begun", and how many "ended"."""


def last_border(border: int) -> int:
    """Return the last border of the chunk of ``border``: chunks hold 1, 1, 2, 4, 8, 8, … borders.

    >>> [last_border(border) for border in (0, 1, 2, 4, 8, 17)]
    [0, 1, 3, 7, 15, 23]
    """
    return (1 << border.bit_length()) - 1 if border < _CHUNK else border // _CHUNK * _CHUNK + _CHUNK - 1


class Ends:
    """The end of an epoch of a job of one rank, which asks nobody, or of an endless stream."""

    asks = False
    """True if borders must be stated before ranks come to them."""

    def lookahead(self, border: int) -> int:
        """Return the border up to which a rank must know whether it has rows, to state ``border``."""
        return border

    def state(self, border: int, end: int | None) -> None:
        """State that this rank has no rows from step ``end`` on; None: it has rows behind the chunk of ``border``."""

    def is_over(self, border: int) -> bool:
        """Return whether no other rank has rows from step ``border`` on. It waits for ranks that are behind.

        Raises `MissingRanksError` if a rank does not come there within 30 minutes.
        """
        return True


class JobEnds(Ends):
    """The end of an epoch of several ranks, which began with the state of this digest, over the ``store`` of their job.

    For one thread.
    """

    asks = True

    def __init__(self, store: Any, digest: str, *, rank: int, world_size: int) -> None:
        self._store: Any = PrefixStore(f"lakeckpt/ends/{digest}", store)
        self._rank = rank
        self._iterations = _ITERATIONS.setdefault(store, Counter())
        self._begun, self._ended = (digest, rank, "begun"), (digest, rank, "ended")
        self._iterations[self._begun] += 1
        self._stated = -1
        self._others = [one for one in range(world_size) if one != rank]
        """The ranks that may have rows."""
        self._more, self._end = -1, -1
        """A border up to which the first of them has rows, and its end; -1: it is not known."""
        self._leaves_to = list(self._others) if rank == 0 else [rank]
        """The ranks that state that they have seen the end: rank 0 waits for the others; empty when that is done."""

    def lookahead(self, border: int) -> int:
        return last_border(border)

    def state(self, border: int, end: int | None) -> None:
        last = last_border(border)
        if last == self._stated:
            return
        self._stated = last
        self._store.set(_key(self._rank, last), _MORE if end is None else str(end))
        with contextlib.suppress(RuntimeError):  # a store of files cannot forget
            if last > _CHUNK * _KEPT and self._iterations[self._begun] == 1:  # others may be behind, and need the key
                self._store.delete_key(_key(self._rank, last - _CHUNK * _KEPT))

    def is_over(self, border: int) -> bool:
        while self._others:
            if self._more >= border:
                return False
            if self._end < 0:
                self._read(self._others[0], last_border(border))
            elif self._end <= border:
                self._others.pop(0)
                self._more = self._end = -1
            else:
                return False
        self._leave()
        return True

    def _leave(self) -> None:
        """State that this rank has seen the end; rank 0 waits until all others have."""
        ranks, self._leaves_to = self._leaves_to, []
        if not ranks:
            return
        keys = [f"seen/{rank}/{self._iterations[self._ended]}" for rank in ranks]
        self._iterations[self._ended] += 1
        with contextlib.suppress(RuntimeError):  # a rank that does not come has its own error
            if self._rank:
                self._store.set(keys[0], b"")
            else:
                self._store.wait(keys, _LEAVE)

    def _read(self, rank: int, last: int) -> None:
        """Learn what ``rank`` states for the chunk whose last border is ``last``."""
        key = _key(rank, last)
        try:
            self._store.wait([key], _PATIENCE)
            stated = bytes(self._store.get(key))
        except RuntimeError as error:
            raise MissingRanksError(
                f"rank {self._rank} has no more rows, and rank {rank} has not stated whether it has rows behind step "
                f"{last}: it ended, or takes longer than {_PATIENCE} for a step ({error})"
            ) from error
        if stated == _MORE:
            self._more = last
        else:
            self._end = int(stated)


def _key(rank: int, last: int) -> str:
    return f"{rank}/{last}"


def ends_of(state: State, rank: int) -> Ends:
    """Return how ``rank`` learns of the end of the epoch, of which all ranks go on from ``state``, of the whole job.

    Raises `ConfigError` if there are several ranks, and no store in which they could agree.
    """
    world_size = state.segment.world_size
    if world_size == 1 or state.identity.endless or Plan(state).at_end:
        return Ends()  # of an epoch that is over, the state may have other ranks than the job
    store = job_store(world_size)
    if store is None:
        raise ConfigError(
            f"this is rank {rank} of {world_size}, and how many rows the transform yields decides when an epoch ends: "
            "ranks agree on that in the store of torch.distributed, which is not initialized for so many. Call "
            "init_process_group() first, or read an endless stream: LakeDataset(…, endless=True)"
        )
    digest = blake2b(dumps(state.to_plain(), kind="state", version=(1, 0)), digest_size=16).hexdigest()
    return JobEnds(store, digest, rank=rank, world_size=world_size)
