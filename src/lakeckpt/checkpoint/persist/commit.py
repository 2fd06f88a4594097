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
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lakeckpt.checkpoint.format.begins import said_of
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.checkpoint.format.manifest import Manifest, PartRef
from lakeckpt.checkpoint.format.parts import PARTS, PartRecord, SaveId
from lakeckpt.checkpoint.format.sharing import say_ranks
from lakeckpt.checkpoint.format.units import UnitId, tensor_unit, tree_unit
from lakeckpt.checkpoint.persist.agreement import SUMS, sum_of
from lakeckpt.checkpoint.persist.failures import published_failure
from lakeckpt.checkpoint.persist.log import SlotTaken, read_entry
from lakeckpt.checkpoint.state.wholes import Wholes
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import (
    AttemptSuperseded,
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

    def warn(self) -> None:
        """Warn of each problem."""
        if self.lost:
            warnings.warn(f"damage in the run: {self.lost}", DamageWarning, stacklevel=5)
        if self.unpruned:
            text = "checkpoints that are not to be kept could not be removed, and take up room until a save can: "
            warnings.warn(text + self.unpruned, RetentionWarning, stacklevel=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The units that the ranks agreed to write."""

    alone: Sequence[Set[UnitId]]
    """The units of each rank that are in no bundle. An empty content stands for any content."""
    bundles: Mapping[Ranks, int]
    """Ranks → `lakeckpt.checkpoint.persist.agreement.sum_of` the units of bundles that they write between them."""


def collect_parts(
    storage: Storage,
    save: SaveId,
    *,
    world_size: int,
    cut: bytes,
    expected: Expected,
    waiter: Waiter,
    timeout_s: float,
    still: Callable[[], None] = lambda: None,
) -> tuple[list[PartRef], list[PartRecord]]:
    """Wait for the parts of all ranks; read and check each part as it comes.

    ``still`` is called whenever parts are missing, and raises if waiting has become pointless.
    Raises `SaveFailed` naming the ranks whose part did not come in time, a rank that failed or wrote other units than
    agreed, or a tensor whose parts do not make up the whole tensor.
    """
    folder = f"{PARTS}/{save.folder}"
    found: dict[int, tuple[PartRef, PartRecord]] = {}
    sums: defaultdict[Ranks, int] = defaultdict(int)

    def look() -> bool | None:
        new: dict[str, int] = {}
        for info in storage.list(folder):
            name = info.path.removeprefix(folder + "/")
            rank = int(name[:5]) if name[:5].isdigit() else -1
            if name == f"{rank:05d}.failed" and (failure := published_failure(storage, save, rank)) is not None:
                raise failure
            if name == f"{rank:05d}.lkc" and rank not in found:
                new[info.path] = rank
        read = list(pool.map(storage.read, new))
        for (path, rank), data in zip(new.items(), read, strict=True):
            found[rank] = _checked_part(path, data, rank, save, cut, expected.alone[rank], sums)
        if len(found) == world_size:
            return True
        still()
        return None

    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-commit") as pool:
        is_whole = poll(look, waiter=waiter, timeout_s=timeout_s)
    if is_whole is None:
        missing = Intervals.of([(rank, rank + 1) for rank in found]).complement(world_size)
        raise SaveFailed(
            f"the checkpoint of step {save.step} was dropped: {name_ranks(missing)} of {world_size} did not publish "
            f"a part within {timeout_s:g} s; see their logs. Nothing was committed"
        )
    for ranks in {*sums, *expected.bundles}:
        if sums.get(ranks, 0) % SUMS != expected.bundles.get(ranks, 0):
            raise SaveFailed(f"step {save.step}: {say_ranks(ranks)} did not write what they agreed on at the cut")
    parts = [found[rank] for rank in sorted(found)]
    try:
        Wholes([part for _, part in parts]).check()
    except CheckpointDamaged as error:
        raise SaveFailed(
            f"step {save.step} could not be restored, and was not committed: {error}. Let each rank hold of a DTensor "
            "what its mesh and placements say, let all ranks of its mesh save into one run, and let each stage of a "
            "pipeline save into a run of its own (group=)"
        ) from error
    return [ref for ref, _ in parts], [part for _, part in parts]


def _checked_part(
    path: str,
    data: bytes,
    rank: int,
    save: SaveId,
    cut: bytes,
    alone: Set[UnitId],
    sums: defaultdict[Ranks, int],
) -> tuple[PartRef, PartRecord]:
    """Return a part that holds what its rank agreed to write. Its units that are not in ``alone`` are added to the
    ``sums``."""
    try:
        part = PartRecord.from_bytes(data)
    except WireError as error:
        raise SaveFailed(f"{path}: the part of rank {rank} does not read back as it was written: {error}") from error
    loose = {name for name, content in alone if not content}
    wrote = {tensor_unit(one.spec, one.digest): one.ranks for one in part.tensors}
    for tree in part.trees:
        name, content = tree_unit(tree.item, tree.digest)
        wrote[name, b"" if name in loose else content] = tree.ranks
    if (part.save, part.rank, part.cut) != (save, rank, cut) or not alone <= wrote.keys():
        raise SaveFailed(f"{path}: the part of rank {rank} does not hold what the ranks agreed on at the cut")
    for what in wrote.keys() - alone:
        sums[wrote[what]] += sum_of([what])
    return PartRef(rank=rank, path=path, size_bytes=len(data), digest=short_digest(data)), part


def verify_objects(storage: Storage, parts: Sequence[PartRecord]) -> None:
    """Check that every object that the parts name has its size. Raises `SaveFailed` naming an object that is not."""
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


def await_commit(storage: Storage, save: SaveId, slot: int, *, waiter: Waiter, timeout_s: float) -> Manifest:
    """Wait until rank 0 has committed ``save`` into ``slot``.

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
                failure = published_failure(storage, save, 0)
                if failure is not None:
                    raise failure
                return None
        except StorageError as error:  # of one look: rank 0 may have committed
            failing.append(error)
            return None
        if isinstance(entry, Manifest) and entry.save == save:
            return entry
        raise AttemptSuperseded(superseded(save.attempt, SlotTaken(slot, entry)))

    failing: list[StorageError] = []
    manifest = poll(look, waiter=waiter, timeout_s=timeout_s)
    if manifest is None and failing:
        raise SaveFailed(
            f"whether rank 0 committed the checkpoint of step {save.step} is not known: {failing[0]}"
        ) from failing[0]
    if manifest is None:
        raise SaveFailed(
            f"rank 0 did not commit the checkpoint of step {save.step} within {timeout_s:g} s: see its log"
        )
    return manifest
