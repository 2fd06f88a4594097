"""This module lets ``torch.distributed.checkpoint`` (DCP) read a checkpoint of a run.

`RunReader` describes the run's state as DCP does: names joined with dots, and tensors with the chunks in which ranks
saved them. DCP then plans the reads of each rank, so that resharding and torch's converters work. The reader reads the
planned bytes, and verifies them. A run holds no pickles. DCP's planners expect values that are not tensors as pickled
bytes, so the reader makes such bytes in memory, from plain values.

The module never writes to a run. Each call starts and joins its own threads.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, Literal

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.interop.run_state import Disputed, RunState, StoredTensor, leaves, mapped, with_checkpoint
from lakeckpt.checkpoint.state.loaded import Loaded
from lakeckpt.checkpoint.state.tensors import batches_of, empty_for
from lakeckpt.checkpoint.state.wholes import Whole
from lakeckpt.errors import CheckpointMismatch, LakeckptError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage

__all__ = ["RunReader"]

_BATCH_BYTES = 256 * 2**20
"""The reader holds about this much of the tensors at a time, beside the tensors that are loaded."""


class RunReader(StorageReader):
    """Read a checkpoint of the run at ``uri`` with DCP: ``dcp.load(state, storage_reader=RunReader("run"))``.

    Args:
        uri: the place of the run: a local folder, any URL that fsspec knows, or a `Storage`. The ``checkpoint_id`` of
            ``dcp.load``, if given, replaces it.
        step: the optimizer step whose checkpoint is read; ``"best"``: the checkpoint with the best ``metric``; None:
            the newest checkpoint. Give a step if the run goes on meanwhile: ranks that find different checkpoints are
            refused.
        rank: the rank of the run whose state is read. None: the state of all ranks together; names under which ranks
            had different values (the statistics of BatchNorm, for example) are refused when they are read.
        storage_options: for the store of the run.

    The reader chooses the checkpoint when it is made. Names are those of the manager's state, joined with dots:
    ``model.0.weight`` for the item ``"model"``. A reader's state lies under the reader's name. Random states cannot be
    read. Any number of ranks can read, in any sharding.

    Raises `CheckpointNotFound`, `CheckpointDamaged`, `NewerFormat`, `ConfigError`, `StorageError`. In ``dcp.load``,
    torch raises them inside of a ``CheckpointException``.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Storage,
        *,
        step: int | Literal["best"] | None = None,
        rank: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._step, self._rank, self._options = step, rank, storage_options
        self._open(uri)

    def _open(self, uri: str | os.PathLike[str] | Storage) -> None:
        storage = uri if isinstance(uri, Storage) else open_storage(uri, storage_options=self._options)
        self._state = with_checkpoint(storage, self._step, lambda chosen: RunState(storage, chosen, self._rank))
        self._flat, self._paths = _flattened(self._state.tree)

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return self._state.manifest.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read the run at ``checkpoint_id`` instead, if it is given."""
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of the checkpoint, as DCP describes them."""
        return Metadata(
            state_dict_metadata={name: self._described(leaf) for name, leaf in self._flat.items()},
            planner_data=self._paths,
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run was opened when the reader was made."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse names that cannot be read, and add the slot of this rank's checkpoint to the plan."""
        for item in plan.items:
            for leaf in leaves(self._flat[item.storage_index.fqn]):
                self._refuse(leaf)
        return replace(plan, storage_data=self._state.manifest.slot)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse plans in which ranks read different checkpoints."""
        slots = sorted({plan.storage_data for plan in plans})
        if len(slots) > 1:
            raise CheckpointMismatch(
                f"the run went on while its newest checkpoint was chosen: ranks found those in slots {slots}. Make the "
                "readers with step=, or load again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify the items of the plan. `CheckpointDamaged`, `CheckpointMismatch`, `StorageError`."""
        whole: list[tuple[ReadItem, Loaded, TensorSpec]] = []
        for item in plan.items:
            leaf = self._flat[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self._state.read(leaf)))
                continue
            loaded = self._state.loaded(leaf)
            part = _saved_part(loaded.whole(leaf.key), tuple(item.storage_index.offset or ()))
            if tuple(item.lengths) == part.shape and part.size_bytes <= _BATCH_BYTES:
                whole.append((item, loaded, part))
            else:
                self._read_region(item, planner, loaded, leaf.key)
        for _, of_rank in groupby(whole, key=lambda one: id(one[1])):
            for batch in batches_of(of_rank, lambda one: one[2].size_bytes, _BATCH_BYTES):
                _read_whole(batch, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether ``checkpoint_id`` names a place that can be opened."""
        try:
            open_storage(checkpoint_id)
        except LakeckptError:
            return False
        return True

    def _described(self, leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(leaf, StoredTensor):
            return BytesStorageMetadata()
        whole = self._state.loaded(leaf).whole(leaf.key)
        filled = [part for part in whole.parts if prod(part.sizes)] or whole.parts[:1]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, whole.spec.dtype)),
            size=torch.Size(whole.spec.shape),
            chunks=[ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in filled],
        )

    def _refuse(self, leaf: Any) -> None:
        if isinstance(leaf, Disputed):
            raise leaf.refusal()

    def _read_region(self, item: ReadItem, planner: LoadPlanner, loaded: Loaded, key: str) -> None:
        first = item.storage_index.offset or ()
        target = planner.resolve_tensor(item).detach()
        offsets = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        loaded.read_part(key, offsets, target)
        planner.commit_tensor(item, target)


def _flattened(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves of a state under the names that DCP gives them, and the path of each leaf."""
    stand_ins: dict[int, tuple[torch.Tensor, StoredTensor]] = {}  # DCP's rules ask whether a list holds tensors

    def stand_in(one: Any) -> Any:
        if not isinstance(one, StoredTensor):
            return one
        tensor = torch.empty(0, device="meta")
        stand_ins[id(tensor)] = tensor, one
        return tensor

    def stored(one: Any) -> Any:
        return stand_ins[id(one)][1] if id(one) in stand_ins else one

    flat, paths = flatten_state_dict(mapped(tree, stand_in))
    return {name: mapped(one, stored) for name, one in flat.items()}, paths


def _saved_part(whole: Whole, offsets: tuple[int, ...]) -> TensorSpec:
    part = next(part for part in whole.parts if part.offsets == offsets)
    return TensorSpec(key=part.key, dtype=whole.spec.dtype, shape=part.sizes)


def _read_whole(batch: list[tuple[ReadItem, Loaded, TensorSpec]], planner: LoadPlanner) -> None:
    """Read saved parts as they are, several at once, and copy them to DCP's tensors."""
    made = {part.key: empty_for(part) for _, _, part in batch}
    batch[0][1].source.fill({key: view for key, (_, view) in made.items()})
    for item, _, part in batch:
        target = planner.resolve_tensor(item).detach()
        target.copy_(made[part.key][0])
        planner.commit_tensor(item, target)


def _pickled(value: Any) -> io.BytesIO:
    """Return a plain value as pickled bytes: DCP's planners pass them to ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
