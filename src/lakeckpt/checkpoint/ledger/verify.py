"""This module reads every byte of a run again, and compares it with its checksum.

It reads the log, the footer indexes, and for each checkpoint its parts and all their files to the last byte. It also
checks that the parts of tensors that ranks share make up whole tensors. A checkpoint that a later commit was allowed to
remove counts as removed if one of its files is missing, because retention may have been killed half-way. All other
checkpoints must be there, the newest one of the history among them.

A run may go on meanwhile. The checkpoints that were there when the check began are checked. If one is damaged, the log
and the list of files are read once more at the end, to distinguish damage from removal. Bytes are never read twice, and
nothing is changed. A few threads read; `verify` starts and joins them. The module never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Literal

from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import OBJECTS, PARTS, PartRecord
from lakeckpt.checkpoint.format.verified_reads import fetch_part, fetch_register, verify_file
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.checkpoint.ledger.audit_report import plain_of
from lakeckpt.checkpoint.ledger.indexes import index_damage
from lakeckpt.checkpoint.persist.history import History, must_stay
from lakeckpt.checkpoint.persist.log import LOG, Damage, slot_path
from lakeckpt.checkpoint.state.wholes import Wholes
from lakeckpt.errors import CheckpointDamaged
from lakeckpt.lake.storage.base import Storage
from lakeckpt.progress import Progress

__all__ = ["CheckedCheckpoint", "Kept", "VerifyReport", "verify"]

_THREADS = 4
_SAVE = re.compile(r"(?:parts|objects)/(?P<save>[0-9]{10}/[0-9]{12}-[0-9]{6})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """The check of one checkpoint."""

    slot: int
    step: int
    attempt: int
    in_history: bool
    status: Literal["intact", "damaged", "removed"]
    """"removed": files of it are missing, and retention was allowed to remove them."""
    files: int
    size_bytes: int
    """The size of the files that exist."""
    damage: tuple[Damage, ...]
    bound: str = ""
    """The reason why it can be restored only on the same number of ranks, divided as before; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The check of a run."""

    run: str
    checkpoints: tuple[CheckedCheckpoint, ...]
    """The checkpoints in the order of the log."""
    damage: tuple[Damage, ...]
    """The damage of the log and of the indexes."""
    indexes: int
    leftover_files: int
    """The number of files that belong to no checkpoint of the log: files of saves that were never committed. The next
    save removes them."""
    leftover_bytes: int
    leftover_step: int | None
    """The newest step of such files after the newest checkpoint: the save is under way, was interrupted before its
    commit, or its entry in the log is lost."""

    @property
    def log_damage(self) -> tuple[Damage, ...]:
        """The damage of the log. The checkpoints of damaged entries are unknown."""
        return tuple(one for one in self.damage if one.path.startswith(LOG))

    @property
    def restorable(self) -> CheckedCheckpoint | None:
        """The newest checkpoint that is intact, from which a restore from storage goes on."""
        return next((one for one in reversed(self.checkpoints) if one.status == "intact"), None)

    @property
    def every_damage(self) -> tuple[Damage, ...]:
        """The damage of the run and of all checkpoints."""
        return (*self.damage, *(one for checkpoint in self.checkpoints for one in checkpoint.damage))

    @property
    def exit_status(self) -> int:
        """0 if every byte is as it was written, else 1."""
        return 1 if self.every_damage else 0

    def to_plain(self) -> dict[str, object]:
        """Return JSON-able values."""
        plain = {one.name: plain_of(getattr(self, one.name)) for one in fields(self)}
        return {**plain, "intact": not self.every_damage, "damage": plain_of(self.every_damage)}


def verify(storage: Storage, *, progress: Progress | None = None) -> VerifyReport:
    """Read and verify all checkpoints of the run at ``storage`` that still have their data.

    ``progress`` counts the entries of the log, and then bytes, on the calling thread. Raises `CheckpointNotFound` if
    there is no run, `NewerFormat` for a document of a newer version, and `StorageError` if the store fails, which is no
    damage.
    """
    history, kept = read_run(storage, progress=progress), Kept(storage)
    manifests = sorted([*history.chain, *history.abandoned], key=lambda manifest: manifest.slot)
    meter = _Meter(progress, sum(kept.of(one)[1] for one in manifests))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lakeckpt-verify") as pool:
        run = _Run(storage, history, kept, pool)
        checked = [run.check(manifest, meter) for manifest in manifests]
        if any(one.damage for one in checked):
            # A run that goes on removes only what a later commit allows: one later look at the log decides.
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
    """The files of a run's checkpoints, from one listing."""

    def __init__(self, storage: Storage) -> None:
        self._folders: dict[str, tuple[int, int]] = {}
        self._paths: dict[str, int] = {}
        for info in (info for kind in (PARTS, OBJECTS) for info in storage.list(kind)):
            folder = info.path.rpartition("/")[0]
            files, size_bytes = self._folders.get(folder, (0, 0))
            self._folders[folder] = files + 1, size_bytes + info.size_bytes
            self._paths[info.path] = info.size_bytes

    def holds(self, path: str) -> bool:
        """Return whether the file exists."""
        return path in self._paths

    def size_of(self, path: str) -> int:
        """Return the size of the file; 0 if it did not exist."""
        return self._paths.get(path, 0)

    def of(self, manifest: Manifest) -> tuple[int, int]:
        """Return how many files, and bytes, of a checkpoint exist."""
        return self._sum({_folder(PARTS, manifest), _folder(OBJECTS, manifest)})

    def besides(self, manifests: Iterable[Manifest]) -> tuple[int, int]:
        """Return how many files, and bytes, belong to no checkpoint of ``manifests``."""
        return self._sum(self._others(manifests))

    def step_behind(self, manifests: Iterable[Manifest], tip: Manifest | None) -> int | None:
        """Return the newest step of files that belong to no checkpoint, if their save is later than that of ``tip``."""
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


class _Meter:
    """Adds up the bytes that were read."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        """Record that ``count`` more bytes were read. Called on the thread that called `verify`."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total, "bytes")


class _Run:
    """A run as it was read. Checks its checkpoints."""

    def __init__(self, storage: Storage, history: History, kept: Kept, pool: ThreadPoolExecutor) -> None:
        self._storage = storage
        self._kept = kept
        self._pool = pool
        self._chain = {one.slot for one in history.chain}
        commits = [*history.chain, *history.abandoned]
        stay = set() if history.tip is None else must_stay(history.tip, commits)
        # A commit whose entry cannot be read may have been allowed to remove anything before it.
        self._must_stay = {
            slot
            for slot in stay
            if slot == max(self._chain) or all(one.path < slot_path(slot) for one in history.damaged)
        }

    def check(self, manifest: Manifest, meter: _Meter) -> CheckedCheckpoint:
        """Check one checkpoint."""
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
                damage.append(Damage(path=manifest.save.register_path, reason=str(error)))
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
        """Return ``one`` without the damage of missing files, if the run was allowed to remove them."""
        if not one.damage or one.slot in self._must_stay:
            return one
        there = tuple(damage for damage in one.damage if self._kept.holds(damage.path))
        return (
            one
            if there == one.damage
            else replace(one, damage=there, status="damaged" if there else "removed", bound=one.bound if there else "")
        )

    def _damage(self, manifest: Manifest, meter: _Meter, parts: list[PartRecord]) -> Iterator[Damage]:
        """Yield the damage of a checkpoint's files, and add the records that can be read to ``parts``."""
        jobs: list[tuple[PartRecord, int]] = []
        try:
            register = fetch_register(self._storage, manifest)
        except CheckpointDamaged as error:
            yield _as_damage(manifest.save.register_path, error)
            return
        meter.add(self._kept.size_of(manifest.save.register_path))
        for rank in range(manifest.world_size):
            path = manifest.save.part_path(rank)
            try:
                part = fetch_part(self._storage, manifest, register, rank)
            except CheckpointDamaged as error:
                yield _as_damage(path, error)
                continue
            meter.add(self._kept.size_of(path))
            parts.append(part)
            jobs += [(part, index) for index in range(len(part.files))]
        for (part, index), found in zip(jobs, self._pool.map(self._file_damage, jobs), strict=True):
            if part.files[index].path not in part.earlier:
                meter.add(part.files[index].size_bytes)
            if found is not None:
                yield found

    def _file_damage(self, job: tuple[PartRecord, int]) -> Damage | None:
        part, index = job
        try:
            verify_file(self._storage, part, index)
        except CheckpointDamaged as error:
            return _as_damage(part.files[index].path, error)
        return None


def _as_damage(path: str, error: CheckpointDamaged) -> Damage:
    return Damage(path=path, reason=str(error).removeprefix(f"{path}: "))
