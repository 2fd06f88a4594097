"""This module decides when a set of parts becomes a checkpoint: rank 0 verifies all parts and puts the manifest.

Rank 0 waits for the part of every rank. It reads each part, compares it with what the ranks agreed on at the cut, and
checks that every object that the part names is there with its size. The manifest is then put into the log. The other
ranks watch its slot. There is no collective; a rank that cannot deliver leaves a note, and a rank that is silent is
named when the time is over.

The module imports without torch. `collect_parts` starts and joins the threads that read parts.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.checkpoint.format.manifest import Manifest, said_of
from lakeckpt.checkpoint.format.parts import PARTS, PartHead, PartRecord, SaveId
from lakeckpt.checkpoint.format.sharing import are_tiled, say_ranks
from lakeckpt.checkpoint.format.units import SUMS
from lakeckpt.checkpoint.persist.log import SlotTaken, read_entry
from lakeckpt.checkpoint.state.wholes import Wholes
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import (
    AttemptSuperseded,
    BackupWarning,
    CheckpointDamaged,
    DamageWarning,
    ObjectMissing,
    RetentionWarning,
    SaveFailed,
    StorageError,
    WireError,
)
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.tracking.tally import name_ranks
from lakeckpt.tracking.waiting import Waiter, poll

__all__ = [
    "Collected",
    "Expected",
    "Remarks",
    "await_commit",
    "collect_parts",
    "superseded",
    "verify_objects",
]

_READ_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """The problems that were found at a successful commit."""

    lost: str = ""
    """The objects of the run that are missing; empty if none is."""
    unpruned: str = ""
    """Why checkpoints that are not to be kept could not be removed after the commit; empty if they were removed."""
    unmade: str = ""
    """Why a backup was not made that was due after the commit before; empty if it was."""

    def warn(self) -> None:
        """Warn of each problem."""
        if self.lost:
            warnings.warn(f"damage in the run: {self.lost}", DamageWarning, stacklevel=5)
        if self.unpruned:
            text = "checkpoints that are not to be kept could not be removed, and take up room until a save can: "
            warnings.warn(text + self.unpruned, RetentionWarning, stacklevel=5)
        if self.unmade:
            warnings.warn(self.unmade, BackupWarning, stacklevel=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The units that the ranks agreed to write."""

    alone: Sequence[int]
    """`lakeckpt.checkpoint.format.units.sum_of` the units of each rank that are in no bundle."""
    bundles: Mapping[Ranks, int]
    """Ranks → the sum of the units of bundles that they write between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The parts of all ranks."""

    heads: tuple[PartHead, ...]
    digests: bytes
    """`short_digest` of each part, one behind the other."""


def collect_parts(
    storage: Storage,
    save: SaveId,
    *,
    world_size: int,
    cut: bytes,
    expected: Expected,
    waiter: Waiter,
    timeout_s: float,
    obstacles: Callable[[], None] = lambda: None,
) -> Collected:
    """Wait for the parts of all ranks; read and check each part as it comes.

    ``obstacles`` is called whenever parts are missing, and raises if waiting is in vain.
    Raises `SaveFailed` naming the ranks whose part did not come in time, a rank that failed or wrote other units than
    agreed, or a tensor whose parts do not make up the whole tensor.
    """
    folder = f"{PARTS}/{save.folder}"
    found: dict[int, tuple[PartHead, bytes]] = {}

    def look() -> bool | None:
        new: dict[str, int] = {}
        for info in storage.list(folder):
            name = info.path.removeprefix(folder + "/")
            rank = int(name[:5]) if name[:5].isdigit() else -1
            if name == f"{rank:05d}.lkc" and rank not in found:
                new[info.path] = rank
        read = list(pool.map(storage.read, new))
        for (path, rank), data in zip(new.items(), read, strict=True):
            found[rank] = _checked_part(path, data, rank, save, cut, expected.alone[rank]), short_digest(data)
        return len(found) == world_size or None

    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-commit") as pool:
        is_whole = poll(look, waiter=waiter, timeout_s=timeout_s, obstacles=obstacles)
    if is_whole is None:
        missing = Intervals.of([(rank, rank + 1) for rank in found]).complement(world_size)
        raise SaveFailed(
            f"the checkpoint of step {save.step} was dropped: {name_ranks(missing)} of {world_size} did not publish "
            f"a part within {timeout_s:g} s; see their logs. Nothing was committed"
        )
    heads = tuple(found[rank][0] for rank in range(world_size))
    _check_bundles(save, heads, expected.bundles)
    _check_tiles(storage, save, heads)
    return Collected(heads=heads, digests=b"".join(found[rank][1] for rank in range(world_size)))


def _checked_part(path: str, data: bytes, rank: int, save: SaveId, cut: bytes, alone: int) -> PartHead:
    """Return the head of a part that holds what its rank agreed to write."""
    try:
        head = PartHead.from_bytes(data)
    except WireError as error:
        raise SaveFailed(f"{path}: the part of rank {rank} does not read back as it was written: {error}") from error
    if (head.save, head.rank, head.cut, head.alone) != (save, rank, cut, alone):
        raise SaveFailed(f"{path}: the part of rank {rank} does not hold what the ranks agreed on at the cut")
    return head


def _check_bundles(save: SaveId, heads: Sequence[PartHead], expected: Mapping[Ranks, int]) -> None:
    """Raise `SaveFailed` if ranks did not write the parts of tensors that they agreed on."""
    sums: defaultdict[Ranks, int] = defaultdict(int)
    for ranks, total in (pair for head in heads for pair in head.divided):
        sums[ranks] += total
    for ranks in {*sums, *expected}:
        if sums.get(ranks, 0) % SUMS != expected.get(ranks, 0):
            raise SaveFailed(f"step {save.step}: {say_ranks(ranks)} did not write what they agreed on at the cut")


def _check_tiles(storage: Storage, save: SaveId, heads: Sequence[PartHead]) -> None:
    """Raise `SaveFailed` if parts of a tensor are missing or overlap. Only if something is wrong, the records of all
    tensors are read, to name the tensor."""
    if are_tiled(tiling for head in heads for tiling in head.tilings):
        return
    try:
        Wholes([PartRecord.from_bytes(storage.read(save.part_path(head.rank))) for head in heads]).check()
        return
    except CheckpointDamaged as error:
        why = str(error)
    raise SaveFailed(
        f"step {save.step} could not be restored, and was not committed: {why}. Let each rank hold of a DTensor what "
        "its mesh and placements say, let all ranks of its mesh save into one run, and let each stage of a pipeline "
        "save into a run of its own (group=)"
    )


def verify_objects(storage: Storage, parts: Iterable[PartHead | PartRecord]) -> None:
    """Check that every object that the parts name has its size. Raises `SaveFailed` naming an object that is not."""
    parts = list(parts)
    folders = {file.path.rpartition("/")[0] for part in parts for file in part.files}
    listed = {info.path: info.size_bytes for folder in sorted(folders) for info in storage.list(folder)}
    for part in parts:
        for file in part.files:
            if listed.get(file.path) != file.size_bytes:
                raise SaveFailed(
                    f"{file.path}: rank {part.rank} wrote {file.size_bytes} bytes and {describe(storage)} lists "
                    f"{listed.get(file.path, 'nothing')}. Nothing was committed"
                )


def superseded(attempt: int, taken: SlotTaken) -> str:
    """Return the message for an attempt whose slot was taken by another."""
    if taken.found is None:
        by = "an entry that cannot be read"
    else:
        by = f"attempt {taken.found.attempt}" if isinstance(taken.found, Manifest) else said_of(taken.found)
    return (
        f"attempt {attempt} is superseded: slot {taken.slot} of the log was taken by {by}. "
        "Another job has restored from this run and owns it now, or the run was rolled back: stop this one"
    )


def await_commit(
    storage: Storage,
    save: SaveId,
    slot: int,
    *,
    waiter: Waiter,
    timeout_s: float,
    obstacles: Callable[[], None] = lambda: None,
) -> Manifest:
    """Wait until rank 0 has committed ``save`` into ``slot``. ``obstacles``: see `collect_parts`.

    Raises `AttemptSuperseded`, or `SaveFailed` if rank 0 failed or was silent.
    """

    def look() -> Manifest | None:
        failing.clear()
        try:
            try:
                entry = read_entry(storage, slot)
            except ObjectMissing:
                entry = None
            except WireError as error:
                raise SaveFailed(f"slot {slot} cannot be read back: {error}") from error
            if entry is None:
                return None
        except StorageError as error:  # of one look: rank 0 may have committed
            failing.append(error)
            return None
        if isinstance(entry, Manifest) and entry.save == save:
            return entry
        raise AttemptSuperseded(superseded(save.attempt, SlotTaken(slot, entry)))

    failing: list[StorageError] = []
    manifest = poll(look, waiter=waiter, timeout_s=timeout_s, obstacles=obstacles)
    if manifest is None and failing:
        raise SaveFailed(
            f"whether rank 0 committed the checkpoint of step {save.step} is not known: {failing[0]}"
        ) from failing[0]
    if manifest is None:
        raise SaveFailed(
            f"rank 0 did not commit the checkpoint of step {save.step} within {timeout_s:g} s: see its log"
        )
    return manifest
