"""This module decides who counts the rows that a filter keeps, or the tokens that are packed, and when.

`Selecting` counts when the counts are first needed. A checkpoint manager may offer counts that the run has saved. In a
job of several ranks, the first rank that needs the counts counts, and publishes them in the store of torch.distributed;
the others wait for them. So any rank may need the counts alone, at any time. A rank that waits in vain counts itself.

The loader workers of a `lakeckpt.LakeLoader` are started with the counts. The workers of another DataLoader each count,
unless the main process asked for the selection before; a warning says so.

The threads are those of `lakeckpt.reading.filters.count`.
"""

from __future__ import annotations

import contextlib
import warnings
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.utils.data import get_worker_info

from lakeckpt.data.base.torch_private import job_store
from lakeckpt.lake.table.table import Table
from lakeckpt.progress import progress_bar
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.token_counts import count_tokens

__all__ = ["Selecting"]

_SHOWN_S = 1.0
"""Counting that takes longer is shown on a terminal: it is why a script does not begin."""
_PATIENCE = timedelta(minutes=30)
"""A rank waits for the counts of another rank for so long."""


class Selecting:
    """The rows that a filter keeps of ``table``, or the tokens that ``packing`` packs of these rows, or of all rows.

    They are counted when `get` is first called, in whichever process.
    """

    def __init__(self, table: Table, keep: RowFilter | None, packing: Packing | None = None) -> None:
        self.table = table
        self.filter, self.packing = keep, packing
        self._rows = None if keep is None or packing is None else Selecting(table, keep)
        self._found: RowSelection | None = None

    def __str__(self) -> str:
        return str(self.filter if self.packing is None else self.packing)

    @property
    def digest(self) -> str:
        """A digest of all that the counts depend on, besides the table."""
        return "/".join(one.digest for one in (self.packing, self.filter) if one is not None)

    @property
    def kept(self) -> tuple[RowFilter, RowSelection] | None:
        """The filter and the rows that it keeps, for a decoder; None: every row is read."""
        if self.filter is None:
            return None
        return self.filter, (self if self._rows is None else self._rows).get()

    def get(self) -> RowSelection:
        """Return the selection: known, found by another rank, or counted now. Raises what counting raises."""
        if self._found is None:
            self._found = self._count_in_worker() if get_worker_info() is not None else self._count_in_job()
        return self._found

    def offer(self, found: RowSelection) -> bool:
        """Take ``found`` instead of counting, and return whether it was taken.

        It is not taken if counts are known, or if ``found`` was counted over another table, by another
        expression, or by another release of pyarrow.
        """
        index = self.table.index
        if self._rows is not None and self._rows.offer(found):
            return True
        if self._found is not None or found.table != index.digest or not found.was_counted_by(self):
            return False
        found.check(table=index.digest, existing=index.group_rows)
        self._found = found
        return True

    def _count(self) -> RowSelection:
        kept = self.kept if self.packing is not None else None
        with progress_bar("counted", after_s=_SHOWN_S) as progress:
            if self.packing is not None:
                return count_tokens(self.table, self.packing, kept, progress=progress)
            assert self.filter is not None
            return count_rows(self.table, self.filter, progress=progress)[0]

    def _count_in_worker(self) -> RowSelection:
        warnings.warn(
            "each worker of this DataLoader counts the rows or tokens to read, whenever it is started: ask for "
            "dataset.selection before you iterate, which counts once, or use lakeckpt.LakeLoader",
            UserWarning,
            stacklevel=2,
        )
        return self._count()

    def _count_in_job(self) -> RowSelection:
        store = self._store()
        if store is None:
            return self._count()
        raw = b""
        with contextlib.suppress(RuntimeError):  # the store is gone, or the wait was in vain
            if store.add("asked", 1) > 1:
                store.wait(["found"], _PATIENCE)
                raw = store.get("found")
        return RowSelection.loads(raw) if raw else self._published(store)

    def _published(self, store: Any) -> RowSelection:
        """Count, and publish the selection; nothing, if counting fails: the others are to see for themselves."""
        raw = b""
        try:
            found = self._count()
            raw = found.dumps()
        finally:
            with contextlib.suppress(RuntimeError):
                store.set("found", raw)
        return found

    def _store(self) -> Any:
        store = job_store(2)
        name = f"lakeckpt/selection/{self.table.index.digest}/{self.digest}"
        return None if store is None else PrefixStore(name, store)
