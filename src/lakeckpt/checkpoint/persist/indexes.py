"""What does a run keep of the tables that it reads?  The footer index of each, and the row selection of each filter.

They are written once, under their digests, and never change; `Documents` writes them once more where a run has lost
them. A filter's rows are counted once for a run: `offer` hands a reader what the run has saved, and `save` saves what
was counted, so that no attempt counts again what another has.

Imports without torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from lakeckpt.checkpoint.persist.history import INDEX, index_path, selection_path
from lakeckpt.errors import ObjectMissing, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.tracking.readers import index_of, versions_of

__all__ = ["Document", "Documents", "documents_of", "filtered", "offer", "save"]


class Document(Protocol):
    """What is written under its digest."""

    @property
    def digest(self) -> str:
        """Of its content."""
        ...

    def dumps(self) -> bytes:
        """Its bytes."""
        ...

    @classmethod
    def loads(cls, data: bytes) -> Document:
        """The document that `dumps` made ``data`` of; `WireError` if it is none."""
        ...


def documents_of(reader: object) -> Mapping[str, Document]:
    """What a run keeps of the table of ``reader``, by path; the rows that a filter keeps are counted for it."""
    found: dict[str, Document] = {}
    for index, selection in versions_of(reader):
        found[index_path(index.digest)] = index
        if selection is not None:
            found[selection_path(index.digest, selection.digest)] = selection
    return found


def filtered(readers: Iterable[object]) -> list[Any]:
    """Those of ``readers`` that have a filter."""
    return [one for one in readers if getattr(one, "row_filter", None) is not None and index_of(one) is not None]


def offer(storage: Storage, reader: Any) -> bool:
    """Offer ``reader``, which has a filter, the selection that the run at ``storage`` has saved of it.

    Returns whether it was taken: a reader takes only what the same expression and the same pyarrow counted.
    A damaged selection is passed over, and the reader counts again.
    """
    folder = f"{INDEX}/{index_of(reader).digest}/"  # type: ignore[union-attr]
    saved = [info for info in storage.list(folder.rstrip("/")) if info.path.startswith(folder)]
    for info in sorted(saved, key=lambda one: (one.mtime_ns or 0, one.path), reverse=True):
        with contextlib.suppress(WireError, ObjectMissing, ValueError):
            if reader.offer_selection(RowSelection.loads(storage.read(info.path))):
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


class Documents:
    """The documents of a run that one attempt writes. Used by the thread that publishes."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, Callable[[], bytes]] = {}
        self._written: set[str] = set()
        self._new: frozenset[str] = frozenset()

    def write(self, documents: Mapping[str, Callable[[], bytes]]) -> None:
        """Write what is not in the run yet of ``documents`` (path → what makes it), and of those kept."""
        self._new = frozenset(documents)
        self._known |= documents
        for path, make in self._known.items():
            if path not in self._written and not self._storage.list(path):
                self._storage.put(path, [make()])
            self._written.add(path)

    def forget_written(self) -> None:
        """The run may have lost what was written."""
        self._written.clear()

    def keep(self, indexes: Iterable[str | None]) -> None:
        """Keep what the last `write` was given, and what belongs to the tables whose indexes have these digests, so as
        to write it once more if need be; nothing else."""
        folders = tuple(f"{INDEX}/{digest}" for digest in indexes if digest is not None)
        kept = {path for path in self._known if path in self._new or path.startswith(folders)}
        self._known = {path: make for path, make in self._known.items() if path in kept}
