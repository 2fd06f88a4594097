"""This module captures and restores the states of the random generators of Python, numpy and torch, of one rank.

They are part of the cut, and each rank has its own. A rank that is new after a change of the world size gets states
derived from (seed, step, rank), the same whenever that checkpoint is restored on that many ranks.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.core.hashing import derive_key
from lakeckpt.errors import CheckpointDamaged

__all__ = ["RANDOM", "capture_random", "check_random", "derive_random", "restore_random"]


_MT19937_BYTES = 4 * 625
_numpys: tuple[bytes, tuple[Any, ...]] = b"", ()
"""The memory of numpy's generator when its state was made last, and that state."""


def _numpy_state() -> tuple[Any, ...]:
    """Return the state of numpy's generator, which numpy takes a tenth of a millisecond to make.

    It is made again if the memory of the generator has changed. A second normal number of a pair is the exception: it
    comes from no memory of the generator, and the state says that it is kept.
    """
    global _numpys
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return tuple(np.random.get_state())
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    known, state = _numpys
    if known != memory or state[3]:
        _numpys = memory, tuple(np.random.get_state())
    return _numpys[1]


def capture_random() -> dict[str, Any]:
    """Return the states now, as values that the wire codec takes."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().copy(),
        "cuda": [state.numpy().copy() for state in torch.cuda.get_rng_state_all()] if on_gpu else [],
    }


def check_random(states: object) -> dict[str, Any]:
    """Return ``states`` if `restore_random` can take them; else raise `CheckpointDamaged`. Changes nothing."""
    try:
        if not isinstance(states, dict):
            raise TypeError(f"random states are a dict, got {type(states).__name__}")
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(torch.from_numpy(states["torch"].copy()))
        if not all(isinstance(one, np.ndarray) and one.dtype == np.uint8 for one in states["cuda"]):
            raise TypeError("states of CUDA devices are arrays of uint8")
    except Exception as error:
        raise CheckpointDamaged(
            f"the random states cannot be used by this Python, numpy and torch: {error!r}"
        ) from error
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Go on from ``states``, which `check_random` has checked. States of GPUs that are not here are skipped."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if states["cuda"] and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(torch.from_numpy(state.copy()), device)


def derive_random(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a rank that has no saved states."""
    key, other = derive_key("random states", seed, step, rank)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.manual_seed(other >> 1)  # seeds the GPUs, too
