"""When does a rank under FSDP2 wait for the others?  While it gathers parameters and scatters sums of gradients.

Each module under ``fully_shard`` has objects that do its collectives, and torch lets them be replaced. Around each of
them stands one that tells the gate when a call begins and ends. On the CPU a call returns when the others have come;
on a GPU it returns when the work is queued, and its windows are nothing: there the forward pass is free time of the
link (`watch_forward`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.errors import ConfigError

__all__ = ["watch_forward", "watch_fsdp"]

_COLLECTIVES = {"_all_gather_comm": "fsdp gather", "_reduce_scatter_comm": "fsdp scatter"}


def watch_fsdp(gate: BubbleGate, model: torch.nn.Module) -> int:
    """Tell ``gate`` when the collectives of ``model`` and all below it wait. Returns how many are watched.

    `ConfigError` where nothing of the model is under ``fully_shard``, or this torch keeps its collectives elsewhere.
    """
    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if not modules:
        raise ConfigError(f"{type(model).__name__} has no module under fully_shard: call it before it is watched")
    watched = 0
    for module in modules:
        for group in _groups(module):
            for name, site in _COLLECTIVES.items():
                inner = getattr(group, name, None)
                if inner is None:
                    continue
                if not isinstance(inner, _Watched):
                    setattr(group, name, _Watched(gate, inner, site))
                watched += 1
    if not watched:
        raise ConfigError(f"torch {torch.__version__} keeps the collectives of fully_shard where they are not found")
    return watched


def _groups(module: FSDPModule) -> list[Any]:
    """What shards the parameters of ``module``: several, one in torch before 2.12, or none."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


class _Watched:
    """One collective, and word of it. What it does not know of, it asks the one inside."""

    def __init__(self, gate: BubbleGate, inner: Any, site: str) -> None:
        self._gate, self._inner, self._site = gate, inner, site

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with self._gate.idle(self._site):
            found: dist.Work | None = self._inner(*args, **kwargs)
            return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def watch_forward(gate: BubbleGate, model: torch.nn.Module, *, site: str = "forward") -> list[Any]:
    """Tell ``gate`` that the link to the host is free while ``model`` goes forward. Returns the hooks' handles.

    For models on a GPU: what copies there is not what computes. On the CPU both are the same cores, and a forward pass
    leaves nothing free.
    """

    def begin(module: torch.nn.Module, args: Any) -> None:
        gate.begin(site, "free")

    def end(module: torch.nn.Module, args: Any, output: Any) -> None:
        gate.end("free")

    return [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]
