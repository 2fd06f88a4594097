"""This module says how many bytes of a node's memory captures take, before the first capture.

If arenas of the run lie there, they are the measure. Else the state is estimated: parameters, buffers and states of
optimizers count as they are. An optimizer makes its states at its first step; until then they are estimated from its
class and its options. The module allocates nothing and starts no threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capture.state_watch import parts_of
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.tally import name_ranks, ranks_of

__all__ = ["estimated_bytes", "say_memory"]

_LOG = logging.getLogger("lakeckpt")

_MOMENTS = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "ASGD": 1, "Lion": 1, "Muon": 1}
"""How many tensors of a parameter's size an optimizer keeps for it, but for those that options ask for."""
_USUAL_MOMENTS = 2
_OPTIONS = ("momentum", "centered", "amsgrad")
"""Each makes one more such tensor, if it is not 0 or False."""
_NO_OPTION = {"Muon": ("momentum",)}


def say_memory(
    objects: Mapping[str, Any], folder: ArenaFolder, identity: ArenaIdentity, exchange: Exchange, *, generations: int
) -> None:
    """Say on one rank of each node how much memory captures take there: a warning if it is not there."""
    ranks = exchange.neighbours
    if exchange.rank != ranks[0]:
        return
    every = (one.size_bytes for one in folder.found() if one.identity is not None and _is_like(one.identity, identity))
    size_bytes = max(every, default=0) or generations * estimated_bytes(objects.values())
    room_bytes = folder.room_bytes(identity.run)
    _LOG.log(
        logging.INFO if len(ranks) * size_bytes <= room_bytes else logging.WARNING,
        "captures of %s take about %.2f GiB of this node's memory, %d generations of %.2f GiB for each rank; %.2f GiB "
        "are there in %s",
        name_ranks(ranks_of(ranks)),
        len(ranks) * size_bytes / 2**30,
        generations,
        size_bytes / generations / 2**30,
        room_bytes / 2**30,
        folder.path,
    )


def _is_like(one: ArenaIdentity, other: ArenaIdentity) -> bool:
    return (one.run, one.world) == (other.run, other.world)


def estimated_bytes(objects: Iterable[object]) -> int:
    """Return the bytes of the tensors of all modules and optimizers that ``objects`` are or hold, on this rank."""
    sizes: dict[tuple[int, int], int] = {}
    missing = 0
    parts = {id(part): part for one in objects for part in parts_of(one)}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            _count(chain(part.parameters(), part.buffers()), sizes)
        else:
            states = (state for state in part.state.values() if isinstance(state, dict))
            _count((one for state in states for one in state.values() if isinstance(one, torch.Tensor)), sizes)
            missing += sum(_moments(part, group) * _unmade(part, group) for group in part.param_groups)
    return sum(sizes.values()) + missing


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _count(tensors: Iterable[torch.Tensor], sizes: dict[tuple[int, int], int]) -> None:
    for one in map(_local, tensors):
        if not torch.nn.parameter.is_lazy(one):
            sizes[one.data_ptr(), one.nbytes] = one.nbytes


def _unmade(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """Return the bytes of the parameters of a group that are trained and have no state yet."""
    waits = (one for one in group["params"] if one.requires_grad and not optimizer.state.get(one))
    return sum(_local(one).nbytes for one in waits if not torch.nn.parameter.is_lazy(one))


def _moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    name = type(optimizer).__name__
    options = [one for one in _OPTIONS if group.get(one) and one not in _NO_OPTION.get(name, ())]
    return _MOMENTS.get(name, _USUAL_MOMENTS) + len(options)
