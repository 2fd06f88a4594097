"""This module keeps in a run the footer index of each table that the run reads, and the row selection of each filter.

Both are written once, under their digests, and never change; `write_documents` writes again what the run has lost.
The rows of a filter are counted once for a run: `offer` gives a reader the selection that the run has saved, and `save`
saves the selection that was counted, so that no attempt counts again.

The module imports without torch and starts no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from lakeckpt.checkpoint.persist.failures import save_failed
from lakeckpt.checkpoint.persist.history import INDEX, index_path, selection_path
from lakeckpt.errors import ObjectMissing, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.tracking.readers import index_of, tables_of, versions_of

__all__ = ["Document", "documents_of", "documents_of_all", "filtered", "offer", "save", "write_documents"]


Document = TableIndex | RowSelection
"""An object that is written under its digest."""


def documents_of(reader: object) -> Mapping[str, Document]:
    """Return the documents of the table of ``reader``, by path; the rows of a filter are counted for that."""
    found: dict[str, Document] = {}
    for index, selection in versions_of(reader):
        found[index_path(index.digest)] = index
        if selection is not None:
            found[selection_path(index.digest, selection.digest)] = selection
    return found


def filtered(readers: Iterable[object]) -> list[Any]:
    """Return what has a filter or packs documents: of the ``readers``, and of the sources of mixtures."""
    every = tables_of({str(at): one for at, one in enumerate(readers)}).values()
    return [one for one in every if _counted(one) and index_of(one) is not None]


def _counted(reader: object) -> int:
    """Return how many selections are counted to read: the rows of a filter, and packed tokens."""
    return sum(getattr(reader, name, None) is not None for name in ("row_filter", "packing"))


def offer(storage: Storage, reader: Any) -> bool:
    """Offer to ``reader``, one of `filtered`, the selections that the run at ``storage`` has saved of its table.

    Returns whether it needs no more: a reader takes only what the same expression and the same pyarrow counted. Damaged
    selections are skipped, and the reader counts again.
    """
    wanted = _counted(reader)
    folder = f"{INDEX}/{index_of(reader).digest}/"  # type: ignore[union-attr]
    saved = [info for info in storage.list(folder.rstrip("/")) if info.path.startswith(folder)]
    for info in sorted(saved, key=lambda one: (one.mtime_ns or 0, one.path), reverse=True):
        with contextlib.suppress(WireError, ObjectMissing, ValueError):
            wanted -= bool(reader.offer_selection(RowSelection.loads(storage.read(info.path))))
            if not wanted:
                return True
    return False


def save(storage: Storage, reader: object) -> None:
    """Save the selections of ``reader``, which has a filter, so that a later attempt need not count.

    A saved selection of the same rows that another expression or another pyarrow counted is replaced.
    """
    for path, document in documents_of(reader).items():
        if isinstance(document, RowSelection) and _needs_saving(storage, path, document):
            storage.put(path, [document.dumps()])


def _needs_saving(storage: Storage, path: str, live: RowSelection) -> bool:
    """Say whether the run lacks ``live``, or has it as something else counted it. Damage is left to `verify`."""
    if not storage.list(path):
        return True
    try:
        saved = RowSelection.loads(storage.read(path))
    except (WireError, ObjectMissing):
        return False
    return saved == live and (saved.expression, saved.pyarrow) != (live.expression, live.pyarrow)


def documents_of_all(readers: Iterable[object]) -> dict[str, Document]:
    """Return path → document of all ``readers``. Take them before records are cut: a cut forgets earlier versions."""
    return {path: one for reader in readers for path, one in documents_of(reader).items()}


def write_documents(storage: Storage, every: Mapping[str, Document]) -> set[str]:
    """Write those documents of ``every`` (`documents_of_all`) that the run at ``storage`` lacks, before a commit.

    Returns the paths of all of them. Raises `SaveFailed`.
    """
    try:
        for path, one in every.items():
            if not storage.list(path):
                storage.put(path, [one.dumps()])
    except OSError as error:
        text = f"the index of a table, which a checkpoint refers to, was not written: {error}"
        raise save_failed(text, error) from error
    return set(every)
