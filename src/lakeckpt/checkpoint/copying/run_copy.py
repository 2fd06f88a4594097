"""This module copies a run to another place: its log up to one checkpoint, and all that a restore of that one reads.

The copy is a run of its own. Its log is that of the run, entry by entry, and ends with the checkpoint. The last entry
says that the copy keeps no other data, so the digest of its register differs; all else has the same bytes. `RunCopy`
takes these steps:

1. *Files.* The files of the checkpoint are written, then read again there and compared with their checksums. A file
   that lies there with its size is not written again, so a copy that was interrupted goes on. Several ranks may take a
   share each.
2. *Commit.* Records of parts and indexes are written, then the log: the entry of the checkpoint first, which makes it
   the newest one, and then the history before it. Until then the place has no run, or the checkpoint that an earlier
   copy has left there, whose data go afterwards.

Entries are put only into free slots: a place whose run has gone on by itself is refused, and nothing there is changed.
A few threads write and read; each call starts and joins its own. The module never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.manifest import Manifest, entry_from_bytes, entry_to_bytes
from lakeckpt.checkpoint.format.parts import OBJECTS, PARTS, PartRecord
from lakeckpt.checkpoint.format.register import Register
from lakeckpt.checkpoint.format.verified_reads import fetch_part, fetch_register, read_object, verify_file
from lakeckpt.checkpoint.persist.history import INDEX, History, must_stay, read_history
from lakeckpt.checkpoint.persist.log import list_slots, slot_path
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ObjectExists, WireError
from lakeckpt.lake.storage.base import Storage, delete_all, describe
from lakeckpt.progress import Progress

__all__ = ["RunCopied", "RunCopy", "copy_run"]

_THREADS = 4
"""So many files, of at most 256 MiB each, are in memory at once."""
_One = TypeVar("_One")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCopied:
    """What `RunCopy` has copied."""

    run: str
    slot: int
    step: int
    """Optimizer steps done at the checkpoint."""
    entries: int
    """Entries of the log that did not lie there."""
    files: int
    """Files of tensors."""
    size_bytes: int
    """The size of these files."""
    written_bytes: int
    """The size of those that did not lie there with their size."""


def copy_run(
    source: Storage, target: Storage, *, step: int | None = None, progress: Progress | None = None
) -> RunCopied:
    """Copy and commit, as `RunCopy` does. If the newest checkpoint is removed meanwhile, by a run that goes on, the one
    that took its place is copied."""
    newest = read_history(source).tip
    while True:
        try:
            copy = RunCopy(source, target, step=step)
            copy.copy_files(progress=progress)
            return copy.commit()
        except CheckpointDamaged:
            before, newest = newest, read_history(source).tip
            if step is not None or newest is None or before is None or newest.slot == before.slot:
                raise


class RunCopy:
    """Copies the checkpoint of ``step`` (None: the newest of the history) of the run at ``source`` to ``target``.
    ``slot`` names a checkpoint that another rank has chosen.

    Raises `CheckpointNotFound` if there is no run or no such checkpoint, `CheckpointDamaged` if its records are not
    whole, and `ConfigError` if ``target`` holds another run, or one that has gone on by itself, or a later copy, and if
    rows leave the deal of the newest checkpoint that no commit has without them yet.
    """

    def __init__(self, source: Storage, target: Storage, *, step: int | None = None, slot: int | None = None) -> None:
        self._source, self._target = source, target
        self._manifest = _chosen(source, step, slot)
        self.slot = self._manifest.slot
        register = fetch_register(source, self._manifest)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="lakeckpt-copy") as pool:
            ranks = range(self._manifest.world_size)
            self._parts = list(pool.map(lambda rank: fetch_part(source, self._manifest, register, rank), ranks))
        slot = self._manifest.slot
        alone = Intervals.of([(slot, slot + 1)])
        self._register = Register(
            digests=register.digests,
            kept=tuple(one for one in register.kept if one.slot == slot),
            needed=dict.fromkeys((path for part in self._parts for path in part.earlier), alone),
        )
        self._tip = replace(self._manifest, kept=alone, register=short_digest(self._register.to_bytes()))
        self._files: dict[str, list[tuple[PartRecord, int]]] = {}
        for part in self._parts:
            for index, file in enumerate(part.files):
                self._files.setdefault(file.path, []).append((part, index))
        self._written_bytes = 0
        self._refuse_other_run()

    def copy_files(self, *, rank: int = 0, world_size: int = 1, progress: Progress | None = None) -> None:
        """Copy and verify the files of tensors, or those that fall to ``rank`` of ``world_size``.

        ``progress`` counts bytes. Raises `CheckpointDamaged` for a file that is damaged in the run, and `StorageError`.
        """
        mine = dict(islice(sorted(self._files.items()), rank, None, world_size))
        there = {info.path: info.size_bytes for info in self._target.list(OBJECTS)}
        total, done = sum(map(_size_of, mine.values())), 0
        for path, size_bytes in _by_threads(lambda path: self._copy_file(path, there.get(path)), mine):
            done += _size_of(mine[path])
            self._written_bytes += size_bytes
            if progress is not None:
                progress(done, total, "bytes")

    def commit(self) -> RunCopied:
        """Write the records and the log; from now on the copy is a run. Returns what was copied. Call it once all files
        have been copied."""
        register = self._manifest.save.register_path
        parts = [self._manifest.save.part_path(rank) for rank in range(self._manifest.world_size)]
        indexes = [info.path for info in self._source.list(INDEX)]
        for _ in _by_threads(self._copy_record, [*parts, *indexes]):
            pass
        self._target.put(register, [self._register.to_bytes()])
        self._put_entry(self._tip.slot, entry_to_bytes(self._tip))
        there = {*list_slots(self._target)}
        before = [slot for slot in list_slots(self._source) if slot < self._tip.slot and slot not in there]
        for _ in _by_threads(self._copy_entry, before):
            pass
        self._remove_older(parts)
        return RunCopied(
            run=self._manifest.run,
            slot=self._manifest.slot,
            step=self._manifest.step,
            entries=len(before) + 1,
            files=len(self._files),
            size_bytes=sum(map(_size_of, self._files.values())),
            written_bytes=self._written_bytes,
        )

    # --- files

    def _copy_file(self, path: str, found_bytes: int | None) -> int:
        """Return how many bytes were written."""
        named = self._files[path]
        if found_bytes == _size_of(named) and not self._damage(named):
            return 0
        written = self._target.put(path, [read_object(self._source, path)])
        if damage := self._damage(named):
            self._target.delete(path)
            raise CheckpointDamaged(
                f"a file could not be copied to {describe(self._target)}, which was not committed: {damage}. "
                f"`lakeckpt verify` says whether it is damaged in {describe(self._source)}; --step copies an older "
                "checkpoint"
            )
        return written

    def _damage(self, named: Sequence[tuple[PartRecord, int]]) -> str:
        """Return what is wrong with a file at the target; empty if nothing is."""
        try:
            for part, index in named:
                verify_file(self._target, part, index)
        except CheckpointDamaged as error:
            return str(error)
        return ""

    # --- records

    def _copy_record(self, path: str) -> None:
        self._target.put(path, [self._source.read(path)])

    def _copy_entry(self, slot: int) -> None:
        self._put_entry(slot, self._source.read(slot_path(slot)))

    def _put_entry(self, slot: int, data: bytes) -> None:
        try:
            self._target.put_new(slot_path(slot), data)
        except ObjectExists:
            if not _is_same(self._target.read(slot_path(slot)), data):
                raise self._gone_on(slot) from None

    def _refuse_other_run(self) -> None:
        """Raise `ConfigError` unless the target is empty, or holds an earlier copy of this run."""
        slots = list_slots(self._target)
        if not slots:
            return
        last = slots[-1]
        if last > self._manifest.slot:
            raise self._gone_on(last)
        data = self._target.read(slot_path(last))
        if not _is_same(data, self._source.read(slot_path(last))):
            raise self._gone_on(last)

    def _gone_on(self, slot: int) -> ConfigError:
        return ConfigError(
            f"{describe(self._target)} cannot take the copy of step {self._manifest.step:,} (slot "
            f"{self._manifest.slot}) of {describe(self._source)}: slot {slot} there is of another run, of a job that "
            "went on from an earlier copy, or of a later copy. Nothing there was changed. Name an empty place"
        )

    def _remove_older(self, parts: Iterable[str]) -> None:
        """Remove the data of an earlier copy that this one does not need."""
        needed = {*self._files, *parts, self._manifest.save.register_path}
        doomed = [info.path for kind in (OBJECTS, PARTS) for info in self._target.list(kind) if info.path not in needed]
        delete_all(self._target, doomed)


def _chosen(source: Storage, step: int | None, slot: int | None) -> Manifest:
    """Return the checkpoint to copy. `CheckpointNotFound`, `ConfigError`."""
    history, place = read_history(source), describe(source)
    if history.run is None:
        raise CheckpointNotFound(f"there is no run at {place}: it has no log. Name the place of a run")
    if history.tip is None:
        raise CheckpointNotFound(f"the run at {place} has no checkpoint yet: copy it after a save")
    if slot is not None:
        return next(one for one in (*history.chain, *history.abandoned) if one.slot == slot)
    if step is None:
        _refuse_order(history, history.tip, place)
        return history.tip
    kept = _kept(history, history.tip)
    if step not in kept:
        steps = ", ".join(f"{one:,}" for one in sorted(kept))
        raise CheckpointNotFound(f"the run at {place} keeps no checkpoint of step {step:,}. It keeps {steps}: name one")
    return kept[step]


def _refuse_order(history: History, tip: Manifest, place: str) -> None:
    """Raise `ConfigError` if rows leave the deal behind ``tip``: a log that ends there would not say so."""
    exclusions = [one.exclusions for one in history.restores if one.slot < tip.slot][-1:]
    if history.restores[-1].exclusions not in ((), *exclusions):
        raise ConfigError(
            f"the run at {place} goes on from step {tip.step:,} without rows that an order or a crash has excluded, "
            "and no checkpoint was committed without them yet: copy it after the next save, or name --step"
        )


def _kept(history: History, tip: Manifest) -> dict[int, Manifest]:
    """Return the checkpoints of the history whose data no commit was allowed to remove, the newest of each step."""
    slots = must_stay(tip, [*history.chain, *history.abandoned])
    return {one.step: one for one in history.chain if one.slot in slots}


def _size_of(named: Sequence[tuple[PartRecord, int]]) -> int:
    part, index = named[0]
    return part.files[index].size_bytes


def _is_same(one: bytes, other: bytes) -> bool:
    """Return whether these are one entry; that of a copied checkpoint says otherwise what its place keeps."""
    if one == other:
        return True
    try:
        return entry_from_bytes(one).write_id == entry_from_bytes(other).write_id
    except WireError:
        return False


def _by_threads(work: Callable[[_One], _Other], every: Iterable[_One]) -> Iterator[tuple[_One, _Other]]:
    """Do ``work`` for each, and yield what it returns; what it raises ends all that has not begun."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lakeckpt-copy") as pool:
        jobs = {one: pool.submit(work, one) for one in every}
        try:
            for one, job in jobs.items():
                yield one, job.result()
        except BaseException:
            for job in jobs.values():
                job.cancel()
            raise
