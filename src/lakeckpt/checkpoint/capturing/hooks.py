"""Is the state about to change, and can we be sure to be told?  Hooks of optimizers and modules, and what they proved.

Before an optimizer steps, and before a state is loaded into an optimizer or a module, `fence` is called. An optimizer
is *proven* once its hook was seen to fire; until then, and for good where it was seen to go around its hooks, `trusted`
is false and captures must be made at the cut, before training goes on. It goes around them where a step is captured
into a CUDA graph (replays call no Python), and where its parameters have other versions at a cut while no hook fired
since the last one, neither its own nor that of another optimizer of theirs (updated by hand, or by a kernel of
somebody's own).

It holds no lock and copies nothing. Hooks run on whichever thread steps.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lakeckpt.checkpoint.report import CaptureWarning

__all__ = ["UpdateHooks", "takes_hooks", "versions_of"]

_Seen = tuple[list[torch.Tensor], list[int]]
"""Parameters, and how often each was changed."""

_PATIENCE = 3
"""After how many cuts an optimizer that was never seen to step is told of."""


class UpdateHooks:
    """The hooks of all optimizers and modules among ``objects``.

    ``fence`` is called before each change, ``void`` where what is being captured may change without one.
    """

    __slots__ = ("_around", "_fence", "_fired", "_handles", "_optimizers", "_proven", "_seen", "_unseen", "_void")

    def __init__(self, objects: Mapping[str, Any], fence: Callable[[], None], void: Callable[[], None]) -> None:
        self._fence, self._void = fence, void
        self._optimizers = {name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        self._proven: set[str] = set()
        self._around: set[str] = set()
        self._fired: set[str] = set()
        self._unseen = dict.fromkeys(self._optimizers, 0)
        self._seen: dict[str, _Seen] = {}
        self._handles: list[Any] = []
        for name, one in self._optimizers.items():
            if not hasattr(one, "_optimizer_step_pre_hooks"):  # it wraps another one, and is none but by its class
                self._goes_around(name, f"{type(one).__name__} has no hooks for steps: give the one it wraps")
                continue
            # Dynamo leaves a compiled step for it, and comes back: a hook that is traced would run once, not each time.
            hook = torch.compiler.disable(self._hook(name))  # type: ignore[no-untyped-call]
            self._handles.append(one.register_step_pre_hook(hook))
            if hasattr(one, "_optimizer_load_state_dict_pre_hooks"):  # else its state is taken at each cut (`sources`)
                self._handles.append(one.register_load_state_dict_pre_hook(self._about_to_load))
        for one in objects.values():
            if isinstance(one, torch.nn.Module) and takes_hooks(one):
                self._handles.append(one.register_load_state_dict_pre_hook(self._about_to_load))  # type: ignore[no-untyped-call]

    def _about_to_load(self, *_: object) -> None:
        self._fired.update(self._optimizers)
        self._fence()

    def _hook(self, name: str) -> Callable[..., None]:
        def about_to_step(*_: object) -> None:
            self._fired.add(name)
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                # Nothing is changed now, and no work outside of a graph may be waited for: replays are what changes.
                self._void()
                self._goes_around(name, "a step of it is captured into a CUDA graph, and replays call no hooks")
                return
            self._proven.add(name)
            self._fence()

        return about_to_step

    @property
    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """All of them."""
        return self._optimizers.values()

    def trusted(self) -> bool:
        """At a cut: whether the next update will be announced, by all that is known. Warns once where it is not."""
        for name, one in self._optimizers.items():
            parameters = list(_parameters(one))
            seen, self._seen[name] = self._seen.get(name), (parameters, versions_of(parameters))
            if name in self._fired or name in self._around:
                continue
            if seen is not None and self._unannounced(seen, self._seen[name]):
                self._goes_around(name, "its parameters were changed and its hooks for steps were not called")
            elif name not in self._proven:
                self._unseen[name] += 1
                if self._unseen[name] == _PATIENCE:
                    warnings.warn(
                        f"optimizer {name!r} was not seen to step through its hooks in {_PATIENCE} cuts: until it is, "
                        "each capture is copied while training waits",
                        CaptureWarning,
                        stacklevel=4,
                    )
        self._fired.clear()
        return self._proven.issuperset(self._optimizers) and not self._around

    def _unannounced(self, before: _Seen, now: _Seen) -> bool:
        """Whether a parameter was changed that no optimizer holds of which a hook was called."""
        if before[1] == now[1] and len(before[0]) == len(now[0]) and all(map(operator.is_, before[0], now[0])):
            return False
        fired = [one for name, one in self._optimizers.items() if name in self._fired]
        announced = {id(one) for optimizer in fired for one in _parameters(optimizer)}
        known = {id(one): version for one, version in zip(*before, strict=True)}  # others came since
        changed = (one for one, version in zip(*now, strict=True) if known.get(id(one), version) != version)
        return any(id(one) not in announced for one in changed)

    def _goes_around(self, name: str, why: str) -> None:
        if name not in self._around:
            self._around.add(name)
            warnings.warn(
                f"optimizer {name!r} changes parameters without saying so ({why}): from now on each capture is copied "
                "while training waits",
                CaptureWarning,
                stacklevel=5,
            )

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def takes_hooks(module: torch.nn.Module) -> bool:
    """Whether ``module`` says when a state is loaded into it: what was scripted or traced cannot."""
    return not isinstance(module, torch.jit.ScriptModule)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was changed in place, as torch counts it; 0 for those that are not counted."""
    every = list(tensors)
    try:
        return [one._version for one in every]
    except RuntimeError:  # made in inference mode
        return [0 if one.is_inference() else one._version for one in every]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])
