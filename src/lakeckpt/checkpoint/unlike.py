"""Of what did the ranks have different contents, and what does that forbid on another number of ranks?

On as many ranks, each has its own back. On others, rank r takes what the old rank r mod W had: right where all had the
same, and for what is every rank's own matter anyway (buffers, notes). Wrong in silence where ranks are of different
kinds, as the stages of a pipeline are: nothing that was saved says which of them a new rank is of. So parameters,
states of optimizers and tensors in parts, of which ranks had different ones, are refused there.

Never reads or changes anything. Imports without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.fields import Ranks, joined
from lakeckpt.checkpoint.parts import RANDOM, SHARING, PartRecord
from lakeckpt.checkpoint.sharing import say_ranks
from lakeckpt.checkpoint.units import tensor_unit, tree_unit
from lakeckpt.checkpoint.wholes import Wholes, is_part_key
from lakeckpt.errors import CheckpointMismatch

__all__ = ["Unlike", "different", "refuse_divided", "refuse_several", "unlike_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """The tensors of which the ``world_size`` ranks that saved them had different contents."""

    world_size: int
    tensors: Mapping[str, tuple[Ranks, ...]]
    """key → the ranks of each content."""

    def refusal(self, keys: Sequence[str]) -> CheckpointMismatch:
        """The error for tensors, some of ``keys``, that are not to be different."""
        first = keys[0]
        more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
        return CheckpointMismatch(
            f"on the {self.world_size} ranks that saved it, the tensor {first!r} had {len(self.tensors[first])} "
            f"different contents, on {' and on '.join(map(say_ranks, self.tensors[first]))}{more}: which of them "
            "belongs on which rank of another number of ranks is not known. Nothing was changed. Restart with "
            f"{self.world_size} ranks. To be free to change their number, let ranks that hold different things (the "
            "stages of a pipeline, say) save into runs of their own, with group=; `lakeckpt.read_state(run, rank=…)` "
            "gives what one rank had"
        )


def unlike_of(parts: Sequence[PartRecord], world_size: int) -> Unlike:
    """The tensors, not in parts, of which ranks had different contents."""
    found = {
        name.removeprefix("tensor:"): tuple(contents)
        for name, contents in _contents(parts).items()
        if name.startswith("tensor:") and len(contents) > 1 and not is_part_key(name)
    }
    return Unlike(world_size=world_size, tensors=found)


def different(parts: Sequence[PartRecord]) -> tuple[str, ...]:
    """The units of which ranks had different contents."""
    return tuple(sorted(name for name, contents in _contents(parts).items() if len(contents) > 1))


def refuse_several(wholes: Wholes, old_size: int) -> None:
    """`CheckpointMismatch` where ranks had different tensors of one name, in parts."""
    several = wholes.several()
    if several:
        raise Unlike(world_size=old_size, tensors=several).refusal(sorted(several))


def refuse_divided(parts: Sequence[PartRecord], old_size: int) -> None:
    """`CheckpointMismatch` where a state is on some ranks only, and not as parts of a tensor."""
    for name, contents in sorted(_contents(parts).items()):
        if is_part_key(name):
            continue
        held = sum(stop - start for ranks in contents for start, stop in ranks)
        if held != old_size:
            raise CheckpointMismatch(
                f"{name} is on {held} of {old_size} ranks: a state that is divided over ranks can only be restored on "
                f"as many ranks. Restart with {old_size} ranks"
            )


def _contents(parts: Sequence[PartRecord]) -> dict[str, list[Ranks]]:
    """unit → the ranks of each of its contents."""
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
