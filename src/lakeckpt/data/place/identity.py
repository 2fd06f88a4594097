"""This module makes the identity of a dataset's order of rows, and says in words how two identities differ.

`IdentityOf` makes a dataset's `Identity` when it is asked, because rows that are filtered must be counted first.
`differing` names the fields in which a state's identity differs from the dataset's, and `at_version` takes an identity
to another table version. The module reads no rows itself, and starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from lakeckpt.core.lanes import Tail
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.state import Identity
from lakeckpt.data.place.selecting import Selecting
from lakeckpt.errors import ConfigError
from lakeckpt.lake.table.table import Table

__all__ = ["IdentityOf", "at_version", "differing"]


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
        return "" if self.selecting is None else str(self.selecting)

    def __call__(self) -> Identity:
        """The identity; counts the rows that a filter keeps, if nobody has."""
        found = None if self.selecting is None else self.selecting.get()
        rows = self.table.num_rows if found is None else found.num_rows
        if self.endless and not rows:
            raise ConfigError(f"endless=True needs at least one row, and the filter {found and found.text} keeps none")
        tokens = 0 if found is None or found.unit == 1 else int(found.group_rows.sum())
        if self.endless and found is not None and 0 < tokens < found.unit:
            raise ConfigError(
                f"an endless stream of {found.text} needs at least {found.unit} tokens, and the table has {tokens}"
            )
        version = self.table.index.version
        return Identity(
            table=self.table.index.digest,
            selection="" if found is None else found.digest,
            rows=rows,
            unit=1 if found is None else found.unit,
            tokens=tokens,
            spec=self.spec,
            tail=self.tail,
            endless=self.endless,
            version=str(version) if version.name else "",
        )


_WORDS = "{} in this dataset, {} in the state"


def differing(mine: Identity, its: Identity, *, kept: str) -> list[str]:
    """One line for each field in which a state's identity differs from the dataset's, led by the field's name.

    ``kept``: the dataset's filter, for people.
    """
    return [
        f"selection: {_selections(mine.selection, its.selection, kept)}" if line.startswith("selection:") else line
        for line in mine.differences(its, words=_WORDS)
    ]


def at_version(mine: Identity, its: Identity) -> Identity:
    """Return ``its`` as if it were of the table version of ``mine``.

    Which rows a filter keeps of one version says nothing about another version. So an epoch that begins over another
    version takes the filter of ``mine``; only a filter in place of none, or none in place of one, stays a difference.
    """
    there = its.of_version(mine)
    return there if bool(mine.selection) == bool(its.selection) else replace(there, selection=its.selection)


def _selections(mine: str, its: str, kept: str) -> str:
    said = _WORDS.format(repr(mine), repr(its))
    if not its:
        return f"{said}: the state is of every row, and this dataset has a filter or packs ({kept})"
    if not mine:
        return f"{said}: the state has a filter or packs, and this dataset has none and reads rows"
    return (
        f"{said}: this dataset, {kept}, keeps other rows than were counted for the state. The filter or the packing "
        f"changed, or another pyarrow than {pa.__version__} counted"
    )
