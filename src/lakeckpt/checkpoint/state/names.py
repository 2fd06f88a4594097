"""What is a tensor called, whatever wraps its module?  Names without the marks that wrappers leave.

DDP adds ``module.`` to every name, ``torch.compile`` adds ``_orig_mod.``, and so on, anywhere in the path. What 4 ranks
saved under DDP must load into a bare module, so names of modules' state are stored without these marks. Loading maps
them back by the names of the live object. Where several names would become one (a module that calls what it wraps
``module``, and has a parameter of the same name), these keep the marks that tell them apart, and lose those that all of
them have in one place: a wrapper around all of them leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["canonical_names"]

_MARKS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """name → canonical name, one to one.

    >>> canonical_names(["module._orig_mod.layer.weight", "step"])
    {'module._orig_mod.layer.weight': 'layer.weight', 'step': 'step'}
    >>> canonical_names(["_orig_mod.a.bias", "_orig_mod.a.module.bias"])
    {'_orig_mod.a.bias': 'a.bias', '_orig_mod.a.module.bias': 'a.module.bias'}
    """
    found = {name: _stripped(name) for name in names}
    alike: dict[str, list[str]] = {}
    for name, short in found.items():
        alike.setdefault(short, []).append(name)
    for several in alike.values():
        if len(several) > 1:
            found.update(_apart(several))
    return found


def _stripped(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 1:
        return name
    return ".".join(part for part in parts if part not in _MARKS) or name


def _apart(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names that differ by their marks alone, each with what it keeps of them: those beside which others go on."""
    root: dict[str, Any] = {}
    for name in names:
        at = root
        for part in (*name.split("."), ""):  # the last one: a name ends here
            at = at.setdefault(part, {})
    for name in names:
        at, kept = root, []
        for part in name.split("."):
            if part not in _MARKS or len(at) > 1:
                kept.append(part)
            at = at[part]
        yield name, ".".join(kept)
