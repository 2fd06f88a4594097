"""Which rows were dealt out and could not be read?  The skip list: row groups, and between which positions.

Positions never move: a micro-batch in whose positions a damaged row group lies is short by that group's rows. A `Skip`
says so on the micro-batch's receipt; a `SkipList` adds them up for the ledger, and tells a run that goes on which
stretches of which row groups are not to be tried again. A list holds one entry for each row group (and order of the
epoch), with intervals of positions among which other row groups' rows may stand: exactly the rows of *that* row group
at *those* positions did not come. So it stays small however rows are shuffled.

It decides nothing, and never lists single rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plain import integers
from lakeckpt.errors import StateInvalid

__all__ = ["MOST_SKIPPED", "Skip", "SkipList", "SkippedGroup"]

MOST_SKIPPED = 4096
"""Row groups that a list holds: where more are damaged, it is no odd row group, and the damage is raised."""

_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedGroup:
    """Rows of one row group that did not come: those at ``positions`` of an epoch."""

    table: str
    """Digest of the pinned table (hex); where rows are selected, a slash and the digest of the row selection."""
    epoch: int
    num_lanes: int
    """The lanes that the epoch's order was made with, and their rotation: what positions mean."""
    rotation: int
    group: int
    """The row group's ordinal in the table."""
    file: str
    row_group: int
    """Its ordinal in the file."""
    reason: str
    positions: Intervals

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """What tells entries of a list apart."""
        return self.table, self.epoch, self.num_lanes, self.rotation, self.group

    def to_plain(self) -> list[object]:
        """Return JSON-able values."""
        where = [self.epoch, self.num_lanes, self.rotation, self.group, self.row_group]
        return [self.table, where, self.file, self.reason, [list(pair) for pair in self.positions.pairs()]]

    @classmethod
    def from_plain(cls, value: object) -> SkippedGroup:
        """Return what `to_plain` made ``value`` of; StateInvalid where it is none."""
        if not isinstance(value, (list, tuple)) or len(value) != 5 or not isinstance(value[4], (list, tuple)):
            raise StateInvalid(f"a skipped row group is [table, where, file, reason, positions], got {value!r:.80}")
        table, where, file, reason, pairs = value
        if not all(isinstance(one, str) for one in (table, file, reason)):
            raise StateInvalid(f"a skipped row group names a table, a file and a reason, got {value!r:.80}")
        epoch, num_lanes, rotation, group, row_group = integers(where, "where", count=5)
        found = [integers(pair, "positions", count=2) for pair in pairs]
        try:
            positions = Intervals.of([(start, stop) for start, stop in found])
        except ValueError as error:
            raise StateInvalid(f"not the positions of a skipped row group: {error}") from error
        return cls(
            table=table,
            epoch=epoch,
            num_lanes=num_lanes,
            rotation=rotation,
            group=group,
            file=file,
            row_group=row_group,
            reason=reason[:_REASON_CHARACTERS],
            positions=positions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """What of a micro-batch did not come: ``rows`` rows of one row group."""

    group: SkippedGroup
    """Which row group, and between which positions of the micro-batch."""
    rows: int

    def __post_init__(self) -> None:
        if not 0 < self.rows <= self.group.positions.size:
            raise ValueError(f"{self.rows} rows skipped at {self.group.positions}")

    def to_plain(self) -> list[object]:
        """Return JSON-able values."""
        return [self.rows, self.group.to_plain()]

    @classmethod
    def from_plain(cls, value: object) -> Skip:
        """Return what `to_plain` made ``value`` of; StateInvalid where it is none."""
        if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not int:
            raise StateInvalid(f"a skip is [rows, row group], got {value!r:.80}")
        try:
            return cls(rows=value[0], group=SkippedGroup.from_plain(value[1]))
        except StateInvalid:
            raise
        except ValueError as error:
            raise StateInvalid(f"not a skip: {error}") from error


class SkipList:
    """Row groups that were skipped, and where. A value: whatever is added makes a new list.

    >>> one = SkippedGroup(table="", epoch=0, num_lanes=1, rotation=0, group=3, file="a", row_group=3, reason="",
    ...                    positions=Intervals.of([(30, 34)]))
    >>> two = replace(one, positions=Intervals.of([(34, 40)]))
    >>> [entry.positions.pairs() for entry in SkipList([one]).union(SkipList([two]))]
    [[(30, 40)]]
    """

    __slots__ = ("_groups",)

    def __init__(self, groups: Iterable[SkippedGroup] = ()) -> None:
        self._groups: Mapping[tuple[str, int, int, int, int], SkippedGroup] = {}
        found: dict[tuple[str, int, int, int, int], SkippedGroup] = {}
        for one in groups:
            known = found.get(one.key)
            found[one.key] = one if known is None else replace(known, positions=known.positions.union(one.positions))
        self._groups = found

    def __iter__(self) -> Iterator[SkippedGroup]:
        return iter(self._groups[key] for key in sorted(self._groups))

    def __len__(self) -> int:
        return len(self._groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, entry: SkippedGroup) -> bool:
        """Return whether anything of the row group of ``entry`` is listed, in its epoch and order."""
        return entry.key in self._groups

    def __eq__(self, other: object) -> bool:
        # The first reason heard may differ from rank to rank.
        if not isinstance(other, SkipList):
            return NotImplemented
        return {k: v.positions for k, v in self._groups.items()} == {k: v.positions for k, v in other._groups.items()}

    def __hash__(self) -> int:
        return hash(frozenset(self._groups))

    def __repr__(self) -> str:
        return f"SkipList({list(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return SkipList, (list(self),)

    def union(self, *others: SkipList) -> SkipList:
        """Return what is in this list or in any of ``others``."""
        others = tuple(one for one in others if one)
        if not others:
            return self
        return SkipList(entry for one in (self, *others) for entry in one._groups.values())

    def since(self, epoch: int) -> SkipList:
        """Return the entries of ``epoch`` and later ones."""
        if all(one.epoch >= epoch for one in self._groups.values()):
            return self
        return SkipList(one for one in self._groups.values() if one.epoch >= epoch)

    def reason(self, entry: SkippedGroup) -> str | None:
        """Return why a stretch of a row group (``entry``, its reason aside) is not to be read; None where it may be.

        Any of its positions listed: all of it. Where the epoch was read in another order (it was begun again with other
        lanes), positions cannot be compared, and all of the row group stays out.
        """
        if not self._groups:
            return None
        known = self._groups.get(entry.key)
        if known is not None and known.positions.intersection(entry.positions):
            return known.reason
        for (table, epoch, *order, group), other in self._groups.items():
            same = (table, epoch, group) == (entry.table, entry.epoch, entry.group)
            if same and order != [entry.num_lanes, entry.rotation]:
                return other.reason
        return None

    def to_plain(self) -> list[list[object]]:
        """Return JSON-able values."""
        return [one.to_plain() for one in self]

    @classmethod
    def from_plain(cls, plain: object) -> SkipList:
        """Return what `to_plain` made ``plain`` of; StateInvalid where it is none."""
        if not isinstance(plain, (list, tuple)):
            raise StateInvalid(f"a skip list is a list, got {type(plain).__name__}")
        return cls(SkippedGroup.from_plain(entry) for entry in plain)
