"""In which environment does an agent open storage?  In that of the trainer that came last.

Credentials, endpoints and proxies may be in it, and an agent outlives the trainer that started it: the job that is
started again mostly brings new ones. It is told over the agent's socket, as storage options are, and never written
anywhere. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["take_over", "told"]

_OURS = frozenset({b"PYTHONPATH"})
"""Not the trainer's: from where an agent imports is settled when it is started."""


def told() -> bytes:
    """The environment of this process, as Linux would tell it: ``name=value``, with NUL between."""
    return b"\0".join(b"%s=%s" % one for one in os.environb.items())


def take_over(data: bytes) -> list[str]:
    """Have the environment that another process has `told`. What is the same is not touched: other threads read it.

    Returns the names that the system does not let one set (there may be an empty one): these are left out.
    """
    found = dict(one.split(b"=", 1) for one in data.split(b"\0") if b"=" in one)
    for name in os.environb.keys() - found.keys() - _OURS:
        with contextlib.suppress(OSError, ValueError):
            del os.environb[name]
    refused = []
    for name, value in found.items():
        if name not in _OURS and os.environb.get(name) != value:
            try:
                os.environb[name] = value
            except (OSError, ValueError):
                refused.append(os.fsdecode(name))
    return refused
