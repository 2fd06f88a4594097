"""This module names the keys of a round in a store, and counts which ranks have come: one key says that all have.

A counter serves 31 ranks: each rank adds the bit that is its own, and a second bit if it has left a text. The rank that
fills a counter counts it as full, and the rank that fills the last counter sets the key `Ballot.complete`. So a rank
sends one request, and rank 0 waits for one key. The counters name the ranks that are absent, and those with a text.

All ranks but rank 0 are counted. The module waits for nothing and starts no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["READ", "SILENT", "Ballot"]

READ, SILENT = 1 << 18, 1 << 40

_IN_ONE = 31
"""How many ranks share a counter: counters have 63 bits, and a rank takes two of them."""
_ALL = (1 << _IN_ONE) - 1


class Ballot:
    """The ranks 1 … ``world_size`` - 1 that have come to the round ``name``, in ``store``. Each rank makes its own."""

    __slots__ = ("_name", "_others", "_store")

    def __init__(self, store: Any, name: str, world_size: int) -> None:
        self._store, self._name, self._others = store, name, world_size - 1

    @property
    def _counters(self) -> Sequence[str]:
        return [self._counter(at) for at in range(-(-self._others // _IN_ONE))]

    def _counter(self, at: int) -> str:
        return f"{self._name}/came/{at}"

    @property
    def complete(self) -> str:
        """The key that is set when all ranks have come."""
        return f"{self._name}/all"

    @property
    def answer(self) -> str:
        """The key of the answer."""
        return f"{self._name}/answer"

    @property
    def read(self) -> str:
        """The key that counts the ranks that have come to the answer; `READ` more for each that has read it; and
        `SILENT` more if the answer says nothing, so that a rank that comes later does not read it."""
        return f"{self._name}/read"

    @property
    def keys(self) -> Sequence[str]:
        """All keys that no single rank sets."""
        return (*self._counters, f"{self._name}/full", self.complete, self.answer, self.read)

    def text(self, rank: int) -> str:
        """Return the key of what a rank states."""
        return f"{self._name}/{rank}"

    def wake(self, rank: int) -> str:
        """Return the key that is set when there is an answer, and for which ``rank`` alone waits."""
        return f"{self._name}/wake/{rank}"

    def come(self, rank: int, *, has_text: bool) -> None:
        """Count ``rank``, once. Its text is in the store already."""
        at, member = divmod(rank - 1, _IN_ONE)
        found = self._store.add(self._counter(at), 1 << member | has_text << (member + _IN_ONE))
        members = min(_IN_ONE, self._others - at * _IN_ONE)
        counters = -(-self._others // _IN_ONE)
        if found & _ALL == (1 << members) - 1 and self._store.add(f"{self._name}/full", 1) == counters:
            self.end()

    def end(self) -> None:
        """Wake rank 0, though ranks may be absent."""
        self._store.set(self.complete, "1")

    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return self._without([self._store.add(one, 0) for one in self._counters], 0)

    def with_text(self) -> list[int]:
        """Return the ranks that have left a text. All ranks have come."""
        words = [int(one) for one in self._store.multi_get(self._counters)]
        none = set(self._without(words, _IN_ONE))
        return [rank for rank in range(1, self._others + 1) if rank not in none]

    def _without(self, words: Sequence[int], shift: int) -> list[int]:
        """Return the ranks whose bits, ``shift`` bits up in the ``words`` of their counters, are not set."""
        return [
            rank
            for rank in range(1, self._others + 1)
            if not words[(rank - 1) // _IN_ONE] >> ((rank - 1) % _IN_ONE + shift) & 1
        ]
