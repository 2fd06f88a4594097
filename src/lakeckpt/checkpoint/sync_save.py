"""This module saves a cut while the training loop waits: snapshot, stage, publish.

All ranks call `Saver.save` for the same cut, and talk over their process group. Nothing changes while a save runs, so
that tensors in host memory are digested and written from where they lie, without a copy. Large tensors of a device come
through a few pinned slices: the device fills one while threads bring others into host memory and digest them. `stage`
starts and joins these threads.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from lakeckpt.checkpoint.capture.links import CopyBatch, Link, Ticket, open_link
from lakeckpt.checkpoint.capture.moves import flat_bytes
from lakeckpt.checkpoint.consumed.tracks import Journal, ReaderTrack
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests, leaves_of_all, short_digest
from lakeckpt.checkpoint.format.keep import checked_metric
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.persist.indexes import documents_of_all, write_documents
from lakeckpt.checkpoint.persist.publish import Publisher
from lakeckpt.checkpoint.report import Saved
from lakeckpt.checkpoint.state.snapshot import Snapshot, snapshot
from lakeckpt.checkpoint.state.staged import Staged, StagedCut, StagedTensor, StagedTree
from lakeckpt.checkpoint.state.tensors import host_bytes, on_host, spec_of
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.exchange import Exchange

__all__ = ["Saver", "stage"]

_SMALL_BYTES = 2**20
"""Tensors of a device up to this size are copied one by one, without a slice."""
_SLICE_BYTES = 32 * 2**20
"""Whole leaves."""
_SLICES = 4

_Content = tuple[memoryview, bytes]
"""The bytes of a tensor, and the digests of its leaves."""


class Saver:
    """Saves cuts for one attempt. ``tracks`` are the tracked readers, and ``objects`` all other objects."""

    def __init__(
        self,
        publisher: Publisher,
        storage: Storage,
        exchange: Exchange,
        *,
        objects: Mapping[str, Any],
        tracks: Mapping[str, ReaderTrack],
        journal: Journal,
    ) -> None:
        self._publisher = publisher
        self.attempt = publisher.attempt
        self._storage = storage
        self._exchange = exchange
        self._objects = objects
        self._tracks = tracks
        self._journal = journal
        self._results: list[Saved] = []

    def save(self, step: int, metric: Any, *, patient: bool = True) -> None:
        """Save the cut after optimizer step ``step``, which is as good as ``metric`` (`held_metric`); collective.
        ``patient`` is for saves beside training.

        Raises what `Publisher.publish` does, `UnsupportedValue` for a state that cannot be written, and `ConfigError`
        for a metric that turns out to be no number.
        """
        attempt, begin_s = self._publisher.attempt, time.perf_counter()
        save = SaveId(attempt=attempt.number, step=step, number=attempt.saves)
        attempt.saves += 1
        manifest = self._publisher.publish(save, self._taken(step, metric), self._exchange)
        self._journal.committed(manifest.step)
        info, remarks = CheckpointInfo.of(manifest), self._publisher.remarks
        took_s = time.perf_counter() - begin_s
        self._results.append(Saved(step=step, info=info, error=None, remarks=remarks, took_s=took_s))

    def results(self) -> list[Saved]:
        """Return the results of saves since the last call."""
        found, self._results = self._results, []
        return found

    def stop(self, error: BaseException, *, at_exit: bool) -> None:
        """This rank stops for ``error``: the other ranks must not wait for it in saves. ``at_exit`` is for saves beside
        training."""
        self._exchange.obstacles.stop(error)

    def is_saving(self, step: int) -> bool:
        """Return False: no save is under way between two calls."""
        return False

    def cut(self, step: int) -> None:
        """Do nothing: nothing is captured."""

    def wait(self) -> None:
        """Do nothing: no save is under way between two calls."""

    def fence(self) -> None:
        """Do nothing: the state may change at any time."""

    def close(self, *, well: bool) -> None:
        """Do nothing: no save is under way between two calls."""

    def _taken(self, step: int, metric: Any) -> StagedCut | Exception:
        try:
            pending = self._journal.pending(step)
            documents = documents_of_all([track.reader for track in self._tracks.values()])
            self._journal.handed_over(pending, step)  # on all ranks, also if one of them fails below
            number = checked_metric(metric)
            staged = stage(snapshot(self._objects))
            if self._exchange.rank == 0:
                write_documents(self._storage, documents)
        except Exception as error:
            return error
        return StagedCut(step=step, staged=staged, readers=pending, metric=number)


def stage(taken: Snapshot) -> Staged:
    """Bring the tensors to host memory and digest them. Contiguous tensors in host memory are taken where they lie."""
    links = {device: open_link(device) for device in {one.device for one in taken.tensors.values()}}
    large = {key for key, one in taken.tensors.items() if links[one.device] is not None and one.nbytes > _SMALL_BYTES}
    contents = _here({key: one for key, one in taken.tensors.items() if key not in large})
    for device, link in links.items():
        tensors = {key: one for key, one in taken.tensors.items() if key in large and one.device == device}
        if link is not None and tensors:
            contents |= _through_slices(tensors, link)
    staged = {
        key: StagedTensor(spec=spec_of(key, tensor), data=contents[key][0], leaves=contents[key][1])
        for key, tensor in taken.tensors.items()
    }
    trees = {
        item: StagedTree(item=item, document=document, digest=short_digest(document))
        for item, document in taken.documents.items()
    }
    return Staged(tensors=staged, trees=trees)


def _here(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Content]:
    views = [host_bytes(on_host(one)) for one in tensors.values()]
    return dict(zip(tensors, zip(views, leaves_of_all(views), strict=True), strict=True))


def _through_slices(tensors: Mapping[str, torch.Tensor], link: Link) -> dict[str, _Content]:
    """Bring tensors of a device to host memory, and digest them on the way."""
    arrays = {key: np.empty(one.nbytes, np.uint8) for key, one in tensors.items()}
    free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    memory = torch.empty(_SLICES * _SLICE_BYTES, dtype=torch.uint8)
    for number in range(_SLICES):
        free.put(memory[number * _SLICE_BYTES : (number + 1) * _SLICE_BYTES])

    def unload(slice_: torch.Tensor, to: memoryview, ticket: Ticket, _kept: CopyBatch) -> bytes:
        try:
            ticket.wait()
            to[:] = slice_.numpy()[: len(to)].data
            return leaf_digests(to, LEAF_BYTES)
        finally:
            free.put(slice_)

    unpin = link.pin(memory)
    try:
        with ThreadPoolExecutor(_SLICES, thread_name_prefix="lakeckpt-stage") as pool:
            jobs: dict[str, list[Future[bytes]]] = {key: [] for key in tensors}
            for key, tensor in tensors.items():
                flat = flat_bytes(tensor)
                if flat is None:
                    flat = flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
                    assert flat is not None
                link.order()
                for start in range(0, len(flat), _SLICE_BYTES):
                    slice_, source = free.get(), flat[start : start + _SLICE_BYTES]
                    batch = CopyBatch([(slice_[: len(source)], source)])
                    to = arrays[key][start : start + len(source)].data
                    jobs[key].append(pool.submit(unload, slice_, to, link.copy(batch), batch))
        return {key: (arrays[key].data, b"".join(job.result() for job in some)) for key, some in jobs.items()}
    finally:
        if unpin is not None:
            unpin()
