"""This module makes the identity of a dataset's order of rows, and says in words how two identities differ.

`Pinned` is a version of the table as a dataset reads it. It makes the `Identity` of the order of its rows when it is
asked, because rows that are filtered must be counted first.
`differing` names the fields in which a state's identity differs from the dataset's, and `at_version` takes an identity
to another table version. The module reads no rows itself, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.core.identity import Identity
from lakeckpt.core.order import OrderSpec, Tail
from lakeckpt.data.base.options import OVERRIDABLE
from lakeckpt.data.base.selecting import Selecting
from lakeckpt.errors import ConfigError, StateMismatch
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.columns.convert import Nulls, check_convertible
from lakeckpt.reading.filters.row_filter import Filters, RowFilter, row_filter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.windows.decode import select_columns

__all__ = ["Pinned", "at_version", "check_accepted", "differing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A version of a table, as a dataset reads it.

    Raises `SchemaError` and `ConfigError` if the version cannot be read so.
    """

    table: Table
    columns: list[str] | None
    """None: all of the version."""
    nulls: Nulls | None
    """None: Arrow columns are given as they are."""
    filters: Filters | None
    spec: OrderSpec
    tail: Tail
    endless: bool
    packing: Packing | None = None
    """How documents are packed into sequences; None: rows are read."""
    selecting: Selecting | None = field(init=False)
    """None: every row is read."""

    def __post_init__(self) -> None:
        wanted = select_columns(self.table.schema, self.columns)
        if self.nulls is not None:
            check_convertible(wanted, nulls=self.nulls)
        keep = None if self.filters is None else row_filter(self.filters, self.table.schema)
        if self.packing is not None:
            self.packing.check(self.table.schema)
        is_every = keep is None and self.packing is None
        object.__setattr__(self, "selecting", None if is_every else Selecting(self.table, keep, self.packing))

    def at(self, index: TableIndex) -> Pinned:
        """Return the version of the table that ``index`` pins, read in the same way."""
        return replace(self, table=self.table.at(index))

    @property
    def row_filter(self) -> RowFilter | None:
        """The filter, as it was understood; None: every row is read."""
        return None if self.selecting is None else self.selecting.filter

    @property
    def selection(self) -> RowSelection | None:
        """The rows that the filter keeps, counted if need be; None without a filter."""
        return None if self.selecting is None else self.selecting.get()

    @property
    def selections(self) -> tuple[RowSelection | None, ...]:
        """All that is counted to read: `selection`, and the rows that a filter keeps of documents that are packed."""
        kept = None if self.packing is None or self.selecting is None else self.selecting.kept
        return (self.selection, *(() if kept is None else (kept[1],)))

    @property
    def counted(self) -> tuple[npt.NDArray[np.int64], int]:
        """The rows of each row group that have positions (packed: the tokens), and how many of them make a position."""
        found = self.selection
        return (self.table.index.group_rows, 1) if found is None else (found.group_rows, found.unit)

    def offer(self, found: RowSelection) -> bool:
        """Take a saved selection instead of counting; return whether it was needed, and is of this version."""
        return self.selecting is not None and self.selecting.offer(found)

    def identity(self) -> Identity:
        """Return the identity of the order of rows. Counts the rows that a filter keeps, unless they are counted.

        Raises `ConfigError` if an endless stream would have no row, and what counting raises.
        """
        found = self.selection
        rows = self.table.num_rows if found is None else found.num_rows
        tokens = 0 if found is None or found.unit == 1 else int(found.group_rows.sum())
        if self.endless and found is not None and found.unit > max(1, tokens):
            raise ConfigError(
                f"an endless stream of {found.text} needs at least {found.unit} tokens, and the table has {tokens}"
            )
        if self.endless and not rows:
            raise ConfigError(f"endless=True needs at least one row, and the filter {found and found.text} keeps none")
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
    """Return one line for each thing in which a state's identity differs from the dataset's, led by its name.

    ``kept``: the dataset's filter, for people. If both pack, and into sequences of other lengths, that is said in place
    of what follows from it.
    """
    made = []
    if mine.maker is not None and its.maker is not None:
        same_rows = (mine.table, mine.selection) == (its.table, its.selection)
        made = mine.maker.differences(its.maker, same_rows=same_rows)
        if made and not mine.maker.name:  # the packing of whole documents is a part of their selection
            its = replace(its, selection=mine.selection)
    return [*made, *_of_rows(mine, its, kept)]


def _of_rows(mine: Identity, its: Identity, kept: str) -> list[str]:
    if 1 not in (mine.unit, its.unit) and mine.unit != its.unit:
        like = replace(its, selection=mine.selection, rows=mine.rows, tokens=mine.tokens, unit=mine.unit)
        return [f"length: {_WORDS.format(mine.unit, its.unit)}", *mine.differences(like, words=_WORDS)]
    return [
        f"selection: {_selections(mine.selection, its.selection, kept)}" if line.startswith("selection:") else line
        for line in mine.differences(its, words=_WORDS)
    ]


def at_version(mine: Identity, its: Identity) -> Identity:
    """Return ``its`` as if it were of the table version of ``mine``.

    The rows that a filter keeps of one version say nothing about another version. So an epoch that begins over another
    version takes the filter of ``mine``; only a filter in place of none, or none in place of one, stays a difference.
    """
    there = its.of_version(mine)
    return there if bool(mine.selection) == bool(its.selection) else replace(there, selection=its.selection)


def _selections(mine: str, its: str, kept: str) -> str:
    both = _WORDS.format(repr(mine), repr(its))
    if not its:
        return f"{both}: the state is of every row, and this dataset has a filter or packs ({kept})"
    if not mine:
        return f"{both}: the state has a filter or packs, and this dataset has none and reads rows"
    return (
        f"{both}: this dataset, {kept}, keeps other rows than were counted for the state. The filter or the packing "
        f"changed, or another pyarrow than {pa.__version__} counted"
    )


def check_accepted(differences: Sequence[str], *, accepted: Collection[str]) -> None:
    """Raise StateMismatch if a state differs from the dataset in anything but ``accepted``, and say what to do."""
    names = sorted({line.split(":")[0] for line in differences})
    rejected = [line for line in differences if line.split(":")[0] not in accepted]
    if rejected:
        override = f", or accept them: ReadOptions(accept_changes={names})" if OVERRIDABLE.issuperset(names) else ""
        raise StateMismatch(
            "the reader state belongs to another order of rows than that of this dataset. They differ in "
            f"{'; '.join(rejected)}. Open the dataset with the values of the state{override}"
        )
