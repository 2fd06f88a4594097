"""This module chooses the version of its table that a dataset reads.

A dataset reads the version that it was opened with, or the version that a restored state names (`Versions.fit` looks
whether that version is still there, `Versions.repin` goes to it). With ``on_new_version="next_epoch"`` it goes on with
the newest version when an epoch begins (`Versions.move`): all ranks with the same version, which the first rank finds.
Inside of an epoch a version is never changed.

The module reads listings and footers only when it is asked to look. It counts no rows (`lakeckpt.data.base.selecting`
does), and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import State
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.options import Follow, ReadOptions
from lakeckpt.data.base.source import BatchSource
from lakeckpt.data.position.broadcast import found_by_first
from lakeckpt.data.position.excluding import going_on_without
from lakeckpt.data.position.following import Look, next_tranche
from lakeckpt.data.position.progress import Progress
from lakeckpt.errors import ConfigError, DataFileChanged, SchemaError, StateMismatch, TableError, TableVersionGone
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table

__all__ = ["Fit", "Saved", "Versions", "check_moves"]


Saved = Callable[..., Any]
"""See `Versions.fit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The way in which a dataset goes on from a state."""

    index: TableIndex | None = None
    """The version to go to first (`Versions.repin`); None: the current version is the right one."""
    excluding: TableIndex | None = None
    """``index`` with the row groups that the table excludes now: the rest of the state's epoch goes on with it. None:
    ``index`` excludes the same row groups."""
    order: Identity | None = None
    """The order in ``index`` of the epochs that begin later, if ``index`` excludes other row groups than that of the
    state: epochs that have begun keep their order. None: all do."""
    excluded: Mapping[int, Intervals] = field(default_factory=dict)
    """Epoch → the positions that are left of it, and that stand in windows with rows that ``index`` excludes."""
    skipped: str = ""
    """The reason for which the rest of the state's epoch is dropped and the next epoch begun; empty: it is not."""
    grown: str = ""
    """How the table that was opened differs from ``index``, for people; empty: it does not, or it is followed."""


def check_moves(table: Table, options: ReadOptions, *, endless: bool, follows: bool) -> None:
    """Raise `ConfigError` if ``options`` ask for moves between versions that cannot be made."""
    named = "a version was named when the table was opened (or a metadata file), or it was opened in another process"
    moves = "next_epoch" in (options.on_new_version, options.on_version_gone) or options.accept_changes
    if follows and (moves or table.added is None):
        is_hudi = table.index.version.format == "hudi"
        named = "writers of Hudi tables write files again as rows come" if is_hudi else named
        why = "leave on_new_version=, on_version_gone= and accept_changes= out" if moves else named
        raise ConfigError(f"follow= cannot be: {why}")
    if options.on_version_gone == "next_epoch" and endless:
        raise ConfigError('on_version_gone="next_epoch" cannot be: an endless stream has no epochs')
    if options.on_new_version == "next_epoch" and (endless or table.reopen is None):
        why = "an endless stream has no epochs" if endless else named
        raise ConfigError(f'on_new_version="next_epoch" cannot be: {why}')


class Versions:
    """The versions that one dataset reads, in the main process. ``at_hand`` is the version that is read now.

    Of a mixture, the dataset is its source ``number``, which stays at one version.
    """

    def __init__(
        self,
        pinned: Pinned,
        source: BatchSource,
        progress: Progress,
        options: ReadOptions,
        *,
        number: int = 0,
        follow: Follow | None = None,
    ) -> None:
        self._number, self._follow = number, follow
        self.at_hand = pinned
        self.source = source
        self._progress = progress
        self._moves = options.on_new_version == "next_epoch"
        self._drops = options.on_version_gone == "next_epoch"
        self._is_new = True
        self._read = {pinned.table.index.digest: pinned}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": {self.at_hand.table.index.digest: self.at_hand}}  # workers read one version

    def check_worker(self) -> None:
        """Raise ConfigError in a worker of another DataLoader, if versions move."""
        asked, what = 'on_new_version="next_epoch" was asked for', "a new version"
        if self._follow is not None:
            asked, what = "follow= was given", "new files"
        if self._moves or self._follow is not None:
            raise ConfigError(
                f"{asked}, and the workers of a torch DataLoader never learn of {what}: use lakeckpt.LakeLoader"
            )

    @property
    def read(self) -> list[Pinned]:
        """The versions that something was read of since the last checkpoint, and the current version."""
        whole = self.at_hand.table.index.whole
        if whole.digest not in self._read:  # an epoch that begins is of it, before anything was read of it
            self._read[whole.digest] = self._of(whole)
        needed = {self.at_hand.table.index.digest, whole.digest, *self._progress.runs.tables}
        self._read = {digest: one for digest, one in self._read.items() if digest in needed}
        return list(self._read.values())

    # --- after a restore

    def fit(self, state: State, saved: Saved, *, look: bool) -> Fit:
        """Return how to go on from ``state``. With ``look``, compare the files of its version with the store first.

        ``saved`` returns the index with a digest that was kept beside the state, or with a second digest a selection of
        its rows; or None. Raises `TableVersionGone` and
        `DataFileChanged` if files of the version are gone or others, unless the rest of the epoch is to be dropped;
        `SchemaError` if the version lacks a column.
        """
        self._know(state, saved)
        wanted, live = state.identity.table, self.at_hand.table
        if self._progress.accepts("table", self._number) or self._progress.goes_on_elsewhere(state):
            return Fit()
        if wanted == live.index.digest and not look:
            return Fit()
        index = saved(wanted)
        if index is None:
            return Fit()  # loading the state refuses it, and names both versions
        excluding = index.excluding(live.exclude)
        named = {live.index.digest, live.index.whole.digest}
        if live.named and not named & {wanted, excluding.whole.digest}:
            return Fit()
        try:
            if wanted == live.index.digest:
                _compare_etags(live, index)
                return Fit()
            if look:
                live.at(index).verify()
        except DataFileChanged as error:
            if self._drops and not state.identity.endless:
                return Fit(skipped=str(error))
            raise _with_advice(error, state) from None
        if excluding == index:
            self._of(index)
            return Fit(index=index, grown="" if self._follow else _grown(index, live.index))
        return self._fit_excluding(state, index, excluding, saved)

    def _fit_excluding(self, state: State, index: TableIndex, excluding: TableIndex, saved: Saved) -> Fit:
        """Return how the rest of the epoch goes on with other excluded row groups.

        If positions are rows of the table, the rest is another selection of rows. Else the windows that hold such row
        groups are excluded.
        """
        its = state.identity
        if self._follow is not None:
            raise StateMismatch(
                f"exclude= of the table {self.at_hand.table.uri!r} is not as it was when the checkpoint was made, and "
                "the table is followed: open it with the exclude= that it had, or begin a new run"
            )
        if not (its.endless or its.selection or its.maker):
            return Fit(index=index, excluding=excluding)
        pinned = self._read[excluding.digest] = self._of(excluding)
        order, excluded = going_on_without(state, pinned, partial(self._at, saved=saved))
        return Fit(index=excluding, order=order, excluded=excluded)

    def _know(self, state: State, saved: Saved) -> None:
        """Learn the orders that epochs of ``state`` began with, if later epochs have another one."""
        for order in state.epoch_orders:
            if order is not state.identity:
                self._at(order, saved)

    def _at(self, order: Identity, saved: Saved) -> Pinned:
        """Return the version that ``order`` is of, with the counts that it was made of; the source knows them then."""
        index = saved(order.table)
        pinned = None if index is None else self._of(index)
        if pinned is not None and order.selection:
            found = saved(order.table, order.selection)
            if found is not None:
                pinned.offer(found)
        if pinned is None or (pinned.selection is not None and pinned.selection.digest != order.selection):
            raise StateMismatch(
                f"exclude= of the table {self.at_hand.table.uri!r} is not as it was when the epoch began, and the run "
                f"has lost the index or the counts of the table that it began with ({order.table[:12]}): restore "
                "index/ of the run, or begin a new run"
            )
        self.source.know(order.table, pinned.counted)
        return pinned

    def repin(self, index: TableIndex) -> Callable[[], None]:
        """Read the version that ``index`` pins; the place is lost. Return a function that undoes both."""
        before = self.at_hand
        pinned = self._of(index)
        undo = self._progress.repin(pinned, self._number)
        self._go_to(pinned)
        if index.rest is not None:
            self.read_rest()

        def go_back() -> None:
            self._go_to(before)
            undo()

        return go_back

    def read_rest(self) -> None:
        """Go on with the whole version when the epoch has ended of which the current version is the rest."""
        self._progress.read_rest(self._of(self.at_hand.table.index.whole))

    # --- when an epoch begins

    def move(self, *, explicit: tuple[int, int] | None, dp_group: Any) -> None:
        """Change the version when an epoch begins: from the rest of an epoch to its whole version, and to the newest
        version, if the dataset moves (collective).

        Raises on all ranks what looking for the newest version raised on the first rank.
        """
        if self.at_hand.table.index.rest is not None and not self._progress.in_rest:
            self._continue_with(self.at_hand.table.index.whole)
        if not self._moves and (self._follow is None or not self._is_new):
            return
        if not self._progress.at_start:
            self._is_new = False
            return
        data = found_by_first(self._newest, explicit=explicit, dp_group=dp_group)
        self._is_new = False
        index = TableIndex.loads(data)
        if index.digest != self.at_hand.table.index.digest:
            self._continue_with(index)

    def _continue_with(self, index: TableIndex) -> None:
        pinned = self._of(index)
        self._progress.move_to(pinned)
        self._go_to(pinned)

    def go_over(self, *, waits: bool, explicit: tuple[int, int] | None, dp_group: Any) -> bool:
        """Go over to the next tranche of a growing table, once there is one (collective).

        Returns False if the stream ends: nothing was added for ``stop_after_idle_s``. If ``waits`` is false, it looks
        once. Raises on all ranks what looking for new files raised on the first rank.
        """
        assert self._follow is not None
        look = Look(self._follow if waits else replace(self._follow, stop_after_idle_s=0), self.at_hand, self._progress)
        pinned = next_tranche(look, explicit=explicit, dp_group=dp_group)
        if pinned is not None:
            self._progress.go_over(pinned)
            self._go_to(pinned)
        return pinned is not None

    def _newest(self) -> bytes:
        table = self.at_hand.table
        if not self._is_new:
            assert table.reopen is not None, "a dataset moves only if no version was named"
            found = table.reopen()
            if found.uri != table.uri:
                raise TableError(f"the table {table.uri!r} is at {found.uri!r} now: open it there, and start anew")
            self._of(found.index)
            self._check_types(found.index)
            table = found
        return table.index.dumps()

    # --- inside

    def _of(self, index: TableIndex) -> Pinned:
        known = self._read.get(index.digest)
        if known is not None:
            return known
        table = self.at_hand.table
        missing = [name for name in self.at_hand.columns or () if name not in index.schema.names]
        if missing:
            raise SchemaError(
                f"{index.version} of {table.uri!r} has no column {', '.join(map(repr, missing))}, and the dataset "
                "reads it: name the columns= that both versions have, or the version to read when the table is opened"
            )
        return self.at_hand.at(index)

    def _go_to(self, pinned: Pinned) -> None:
        self.at_hand = pinned
        self._read[pinned.table.index.digest] = pinned
        self.source.pin(pinned)

    def _check_types(self, index: TableIndex) -> None:
        """`SchemaError` if a column that is read has another type in the version to move to."""
        table = self.at_hand.table
        for name in self.at_hand.columns or [name for name in index.schema.names if name in table.schema.names]:
            now, then = index.schema.field(name).type, table.schema.field(name).type
            if now != then:
                raise SchemaError(
                    f"column {name!r} is {now} in {index.version} of {table.uri!r}, and {then} in "
                    f"{table.index.version}, which was read before it: name the version to read when it is opened"
                )


def _grown(read: TableIndex, now: TableIndex) -> str:
    """Return how the version that is read differs from the version of the table now."""
    sizes = [f"{len(one.paths):,} files with {one.num_rows:,} rows" for one in (read, now)]
    return f"the version that is read on has {sizes[0]}, and the table has {sizes[1]} now"


def _compare_etags(live: Table, saved: TableIndex) -> None:
    """Raise DataFileChanged if two indexes with the same paths, sizes and footers have other ETags."""
    other = [
        f"{path!r} has the ETag {now}, not {then}"
        for path, now, then in zip(live.index.paths, live.index.etags, saved.etags, strict=True)
        if now is not None and then is not None and now != then
    ]
    if other:
        shown = "; ".join(other[:20]) + (f"; and {len(other) - 20} more" if len(other) > 20 else "")
        raise DataFileChanged(
            f"files of the table {live.uri!r} were written again since the checkpoint was made, at the same sizes: "
            f"{shown}. Put the pinned files back; if they are the same and were only copied, accept_changes=['table'] "
            "says so"
        )


def _with_advice(error: DataFileChanged, state: State) -> DataFileChanged:
    text = f"{error}. The checkpoint is in the middle of epoch {state.epoch}, which reads that version. "
    if state.identity.tail == "carry":
        text += "A stream that follows a table needs the files of its tranche: put them back, or begin a new run"
    elif state.identity.endless:
        text += "An endless stream cannot go on over another version: put the files back, or begin a new run"
    else:
        if not state.identity.selection:
            text += (
                "If files were only compacted and the old ones can still be read, `lakeckpt plan TABLE --remap RUN "
                "--key COLUMN` writes what was consumed, which a run over the newest version leaves out; "
            )
        text += (
            'ReadOptions(on_version_gone="next_epoch") drops the rest of the epoch and begins the next epoch with the '
            "newest version"
        )
    if isinstance(error, TableVersionGone):
        return TableVersionGone(text, files=error.files)
    return DataFileChanged(text)
