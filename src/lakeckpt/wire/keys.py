"""Could somebody have chosen these keys so that a dict of them takes for ever to fill?  Then they are refused.

The hashes of texts and bytes are salted. Those of numbers, and of tuples of them, are the same everywhere: a file may
be full of ones that are all equal, and a dict compares each with all before it. So of different keys, only a few may
have one hash. No state comes near that: it takes intent.
"""

from __future__ import annotations

from typing import Any

from lakeckpt.errors import LimitExceeded

__all__ = ["MOST_ALIKE", "Keys"]

MOST_ALIKE = 64
"""How many different keys of a document may have one hash: floats, of all sizes, have up to 34."""


class Keys:
    """The keys of all dicts and sets of one document; ``what`` names it in messages."""

    __slots__ = ("_by_hash", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._by_hash: dict[int, list[Any]] = {}

    def checked(self, key: Any) -> Any:
        """``key``. `LimitExceeded` where too many others have its hash; ``TypeError`` where it has none."""
        if type(key) is str:
            return key
        alike = self._by_hash.setdefault(hash(key), [])
        if key not in alike:
            if len(alike) == MOST_ALIKE:
                raise LimitExceeded(
                    f"{self._what}: more than {MOST_ALIKE} keys have the same hash: they were made to collide"
                )
            alike.append(key)
        return key
