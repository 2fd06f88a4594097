"""This module marks on the page of a rank where a model and an optimizer are, by public hooks of torch, and lets torch
serve its flight recorder to the agent.

The outermost models of the state call at the begin and the end of their forward, while they train; optimizers call
before their step. The hooks are objects that copy and pickle to a hook that does nothing, so that a model can be copied
and saved whole. `remove` takes them off. Hooks run on the thread that trains, and take about a microsecond each. While
a graph is compiled they do nothing.

The server of the recorder is a private class of torch, with some idle threads, so that it starts only if
``LAKECKPT_RECORDER=1`` is set. It lives until the process ends: shutting it down at exit may wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lakeckpt.watch.beat import Beat, Phase

__all__ = ["Marks", "serve_recorder"]

_RECORDER, _MOST_PATH_BYTES = "LAKECKPT_RECORDER", 107


class _Hook:
    """Begins a phase. ``trains``: only while the hooked module trains."""

    __slots__ = ("_beat", "_phase", "_trains")

    def __init__(self, beat: Beat, phase: Phase, *, trains: bool) -> None:
        self._beat, self._phase, self._trains = beat, phase, trains

    def __call__(self, hooked: Any, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._trains or (hooked.training and torch.is_grad_enabled()):
            self._beat.phase(self._phase)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes all arguments and does nothing, also without lakeckpt


class Marks:
    """The hooks on the models and optimizers among ``objects``, which write to the page of ``beat``."""

    def __init__(self, beat: Beat, objects: Iterable[Any]) -> None:
        self._handles: list[Any] = []
        found = list(objects)
        models = [one for one in found if isinstance(one, nn.Module)]
        inner = {id(part) for model in models for part in model.modules() if part is not model}
        for model in models:
            if id(model) not in inner and not isinstance(model, torch.jit.ScriptModule):  # that one takes no hooks
                self._handles.append(model.register_forward_pre_hook(_Hook(beat, "forward", trains=True)))
                self._handles.append(model.register_forward_hook(_Hook(beat, "backward", trains=True)))
        for one in found:
            if isinstance(one, Optimizer):
                self._handles.append(one.register_step_pre_hook(_Hook(beat, "optimizer", trains=False)))

    def remove(self) -> None:
        """Take all hooks off. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def serve_recorder(path: str) -> bool:
    """Serve torch's flight recorder on a socket at ``path``, until the process ends. Returns whether it is served."""
    if os.environ.get(_RECORDER) != "1" or len(os.fsencode(path)) > _MOST_PATH_BYTES:
        return False
    with contextlib.suppress(OSError):
        os.unlink(path)
    try:
        from torch._C._distributed_c10d import _WorkerServer

        server = _WorkerServer(path)
    except (ImportError, RuntimeError, TypeError):
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))  # its end would wait for its threads
    return True
