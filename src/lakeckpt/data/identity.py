"""What is the order of a dataset's rows a function of, and what changed since a state was made?

`IdentityOf` gives a dataset's `Identity` when it is asked: where rows are filtered, they must be counted first.
`differing` tells two identities apart in words, a filter by name. `state_of_job` reads the state that names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lakeckpt.core.ends import Tail
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.state import MAX_VERSION, Identity, ReaderState
from lakeckpt.data.selecting import Selecting
from lakeckpt.errors import ConfigError, StateInvalid
from lakeckpt.lake.selection import filter_of
from lakeckpt.lake.table import Table

__all__ = ["IdentityOf", "at_version", "differing", "state_of_job"]


@dataclass(frozen=True, slots=True)
class IdentityOf:
    """Makes the identity of a dataset; ConfigError where an endless stream would have no row."""

    table: Table
    selecting: Selecting | None
    spec: OrderSpec
    tail: Tail
    endless: bool

    @property
    def kept(self) -> str:
        """The filter, for people; empty where there is none."""
        return "" if self.selecting is None else str(self.selecting.filter)

    def __call__(self) -> Identity:
        """The identity; counts the rows that a filter keeps, if nobody has."""
        found = None if self.selecting is None else self.selecting.get()
        rows = self.table.num_rows if found is None else found.num_rows
        if self.endless and not rows:
            raise ConfigError(f"endless=True needs at least one row, and the filter {found and found.text} keeps none")
        version = self.table.index.version
        return Identity(
            table=self.table.index.digest,
            selection="" if found is None else found.digest,
            rows=rows,
            spec=self.spec,
            tail=self.tail,
            endless=self.endless,
            version=str(version)[:MAX_VERSION] if version.name else "",
        )


def state_of_job(plain: object) -> ReaderState:
    """Return the reader state that ``plain`` is; StateInvalid where it is none, or of lanes that went on by themselves:
    a rank's part, or what `lakeckpt.merge_states` made of parts."""
    for name in ("part", "lanes"):
        if isinstance(plain, Mapping) and name in plain:
            raise StateInvalid(
                f"this state has {name!r}: places of lanes that a LakeDataset or LakeLoader has not, and would leave "
                "out. Load it into a reader of the kind that made it"
            )
    return ReaderState.from_plain(plain)


def differing(mine: Identity, its: Identity, *, kept: str) -> list[str]:
    """One line for each field in which a state's identity differs from the dataset's, led by the field's name.

    ``kept``: the dataset's filter, for people.
    """
    return [
        f"selection: {_selections(mine.selection, its.selection, kept)}" if line.startswith("selection:") else line
        for line in mine.differences(its)
    ]


def at_version(mine: Identity, its: Identity) -> Identity:
    """``its``, as if it were of the table version that ``mine`` is of; another filter stays another."""
    there = its.of_version(mine)
    return there if filter_of(mine.selection) == filter_of(its.selection) else replace(there, selection=its.selection)


def _selections(mine: str, its: str, kept: str) -> str:
    said = f"{mine!r} became {its!r}"
    if not its:
        return f"{said}: the state is of every row, and this dataset has a filter ({kept})"
    if not mine:
        return f"{said}: the state is of the rows that a filter keeps, and this dataset has none"
    if filter_of(mine) != filter_of(its):
        return f"{said}: the filter changed, and this dataset keeps {kept}"
    return f"{said}: the filter is the same, and it keeps other rows (of another table, or by another pyarrow)"
