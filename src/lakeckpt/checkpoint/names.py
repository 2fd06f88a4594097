"""What is a tensor called, whatever wraps its module?  Names without the marks that wrappers leave.

DDP adds ``module.`` to every name, ``torch.compile`` adds ``_orig_mod.``, and so on, anywhere in the path. What 4 ranks
saved under DDP must load into a bare module, so names of modules' state are stored without these marks. Loading maps
them back by the names of the live object. Where two names would become one, those keep their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["canonical_names"]

_MARKS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """name → canonical name, one to one.

    >>> canonical_names(["module._orig_mod.layer.weight", "step"])
    {'module._orig_mod.layer.weight': 'layer.weight', 'step': 'step'}
    """
    found = {name: _stripped(name) for name in names}
    times = Counter(found.values())
    return {name: short if times[short] == 1 else name for name, short in found.items()}


def _stripped(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 1:
        return name
    return ".".join(part for part in parts if part not in _MARKS) or name
