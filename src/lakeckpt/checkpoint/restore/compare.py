"""This module compares a candidate, a state that may be restored, with the live objects, before anything is changed.

A `Candidate` is a checkpoint or a cut in memory, complete but for the bytes of its tensors: a
`lakeckpt.checkpoint.state.loaded.TensorSource` reads these from files or from an arena. It is compared and applied
(`lakeckpt.checkpoint.restore.applying`) in the same way, whatever its source is.

`compare` lists every missing, extra and mis-shaped entry of modules and optimizers, optimizers of another class,
and parts of tensors that no rank saved. Of other objects, only the names are compared: such an object refuses its state
itself. So does a part of a module that loads itself (`lakeckpt.checkpoint.state.own_loading`): `on_trial` returns the
parts that do not fit as they are. The module reads no tensor and changes no object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.format.sharing import say_ranks
from lakeckpt.checkpoint.restore.table_versions import Pins
from lakeckpt.checkpoint.state.loaded import Loaded
from lakeckpt.checkpoint.state.names import fitted, parameter_names
from lakeckpt.checkpoint.state.optimizer_states import differences_of_states, states_in
from lakeckpt.checkpoint.state.own_loading import loads_itself, part_of
from lakeckpt.checkpoint.state.shards import is_sharded, local_of, offsets_of, sharing_of
from lakeckpt.checkpoint.state.tensors import spec_of, tied_key
from lakeckpt.checkpoint.state.tree import alongside, class_of, flatten, references
from lakeckpt.errors import CheckpointError, CheckpointMismatch
from lakeckpt.recovery.facts import CutId
from lakeckpt.tracking.readers import TrackedReader
from lakeckpt.wire.envelope import TensorRef

__all__ = ["Candidate", "compare", "has_torchs_state", "on_trial"]

_MOST_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one rank may restore: a checkpoint, or a cut in memory that goes on from it (or from the start of the
    run)."""

    manifest: Manifest | None
    captured: CutId | None = None
    is_checked: bool = True
    """True if what is read is compared with checksums: not so for a cut in memory that no agent has hashed."""
    step: int
    readers: Mapping[str, ReaderRecord]
    pending: Mapping[str, tuple[PendingRecord, ...]] = field(default_factory=dict)
    """What was consumed between the two, by reader."""
    loaded: Loaded
    pins: Pins = field(default_factory=Pins)

    @property
    def name(self) -> str:
        """For messages."""
        if self.captured is not None:
            return f"the cut of step {self.step} in memory"
        assert self.manifest is not None
        return f"the checkpoint in slot {self.manifest.slot}"

    def held(self, objects: Mapping[str, Any], allow_missing: Collection[str]) -> Mapping[str, Any]:
        """Return those of ``objects`` that are compared and loaded: all but what is missing here and may be."""
        missing = frozenset(allow_missing) - self.loaded.trees.keys() - self.readers.keys()
        return {name: one for name, one in objects.items() if name not in missing}


def compare(objects: Mapping[str, Any], candidate: Candidate, *, advice: str) -> Candidate:
    """Return the ``candidate`` with its state as ``objects`` take it. Raise `CheckpointMismatch` if it
    does not fit them; ``advice`` says what to do."""
    here, misfits = _fitted_to(objects, candidate.loaded)
    _refuse_unlike(objects, here)
    lines = _differences(objects, here, candidate.readers, misfits)
    if not lines:
        return replace(candidate, loaded=here)
    shown = "\n  ".join(lines[:_MOST_LINES])
    more = f"\n  … and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    raise CheckpointMismatch(
        f"{candidate.name} does not fit the live objects; nothing was changed:\n  {shown}{more}\n{advice}"
    )


def has_torchs_state(one: object) -> bool:
    """Return whether an object is a module, or an optimizer whose state dict has the form that torch's have.

    The entries of such a state are compared one by one. An optimizer whose state dict has a form of its own (an
    optimizer around another one, for example) alone knows what goes where."""
    if not isinstance(one, torch.optim.Optimizer):
        return isinstance(one, torch.nn.Module)
    if "state_dict" not in vars(one) and type(one).state_dict is torch.optim.Optimizer.state_dict:
        return True
    state = one.state_dict()
    return isinstance(state, Mapping) and "state" in state and "param_groups" in state


def _differences(
    objects: Mapping[str, Any],
    loaded: Loaded,
    readers: Mapping[str, ReaderRecord],
    misfits: Mapping[str, list[str]],
) -> list[str]:
    """Return one line for each thing in which the state does not fit ``objects``; none if it fits."""
    lines = []
    tracked = {name for name, one in objects.items() if isinstance(one, TrackedReader)}
    for name in sorted({*objects, *loaded.trees, *readers}):
        saved_as_reader = name in readers
        if name not in objects and name in loaded.merged:
            continue  # other ranks have it
        if name not in objects:
            lines.append(f"{name!r} is in the checkpoint and not among the objects given")
        elif not saved_as_reader and name not in loaded.trees:
            lines.append(f"{name!r} is among the objects given and not in the checkpoint")
        elif saved_as_reader != (name in tracked):
            lines.append(f"{name!r} was {'' if saved_as_reader else 'not '}a tracked reader when it was saved")
        elif isinstance(objects[name], torch.nn.Module):
            found = _of_module(name, objects[name], loaded)
            lines += [line for key, line in found if key is None or part_of(objects[name], key) is None]
        elif has_torchs_state(objects[name]):
            lines += _of_optimizer(name, objects[name], loaded, misfits.get(name, []))
    return lines


def _fitted_to(objects: Mapping[str, Any], loaded: Loaded) -> tuple[Loaded, dict[str, list[str]]]:
    """Return the state with the parameters of each optimizer numbered as they are here, and for each optimizer the
    lines that say which parameters do not fit.

    From a state that was merged of several ranks, what is not here is removed. A tensor that a module has under several
    names, as tied weights, may be saved under one of them.
    """
    names = parameter_names(objects)
    trees, misfits = dict(loaded.trees), {}
    for name in loaded.trees.keys() & objects.keys():
        one, tree, has_more = objects[name], loaded.trees[name], name in loaded.merged
        if class_of(one) and has_torchs_state(one):
            trees[name], misfits[name] = fitted(name, one, tree, names, has_more=has_more)
        elif isinstance(one, torch.nn.Module) and type(tree) is dict:
            here = flatten(name, one.state_dict(), of_module=True).tree
            found = {key: value for key, value in tree.items() if key in here or not has_more}
            trees[name] = {**found, **_other_names(here, tree)}
    return replace(loaded, trees=trees), misfits


def _other_names(here: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → value for each name that ``tree`` lacks of a tensor of which it has another name."""
    lacks = [key for key, live in here.items() if key not in tree and isinstance(live, TensorRef)]
    named = {here[key].key: tree[key] for key in here if lacks and key in tree and isinstance(here[key], TensorRef)}
    return {key: named[here[key].key] for key in lacks if here[key].key in named}


def _refuse_unlike(objects: Mapping[str, Any], loaded: Loaded) -> None:
    """On another number of ranks, refuse parameters and optimizer states that differed between ranks. Buffers, and the
    state of other objects, may be every rank's own."""
    if loaded.unlike is None or not loaded.unlike.tensors:
        return
    found: set[str] = set()
    for name, one in objects.items():
        tree = loaded.trees.get(name)
        if isinstance(one, torch.nn.Module):
            own = {tied_key(local_of(parameter)) for parameter in one.parameters()} - {None}
            for ref, live in alongside(tree, one.state_dict()):
                if isinstance(live, torch.Tensor) and tied_key(local_of(live)) in own:
                    found.add(ref.key)
        elif isinstance(one, torch.optim.Optimizer) and isinstance(tree, dict):
            found |= {ref.key for ref in references(tree.get("state"))}
    wrong = sorted(found & loaded.unlike.tensors.keys())
    if wrong:
        raise loaded.unlike.refusal(wrong)


def on_trial(objects: Mapping[str, Any], loaded: Loaded) -> dict[str, tuple[Any, Any]]:
    """Return name → (object, tree) for all that loads itself and does not fit as it is: parts of modules, and
    optimizers. ``loaded`` was compared."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, one in objects.items():
        tree = loaded.trees.get(name)
        if isinstance(one, torch.nn.Module) and tree is not None:
            parts = [part_of(one, key) for key, _ in _of_module(name, one, loaded) if key is not None]
            found |= {f"{name}.{part.name}".rstrip("."): (part, part.tree(tree)) for part in parts if part is not None}
            continue
        judges = tree is not None and class_of(one) and has_torchs_state(one) and loads_itself(one)
        if judges and differences_of_states(name, one, tree, loaded.specs):
            found[name] = one, tree
    return found


def _of_module(name: str, module: torch.nn.Module, loaded: Loaded) -> list[tuple[str | None, str]]:
    """Return (the entry that differs, the line that says how); None in place of the entry if no loading can help."""
    flat, tree = flatten(name, module.state_dict(), of_module=True), loaded.trees[name]
    if type(tree) is not dict:
        return [(None, f"{name}: the checkpoint holds a {type(tree).__name__}, not the state of a module")]
    lines = [(key, f"{name}: {key} is missing from the checkpoint") for key in flat.tree if key not in tree]
    lines += [
        (key, f"{name}: {key} is in the checkpoint and not in the module") for key in tree if key not in flat.tree
    ]
    ties: dict[str, tuple[str, str]] = {}
    for key, live in flat.tree.items():
        saved = tree.get(key)
        if key not in tree or not (isinstance(live, TensorRef) or isinstance(saved, TensorRef)):
            continue
        if not (isinstance(live, TensorRef) and isinstance(saved, TensorRef)):
            lines.append((key, f"{name}: {key} is a tensor on one side only"))
            continue
        lines += [(key, one) for one in _of_tensor(f"{name}: {key}", flat.leaf(live.key), saved.key, loaded)]
        other, known = ties.setdefault(live.key, (key, saved.key))
        if known in loaded.specs and saved.key in loaded.specs and not _same(known, saved.key, loaded):
            text = f"{name}: {other} and {key} are one tensor in the module, and two different ones were saved"
            lines.append((None, text))
    return lines


def _same(one: str, other: str, loaded: Loaded) -> bool:
    """Return whether two stored tensors hold the same bytes."""
    if one in loaded.wholes or other in loaded.wholes:
        return one == other
    return one == other or loaded.source.same(one, other)


def _of_tensor(what: str, target: torch.Tensor, key: str, loaded: Loaded) -> list[str]:
    live, saved = spec_of(what, target), loaded.specs.get(key)
    if saved is None:
        return [f"{what} is named and not stored"]
    if (live.dtype, live.shape) != (saved.dtype, saved.shape):
        return [
            f"{what} is {saved.dtype} {list(saved.shape)} in the checkpoint and {live.dtype} {list(live.shape)} in the "
            "module"
        ]
    return _of_parts(what, target, key, loaded) if key in loaded.wholes else []


def _of_parts(what: str, target: torch.Tensor, key: str, loaded: Loaded) -> list[str]:
    """Return why the part of a tensor that this rank holds cannot be taken from the parts that were saved."""
    here = sharing_of(target).ranks if is_sharded(target) else None
    offsets, sizes = offsets_of(what, target), tuple(local_of(target).shape)
    whole = loaded.with_part(key, offsets, sizes, ranks=here).whole(key)  # may find that a part is damaged
    if whole.is_several and whole.sharing is not None and here is not None and here != whole.sharing.ranks:
        return [
            f"{what}: ranks had different tensors of this name; the tensor of this rank was shared by "
            f"{say_ranks(whole.sharing.ranks)}, and is "
            f"shared by {say_ranks(here)} here"
        ]
    try:
        whole.regions(offsets, sizes)
    except CheckpointError as error:
        return [f"{what}: {error}"]
    return []


def _of_optimizer(name: str, one: torch.optim.Optimizer, loaded: Loaded, misfits: list[str]) -> list[str]:
    was, now, tree = loaded.kinds[name], class_of(one), loaded.trees[name]
    if was not in ("", now):  # what was converted from elsewhere does not name its class
        return [f"{name}: the checkpoint holds the state of {was}, and a {now} is here"]
    lines = misfits or ([] if loads_itself(one) else differences_of_states(name, one, tree, loaded.specs))
    if lines or not loaded.wholes:
        return lines
    try:
        places = states_in(one, tree, loaded.specs, loaded.wholes, device="meta")
    except CheckpointMismatch as error:
        return [f"{name}: {error}"]
    keys = dict.fromkeys(ref.key for ref in references(tree["state"]) if ref.key in loaded.wholes)
    for key in keys:
        target = places[key] if key in places else torch.empty(loaded.wholes[key].spec.shape, device="meta")
        lines += _of_parts(f"{name}: {key.removeprefix(f'{name}/')}", target, key, loaded)
    return lines
