"""This module writes the share of a rank to storage: files of tensors, and then the part that names them.

Large tensors are cut into slabs. Slabs that an earlier save has written are referred to; the others are packed into
files of about 256 MiB that are named by their content, several written at once. Meanwhile another thread checks that
the memory is intact. The part is put last, so that a part that can be read names only objects that are durable and hold
what was captured. ``agreement`` decides which rank writes what.

The module imports without torch: it takes bytes. `persist` starts and joins its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.checkpoint.format.parts import (
    FileRecord,
    Outline,
    PartRecord,
    SaveId,
    SiteWaits,
    SlabRecord,
    TensorRecord,
    TreeRecord,
)
from lakeckpt.checkpoint.format.sharing import Tiling
from lakeckpt.checkpoint.format.slabs import SLAB_BYTES, digests_of_slabs, slab_specs
from lakeckpt.checkpoint.format.tensor_file import FileLayout, layout
from lakeckpt.checkpoint.persist.unchanged import Earlier, Wanted
from lakeckpt.checkpoint.state.staged import StagedTensor
from lakeckpt.errors import SaveFailed
from lakeckpt.lake.storage.base import Storage

__all__ = ["OwnedTensor", "persist"]

FILE_BYTES = 256 * 2**20
_Place = tuple[int, int]
"""The index of a slab's file in the part, and the offset of the slab's first byte in the file."""
_WRITE_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensor:
    """A tensor that this rank writes; ``ranks`` are those whose state it is."""

    staged: StagedTensor
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slab:
    """A part of a tensor that is written, or referred to, by itself."""

    spec: TensorSpec
    data: memoryview
    digest: bytes

    @property
    def wanted(self) -> Wanted:
        return self.spec, self.digest


def persist(
    storage: Storage,
    *,
    run: str,
    save: SaveId,
    rank: int,
    world_size: int,
    cut: bytes,
    tensors: Sequence[OwnedTensor],
    trees: Sequence[TreeRecord],
    outline: Outline | None = None,
    tilings: tuple[Tiling, ...] = (),
    reports: Mapping[str, bytes] | None = None,
    excluded: bytes = b"",
    waits: tuple[SiteWaits, ...] = (),
    earlier: Earlier | None = None,
    intact: Callable[[], None] = lambda: None,
) -> PartRecord:
    """Write the share of ``rank`` and publish its part. Raises `StorageError` or `SaveFailed`; then there is no part.

    ``earlier``: the files of the rank's last committed part; unchanged slabs in it are not written again.
    ``intact``: see `lakeckpt.checkpoint.state.staged.StagedCut`; what it raises goes through.
    """
    earlier = Earlier() if earlier is None else earlier
    slabs = [_slabs_of(one.staged) for one in tensors]
    every = [slab for some in slabs for slab in some]
    kept = earlier.found(slab.wanted for slab in every)
    new = [slab for slab in every if slab.wanted not in kept]
    # What did not change lies apart from what did, so that its files are still needed next time.
    packs = [
        *_packed([slab for slab in new if slab.wanted in earlier.places]),
        *_packed([slab for slab in new if slab.wanted not in earlier.places]),
    ]
    files, places = _write_all(storage, save, rank, packs, intact)
    referred = sorted({slab.file for slab in kept.values()})
    numbers = {file: len(files) + index for index, file in enumerate(referred)}
    places |= {wanted: (numbers[slab.file], slab.at) for wanted, slab in kept.items()}
    part = PartRecord(
        run=run,
        save=save,
        rank=rank,
        world_size=world_size,
        cut=cut,
        files=(*files, *(earlier.files[file] for file in referred)),
        tensors=tuple(_record(one, some, places) for one, some in zip(tensors, slabs, strict=True)),
        trees=tuple(trees),
        outline=outline,
        tilings=tilings,
        reports=reports or {},
        excluded=excluded,
        waits=waits,
    )
    storage.put(save.part_path(rank), [part.to_bytes()])
    return part


def _slabs_of(tensor: StagedTensor) -> list[_Slab]:
    specs = slab_specs(tensor.spec, SLAB_BYTES)
    if len(specs) == 1:
        return [_Slab(spec=tensor.spec, data=tensor.data, digest=tensor.digest)]
    digests = digests_of_slabs(tensor.leaves, SLAB_BYTES)
    return [
        _Slab(spec=spec, data=tensor.data[at : at + SLAB_BYTES], digest=digest)
        for spec, digest, at in zip(specs, digests, range(0, len(tensor.data), SLAB_BYTES), strict=True)
    ]


def _record(tensor: OwnedTensor, slabs: Sequence[_Slab], places: Mapping[Wanted, _Place]) -> TensorRecord:
    records, start = [], 0
    for slab in slabs:
        file, at = places[slab.wanted]
        records.append(SlabRecord(spec=slab.spec, start=start, digest=slab.digest, file=file, at=at))
        start += slab.spec.size_bytes
    staged = tensor.staged
    return TensorRecord(spec=staged.spec, digest=staged.digest, slabs=tuple(records), ranks=tensor.ranks)


def _packed(slabs: Sequence[_Slab]) -> Iterator[list[_Slab]]:
    pack: list[_Slab] = []
    size_bytes = 0
    for one in slabs:
        if pack and size_bytes + one.spec.size_bytes > FILE_BYTES:
            yield pack
            pack, size_bytes = [], 0
        pack.append(one)
        size_bytes += one.spec.size_bytes
    if pack:
        yield pack


def _write_all(
    storage: Storage, save: SaveId, rank: int, packs: Sequence[list[_Slab]], intact: Callable[[], None]
) -> tuple[list[FileRecord], dict[Wanted, _Place]]:
    """Write a file for each of ``packs``, several at once. Return the files, and the place of each slab in them."""
    plans = [layout(slab.spec for slab in pack) for pack in packs]
    with ThreadPoolExecutor(1 + _WRITE_THREADS, thread_name_prefix="lakeckpt-persist") as pool:
        asked = pool.submit(intact)
        jobs = [
            pool.submit(_write, storage, save, rank, index, pack, plan)
            for index, (pack, plan) in enumerate(zip(packs, plans, strict=True))
        ]
        files = [job.result() for job in jobs]
        asked.result()
    places = {
        slab.wanted: (index, plan.starts[slab.spec.key])
        for index, (pack, plan) in enumerate(zip(packs, plans, strict=True))
        for slab in pack
    }
    return files, places


def _write(storage: Storage, save: SaveId, rank: int, index: int, pack: list[_Slab], plan: FileLayout) -> FileRecord:
    by_key = {one.spec.key: one for one in pack}
    ordered = [by_key[key] for key in plan.starts]
    head_digest = short_digest(plan.head)
    path = save.object_path(rank, index, short_digest(head_digest, *(one.digest for one in ordered)))
    written = storage.put(path, [plan.head, *(one.data for one in ordered)])
    if written != plan.size_bytes:
        raise SaveFailed(f"{path}: the store says it took {written} bytes of {plan.size_bytes}")
    return FileRecord(path=path, size_bytes=plan.size_bytes, head_bytes=len(plan.head), head_digest=head_digest)
