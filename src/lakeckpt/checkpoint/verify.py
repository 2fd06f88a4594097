"""Are all bytes of a run as they were written?  Every checksum of every checkpoint that still has its data.

The log (each entry against its checksum), the footer indexes, and for each checkpoint its parts and all their files,
read to the last byte; and whether the parts of tensors that ranks share make up wholes. A checkpoint that a commit
since had leave to remove (by the rule in it) counts as removed where a file of it is missing: retention may have been
killed half-way. What no commit had leave to remove, the newest one of the history among it, must be there. A run may go
on meanwhile: the checkpoints of when the check began are checked, and where something is damaged, the log is read once
more at the end, for what was removed since. What is found is listed, nothing is changed.

A few threads read; they are started and joined by `verify`. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from lakeckpt.checkpoint.audit import identities_of, read_run, tables_of
from lakeckpt.checkpoint.fetch import fetch_file, fetch_part, read_object
from lakeckpt.checkpoint.ledger import INDEX, History, index_path, must_stay, selection_path
from lakeckpt.checkpoint.log import LOG, Damage
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.parts import OBJECTS, PARTS, PartRecord
from lakeckpt.checkpoint.wholes import Wholes
from lakeckpt.errors import CheckpointDamaged, NewerFormat, WireError
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.storage import Storage

__all__ = ["CheckedCheckpoint", "Kept", "VerifyReport", "index_damage", "verify"]

_THREADS = 4
_SAVE = re.compile(r"(?:parts|objects)/(?P<save>[0-9]{10}/[0-9]{12}-[0-9]{6})", re.ASCII)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """One checkpoint, as it was found."""

    slot: int
    step: int
    attempt: int
    in_history: bool
    status: Literal["intact", "damaged", "removed"]
    """Removed: not all of it is there, and retention had leave to remove it."""
    files: int
    size_bytes: int
    """Of what is there."""
    damage: tuple[Damage, ...]
    bound: str = ""
    """Why it can only be restored on as many ranks, divided as it was; empty where nothing shared by ranks says so."""

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "slot": self.slot,
            "step": self.step,
            "attempt": self.attempt,
            "in_history": self.in_history,
            "status": self.status,
            "files": self.files,
            "size_bytes": self.size_bytes,
            "damage": [str(one) for one in self.damage],
            **({"bound": self.bound} if self.bound else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What is whole and what is not."""

    run: str
    checkpoints: tuple[CheckedCheckpoint, ...]
    """In the order of the log."""
    damage: tuple[Damage, ...]
    """Of the log and of the indexes."""
    indexes: int
    leftover_files: int
    """Files of no checkpoint that the log tells of: of saves that were never committed. The next save removes them."""
    leftover_bytes: int
    leftover_step: int | None
    """The newest step of which there are such files behind the newest checkpoint: of a save that is under way, or was
    cut off before its commit, or whose entry of the log is lost."""

    @property
    def log_damage(self) -> tuple[Damage, ...]:
        """Of the log: what its damaged entries named cannot be told."""
        return tuple(one for one in self.damage if one.path.startswith(LOG))

    @property
    def restorable(self) -> CheckedCheckpoint | None:
        """The newest checkpoint that is intact: what a restore from storage goes on from."""
        return next((one for one in reversed(self.checkpoints) if one.status == "intact"), None)

    @property
    def every_damage(self) -> tuple[Damage, ...]:
        """That of the run and of all checkpoints."""
        return (*self.damage, *(one for checkpoint in self.checkpoints for one in checkpoint.damage))

    @property
    def exit_status(self) -> int:
        """0 where all is as it was written, else 1."""
        return 1 if self.every_damage else 0

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "run": self.run,
            "intact": not self.every_damage,
            "checkpoints": [one.to_plain() for one in self.checkpoints],
            "indexes": self.indexes,
            "damage": [{"path": one.path, "reason": one.reason} for one in self.every_damage],
            "leftover_files": self.leftover_files,
            "leftover_bytes": self.leftover_bytes,
            "leftover_step": self.leftover_step,
        }


def verify(storage: Storage, *, progress: Progress | None = None) -> VerifyReport:
    """Read and verify all that is left of the run at ``storage``; ``progress(bytes done, bytes)`` as it goes on.

    Raises `CheckpointNotFound` where there is no run, `NewerFormat` for a document of a newer version, and
    `StorageError` where the store fails (which is no damage).
    """
    history, kept = read_run(storage), Kept(storage)
    manifests = sorted([*history.chain, *history.abandoned], key=lambda manifest: manifest.slot)
    meter = _Meter(progress, sum(kept.of(one)[1] for one in manifests))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lakeckpt-verify") as pool:
        run = _Run(storage, history, kept, pool)
        checked = [run.check(manifest, meter) for manifest in manifests]
        if any(one.damage for one in checked):
            # A run that goes on removes only what a commit before gave leave to: one later look at the log tells.
            later = _Run(storage, read_run(storage), Kept(storage), pool)
            checked = [later.judged(one) for one in checked]
    readers = [one for manifest in manifests for one in manifest.readers.values()]
    wrong = index_damage(storage, readers)
    leftover_files, leftover_bytes = kept.besides(manifests)
    return VerifyReport(
        run=history.run or "",
        checkpoints=tuple(checked),
        damage=(*history.damaged, *wrong),
        indexes=len({one.index for one in readers if one.index is not None}),
        leftover_files=leftover_files,
        leftover_bytes=leftover_bytes,
        leftover_step=kept.step_behind(manifests, history.tip),
    )


class Kept:
    """What lies in the folders of parts and objects of a run, by one listing."""

    def __init__(self, storage: Storage) -> None:
        self._folders: dict[str, tuple[int, int]] = {}
        self._paths: set[str] = set()
        for info in (info for kind in (PARTS, OBJECTS) for info in storage.list(kind)):
            folder = info.path.rpartition("/")[0]
            files, size_bytes = self._folders.get(folder, (0, 0))
            self._folders[folder] = files + 1, size_bytes + info.size_bytes
            self._paths.add(info.path)

    def holds(self, path: str) -> bool:
        """Whether there is such a file."""
        return path in self._paths

    def of(self, manifest: Manifest) -> tuple[int, int]:
        """How many files, and bytes, of a checkpoint are there."""
        return self._sum({_folder(PARTS, manifest), _folder(OBJECTS, manifest)})

    def besides(self, manifests: Iterable[Manifest]) -> tuple[int, int]:
        """How many files, and bytes, are of no checkpoint of ``manifests``."""
        return self._sum(self._others(manifests))

    def step_behind(self, manifests: Iterable[Manifest], tip: Manifest | None) -> int | None:
        """The newest step of those, where it is of a later save than that of ``tip``."""
        saves = (_SAVE.fullmatch(folder) for folder in self._others(manifests))
        newest = max((save["save"] for save in saves if save is not None), default="")
        if newest <= ("" if tip is None else tip.save.folder):
            return None
        return int(newest.rpartition("/")[2].partition("-")[0])

    def _others(self, manifests: Iterable[Manifest]) -> set[str]:
        return self._folders.keys() - {_folder(kind, manifest) for manifest in manifests for kind in (PARTS, OBJECTS)}

    def _sum(self, folders: Iterable[str]) -> tuple[int, int]:
        found = [self._folders.get(folder, (0, 0)) for folder in folders]
        return sum(files for files, _ in found), sum(size_bytes for _, size_bytes in found)


def _folder(kind: str, manifest: Manifest) -> str:
    return f"{kind}/{manifest.save.folder}"


def index_damage(storage: Storage, records: Sequence[ReaderRecord]) -> list[Damage]:
    """What is wrong with the footer indexes and row selections that the records of readers name. `NewerFormat`."""
    named: dict[str, tuple[str, Callable[[bytes], TableIndex | RowSelection]]] = {
        index_path(digest): (digest, TableIndex.loads) for digest in tables_of(records)
    }
    for identity in identities_of(records):
        if identity.selection and index_path(identity.table) in named:
            path = selection_path(identity.table, identity.selection)
            named[path] = (identity.selection, RowSelection.loads)
    return [damage for path, what in sorted(named.items()) for damage in _document_damage(storage, path, *what)]


def _document_damage(
    storage: Storage, path: str, digest: str, read: Callable[[bytes], TableIndex | RowSelection]
) -> Iterator[Damage]:
    try:
        found = read(read_object(storage, path)).digest
    except NewerFormat:
        raise
    except (CheckpointDamaged, WireError) as error:
        yield Damage(path=path, reason=str(error).removeprefix(f"{path}: "))
        return
    if found != digest:
        yield Damage(path=path, reason=f"this is the {INDEX} with the digest {found}")


class _Meter:
    """Adds up the bytes that were read."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        """Note that ``count`` more bytes were read; on the thread that called `verify`."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _tip_of(history: History) -> int | None:
    return None if history.tip is None else history.tip.slot


class _Run:
    """A run as it was read, whose checkpoints are checked."""

    def __init__(self, storage: Storage, history: History, kept: Kept, pool: ThreadPoolExecutor) -> None:
        self._storage = storage
        self._kept = kept
        self._pool = pool
        self._chain = {one.slot for one in history.chain}
        self._must_stay = must_stay(history)

    def check(self, manifest: Manifest, meter: _Meter) -> CheckedCheckpoint:
        """The check of one checkpoint."""
        files, size_bytes = self._kept.of(manifest)
        must_stay = manifest.slot in self._must_stay
        removed = not files and not must_stay
        parts: list[PartRecord] = []
        damage = [] if removed else list(self._damage(manifest, meter, parts))
        bound = ""
        if not removed and len(parts) == manifest.world_size:
            try:
                bound = Wholes(parts).check()
            except CheckpointDamaged as error:
                damage.append(Damage(path=manifest.parts[0].path, reason=str(error)))
        return self.judged(
            CheckedCheckpoint(
                slot=manifest.slot,
                step=manifest.step,
                attempt=manifest.attempt,
                in_history=manifest.slot in self._chain,
                status="removed" if removed else "damaged" if damage else "intact",
                files=files,
                size_bytes=size_bytes,
                damage=tuple(damage),
                bound=bound,
            )
        )

    def judged(self, one: CheckedCheckpoint) -> CheckedCheckpoint:
        """A checked checkpoint, where files that are not there may have been removed by the run."""
        if not one.damage or one.slot in self._must_stay:
            return one
        there = tuple(damage for damage in one.damage if self._kept.holds(damage.path))
        return (
            one
            if there == one.damage
            else replace(one, damage=there, status="damaged" if there else "removed", bound=one.bound if there else "")
        )

    def _damage(self, manifest: Manifest, meter: _Meter, parts: list[PartRecord]) -> Iterator[Damage]:
        """What is wrong with its files; ``parts`` takes the records that can be read."""
        jobs: list[tuple[PartRecord, int]] = []
        for ref in manifest.parts:
            try:
                part = fetch_part(self._storage, manifest, ref)
            except CheckpointDamaged as error:
                yield _as_damage(ref.path, error)
                continue
            meter.add(ref.size_bytes)
            parts.append(part)
            jobs += [(part, index) for index in range(len(part.files))]
        for (part, index), found in zip(jobs, self._pool.map(self._file_damage, jobs), strict=True):
            if not part.is_earlier(part.files[index]):
                meter.add(part.files[index].size_bytes)
            if found is not None:
                yield found

    def _file_damage(self, job: tuple[PartRecord, int]) -> Damage | None:
        part, index = job
        try:
            fetch_file(self._storage, part, index, into={})
        except CheckpointDamaged as error:
            return _as_damage(part.files[index].path, error)
        return None


def _as_damage(path: str, error: CheckpointDamaged) -> Damage:
    return Damage(path=path, reason=str(error).removeprefix(f"{path}: "))
