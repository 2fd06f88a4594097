"""This module finds the state that differed between ranks, and refuses it after a change of the world size.

On the same number of ranks, each rank gets its own state back. On another number, rank r takes the state of the old
rank r mod W. This is right for state that was the same on all ranks, and for buffers and notes, which belong to one
rank. It would be wrong, and nobody would notice, if ranks have different roles, as in the stages of a pipeline: no
record says which role a new rank has. So parameters, optimizer states and tensors in parts that differed between ranks
are refused.

The module never reads storage, changes nothing, and never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.format.fields import Ranks, joined
from lakeckpt.checkpoint.format.parts import RANDOM, SHARING, PartRecord
from lakeckpt.checkpoint.format.sharing import is_part_key, say_ranks
from lakeckpt.checkpoint.format.units import tensor_unit, tree_unit
from lakeckpt.errors import CheckpointMismatch

__all__ = ["Contents", "Unlike", "contents_of", "different", "refuse_divided", "unlike_of"]

Contents = Mapping[str, Sequence[Ranks]]
"""Unit → for each of its contents, the ranks that had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """The tensors whose contents differed between the ``world_size`` ranks that saved them."""

    world_size: int
    tensors: Contents

    def refusal(self, keys: Sequence[str]) -> CheckpointMismatch:
        """Return the error for the tensors ``keys``, which must not differ between ranks."""
        first = keys[0]
        more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
        return CheckpointMismatch(
            f"on the {self.world_size} ranks that saved it, the tensor {first!r} had {len(self.tensors[first])} "
            f"different contents, on {' and on '.join(map(say_ranks, self.tensors[first]))}{more}: which of them "
            "belongs on which rank of another number of ranks is not known. Nothing was changed. Restart with "
            f"{self.world_size} ranks. To be free to change their number, let ranks that hold different things (the "
            "stages of a pipeline, say) save into runs of their own, with group=; "
            "`lakeckpt.convert.read_state(run, rank=…)` gives what one rank had"
        )


def contents_of(parts: Sequence[PartRecord]) -> Contents:
    """Return the contents of all units in ``parts``: tensors, and trees but those of random states."""
    units = [(tensor_unit(one.spec, one.digest), one.ranks) for part in parts for one in part.tensors]
    units += [
        (tree_unit(one.item, one.digest), one.ranks)
        for part in parts
        for one in part.trees
        if one.item not in (RANDOM, SHARING)
    ]
    found: defaultdict[str, dict[bytes, Ranks]] = defaultdict(dict)
    for (name, content), ranks in units:
        known = found[name].get(content, ())
        found[name][content] = joined([known, ranks]) if known else ranks
    return {name: list(contents.values()) for name, contents in found.items()}


def unlike_of(contents: Contents, world_size: int) -> Unlike:
    """Return the whole tensors whose contents differed between ranks; tensors in parts are not among them."""
    found = {
        name.removeprefix("tensor:"): ranks
        for name, ranks in contents.items()
        if name.startswith("tensor:") and len(ranks) > 1 and not is_part_key(name)
    }
    return Unlike(world_size=world_size, tensors=found)


def different(contents: Contents) -> tuple[str, ...]:
    """Return the units whose contents differed between ranks."""
    return tuple(sorted(name for name, ranks in contents.items() if len(ranks) > 1))


def refuse_divided(contents: Contents, world_size: int, *, but: Collection[str]) -> None:
    """Raise `CheckpointMismatch` if only some of the ``world_size`` ranks have a state that is not part of a tensor.

    Items in ``but`` are exempt: their states are merged."""
    for name, several in sorted(contents.items()):
        if is_part_key(name) or name.partition(":")[2].partition("/")[0] in but:
            continue
        held = sum(stop - start for ranks in several for start, stop in ranks)
        if held != world_size:
            raise CheckpointMismatch(
                f"{name} is on {held} of {world_size} ranks: a state that is divided over ranks can only be restored "
                f"on as many ranks. Restart with {world_size} ranks"
            )
