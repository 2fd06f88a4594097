"""Are all bytes of a run as they were written?  Every checksum of every checkpoint that still has its data.

The log (each entry against its checksum), the footer indexes, and for each checkpoint its parts and all their files,
read to the last byte. A checkpoint of which nothing is left was removed by retention, and so was one that it need not
keep and of which a file is missing (retention may have been killed half-way); the newest one of the history must be
there. What is found is listed, nothing is changed.

A few threads read; they are started and joined by `verify`. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.audit import identities_of, read_run, tables_of
from lakeckpt.checkpoint.fetch import fetch_file, fetch_part, read_object
from lakeckpt.checkpoint.keep import kept_of
from lakeckpt.checkpoint.ledger import INDEX, History, index_path, selection_path
from lakeckpt.checkpoint.log import Damage
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.parts import OBJECTS, PARTS, PartRecord
from lakeckpt.errors import CheckpointDamaged, WireError
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.storage import Storage

__all__ = ["CheckedCheckpoint", "Kept", "VerifyReport", "index_damage", "verify"]

_THREADS = 4
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """One checkpoint, as it was found."""

    slot: int
    step: int
    attempt: int
    in_history: bool
    status: Literal["intact", "damaged", "removed"]
    """Removed: nothing of its data is left, or what retention had no need to keep is not all there any more."""
    files: int
    size_bytes: int
    """Of what is there."""
    damage: tuple[Damage, ...]

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
    """Files that no checkpoint names: of saves that were never committed. The next save removes them."""
    leftover_bytes: int

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
        }


def verify(storage: Storage, *, progress: Progress | None = None) -> VerifyReport:
    """Read and verify all that is left of the run at ``storage``; ``progress(bytes done, bytes)`` as it goes on.

    Raises `CheckpointNotFound` where there is no run, `NewerFormat` for a log of a newer version, and `StorageError`
    where the store fails (which is no damage).
    """
    history = read_run(storage)
    kept = Kept(storage)
    manifests = sorted([*history.chain, *history.abandoned], key=lambda manifest: manifest.slot)
    meter = _Meter(progress, sum(kept.of(one)[1] for one in manifests))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lakeckpt-verify") as pool:
        checked = tuple(_Checked(storage, history, manifest, kept, meter).check(pool) for manifest in manifests)
    indexes = {one.index for manifest in manifests for one in manifest.readers.values() if one.index is not None}
    wrong = index_damage(storage, [one for manifest in manifests for one in manifest.readers.values()])
    leftover_files, leftover_bytes = kept.besides(manifests)
    return VerifyReport(
        run=history.run or "",
        checkpoints=checked,
        damage=(*history.damaged, *wrong),
        indexes=len(indexes),
        leftover_files=leftover_files,
        leftover_bytes=leftover_bytes,
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
        named = {_folder(kind, manifest) for manifest in manifests for kind in (PARTS, OBJECTS)}
        return self._sum(self._folders.keys() - named)

    def _sum(self, folders: Iterable[str]) -> tuple[int, int]:
        found = [self._folders.get(folder, (0, 0)) for folder in folders]
        return sum(files for files, _ in found), sum(size_bytes for _, size_bytes in found)


def _folder(kind: str, manifest: Manifest) -> str:
    return f"{kind}/{manifest.save.folder}"


def index_damage(storage: Storage, records: Sequence[ReaderRecord]) -> list[Damage]:
    """What is wrong with the footer indexes and row selections that the records of readers name."""
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


class _Checked:
    """The check of one checkpoint."""

    def __init__(self, storage: Storage, history: History, manifest: Manifest, kept: Kept, meter: _Meter) -> None:
        self._storage = storage
        self._history = history
        self._manifest = manifest
        self._kept = kept
        self._meter = meter

    def check(self, pool: ThreadPoolExecutor) -> CheckedCheckpoint:
        manifest, tip = self._manifest, self._history.tip
        files, size_bytes = self._kept.of(manifest)
        is_tip = tip is not None and tip.slot == manifest.slot
        removed = not files and not is_tip
        damage = [] if removed else list(self._damage(pool))
        if damage and self._may_go():
            there = [one for one in damage if self._kept.holds(one.path)]
            removed, damage = not there, there
        return CheckedCheckpoint(
            slot=manifest.slot,
            step=manifest.step,
            attempt=manifest.attempt,
            in_history=any(one.slot == manifest.slot for one in self._history.chain),
            status="removed" if removed else "damaged" if damage else "intact",
            files=files,
            size_bytes=size_bytes,
            damage=tuple(damage),
        )

    def _may_go(self) -> bool:
        """Whether retention had leave to remove it, and may have been killed half-way."""
        tip = self._history.tip
        if tip is None or tip.keep is None:
            return False
        chain = self._history.chain
        if self._manifest.slot in {one.slot for one in chain[-tip.keep.last :]}:
            return False  # whatever else the rule keeps of what is there
        return self._manifest.slot not in kept_of([one for one in chain if self._kept.of(one)[0]], tip.keep)

    def _damage(self, pool: ThreadPoolExecutor) -> Iterator[Damage]:
        jobs: list[tuple[PartRecord, int]] = []
        for ref in self._manifest.parts:
            try:
                part = fetch_part(self._storage, self._manifest, ref)
            except CheckpointDamaged as error:
                yield _as_damage(ref.path, error)
                continue
            self._meter.add(ref.size_bytes)
            jobs += [(part, index) for index in range(len(part.files))]
        for (part, index), found in zip(jobs, pool.map(self._file_damage, jobs), strict=True):
            if not part.is_earlier(part.files[index]):
                self._meter.add(part.files[index].size_bytes)
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
