"""This module notes readers whose rows several ranks read, and warns if these ranks train replicas of one model.

The ranks of a model-parallel group read the same rows: their datasets have ``dp_group=``, and each row trains the model
once. Data-parallel ranks that read the same rows, such as by ``rank=0, world_size=1`` on each of them, train each row
several times. Each rank states what it trains, as a fact of the round that ends a restore, and the values of all ranks
are compared here. The module sends nothing itself, and starts no threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lakeckpt.checkpoint.consumed.tracks import ReaderTrack
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.data.position.deliveries import ConsumptionWarning
from lakeckpt.tracking.tally import Tally

__all__ = ["note_sharing", "sharing_facts"]

_FACT = "replicas with the rows of "
_REPLICAS, _PARTS = "replicas", "parts of a model"
_WARNING = (
    "{} ranks read the same rows of reader {!r}, by rank= and world_size= of its dataset, and train replicas of one "
    "model: each row is trained {} times, and lakeckpt audit says NOT PROVED. Leave rank= and world_size= out, so that "
    "each rank reads rows of its own; or, if these ranks are one model-parallel group, give dp_group= instead"
)


def sharing_facts(objects: Mapping[str, Any], tracks: Mapping[str, ReaderTrack], ranks: int) -> dict[str, str]:
    """Note in ``tracks`` how many of ``ranks`` ranks read the same rows. Return this rank's facts for `note_sharing`:
    for each reader whose rank was given by hand, what this rank trains."""
    facts = {}
    for name, track in tracks.items():
        topology = getattr(track.reader, "topology", None)
        if topology is None or not 0 < topology[1] < ranks:
            continue
        track.shared = ranks // topology[1]
        if getattr(track.reader, "has_explicit_rank", False):
            facts[_FACT + name] = _trained(objects, topology[1])
    return facts


def note_sharing(tally: Tally, tracks: Mapping[str, ReaderTrack]) -> None:
    """Note in ``tracks``, and warn, if ranks that read the same rows train replicas; ``tally``: the facts of all."""
    for name, track in tracks.items():
        values = tally.facts.get(_FACT + name, {})
        track.is_repeated = _REPLICAS in values or (len(values) == 1 and _PARTS not in values)
        if track.is_repeated:
            text = _WARNING.format(track.shared, name, track.shared)
            warnings.warn(text, ConsumptionWarning, stacklevel=4)


def _trained(objects: Mapping[str, Any], readers: int) -> str:
    """Return what this rank trains, for comparison with ranks that read the same rows: replicas, parts of one model,
    or the digest of the names and shapes of its parameters."""
    tops = [(name, one) for name, one in sorted(objects.items()) if isinstance(one, torch.nn.Module)]
    modules = [one for _, top in tops for one in top.modules()]
    groups = [one.process_group for one in modules if isinstance(one, torch.nn.parallel.DistributedDataParallel)]
    if groups:
        return _REPLICAS if max(map(dist.get_world_size, groups)) > readers else _PARTS
    parameters = [(name, *one) for name, top in tops for one in top.named_parameters()]
    meshes = [one.device_mesh for *_, one in parameters if hasattr(one, "device_mesh")]
    if meshes:
        is_sharded_data = any(kind.__name__ == "FSDPModule" for one in modules for kind in type(one).__mro__)
        is_shared = is_sharded_data and all(one.ndim == 1 and one.size() > readers for one in meshes)
        return _REPLICAS if is_shared else _PARTS
    return short_digest(repr([(*names, tuple(one.shape)) for *names, one in parameters]).encode()).hex()
