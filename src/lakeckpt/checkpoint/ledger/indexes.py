"""This module finds the documents of a run that name rows: footer indexes and row selections of what readers read.

It reads ``index/`` only, and changes nothing. It never imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lakeckpt.checkpoint.consumed.rows import RowOrder, order_name
from lakeckpt.checkpoint.format.manifest import ReaderRecord
from lakeckpt.checkpoint.format.verified_reads import read_object
from lakeckpt.checkpoint.persist.history import INDEX, History, index_path, selection_path
from lakeckpt.checkpoint.persist.log import Damage
from lakeckpt.core.changes import of_each
from lakeckpt.core.identity import Identity
from lakeckpt.core.state import State
from lakeckpt.errors import CheckpointDamaged, NewerFormat, StateError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.reading.filters.selection import RowSelection

__all__ = ["index_damage", "orders_of"]

_Document = TypeVar("_Document", bound=TableIndex | RowSelection)


def orders_of(storage: Storage, history: History) -> dict[str, RowOrder]:
    """Return the orders of the tables that the readers of ``history`` read, by `order_name`.

    Skips an order whose index or selection cannot be read or has another digest.
    """
    records = [reader for manifest in history.chain for reader in manifest.readers.values()]
    indexes: dict[str, TableIndex] = {}
    for digest in _tables_of(records):
        with contextlib.suppress(WireError, CheckpointDamaged):
            indexes[digest] = _read(storage, index_path(digest), digest, TableIndex.loads)
    orders = {digest: RowOrder(index) for digest, index in indexes.items()}
    for identity in _identities_of(records):
        if identity.selection and identity.table in indexes:
            path = selection_path(identity.table, identity.selection)
            with contextlib.suppress(WireError, CheckpointDamaged, ValueError):
                found = _read(storage, path, identity.selection, RowSelection.loads)
                orders[order_name(identity)] = RowOrder(indexes[identity.table], found)
    return orders


def index_damage(storage: Storage, records: Sequence[ReaderRecord]) -> list[Damage]:
    """Return the damage of the indexes and selections that ``records`` name. `NewerFormat`."""
    named: dict[str, tuple[str, Callable[[bytes], TableIndex | RowSelection]]] = {
        index_path(digest): (digest, TableIndex.loads) for digest in _tables_of(records)
    }
    for identity in _identities_of(records):
        if identity.selection and index_path(identity.table) in named:
            path = selection_path(identity.table, identity.selection)
            named[path] = (identity.selection, RowSelection.loads)
    damage = []
    for path, (digest, load) in sorted(named.items()):
        try:
            _read(storage, path, digest, load)
        except NewerFormat:
            raise
        except (CheckpointDamaged, WireError) as error:
            damage.append(Damage(path=path, reason=str(error).removeprefix(f"{path}: ")))
    return damage


def _read(storage: Storage, path: str, digest: str, load: Callable[[bytes], _Document]) -> _Document:
    """Return the document at ``path``. `CheckpointDamaged` if it has another digest or is missing, `WireError`."""
    found = load(read_object(storage, path))
    if found.digest != digest:
        raise CheckpointDamaged(f"{path}: this is the {INDEX} with the digest {found.digest}")
    return found


def _tables_of(records: Iterable[ReaderRecord]) -> set[str]:
    """The digests of the indexes that ``records`` name, those of table versions that were read before included."""
    found: set[str] = set()
    for one in records:
        if one.index is not None:
            tables = {identity.table for identity in _identities_of([one])}
            found |= {one.index, *(tables if one.index in tables else ())}
    return found


def _identities_of(records: Iterable[ReaderRecord]) -> set[Identity]:
    """The identities of all states in ``records``; a reader with states of another kind has none."""
    plains = [plain for one in records for plain in (one.state, *(stretch.begin for stretch in one.stretches))]
    found: set[Identity] = set()
    for plain in plains:
        with contextlib.suppress(StateError):
            found.update(order for one in of_each(State.from_plain(plain)) for order in one.epoch_orders)
    return found
