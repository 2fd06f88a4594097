"""This module knows which unchanged tensors a generation of the arena holds already, so that captures skip them.

A *frozen* tensor (`lakeckpt.checkpoint.capture.sources`) that torch has not counted a change of, since a capture wrote
it to a slot of the arena, lies there as it is. A later capture into the same slot skips it. It is neither copied nor
hashed again: the record of the generation names the leaves that were kept, and since when.

torch counts no change through ``.data``, by some fused kernels, and in replays of CUDA graphs. So the first bytes of
each frozen tensor are compared at each cut (`lakeckpt.checkpoint.capture.samples`), and captures that are saved skip
nothing. A tensor that was found changed is copied every time from then on (`KeptTensors.distrust`).

Only the training thread calls `KeptTensors.begin`, and only the copier calls the rest, but for `distrust`. The module
copies nothing and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.arena.layout import KeptLeaves
from lakeckpt.checkpoint.capture.plan import CapturePlan
from lakeckpt.checkpoint.format.digests import LEAF_BYTES

__all__ = ["KeptTensors", "Skipped", "uncounted"]

_MOST_RANGES = 64
"""So many ranges of leaves are kept. Leaves of others are hashed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """The tensors that one capture into a slot skips: ``keys``. ``counts`` are those of all frozen tensors at the cut;
    ``since`` is the sequence number of the generation that wrote the last of ``keys``."""

    number: int
    plan: CapturePlan
    counts: Mapping[str, int]
    keys: frozenset[str] = frozenset()
    since: int = 0

    def leaves(self) -> KeptLeaves | None:
        """Return the leaves of the data of which no byte is copied; None if there are none."""
        if not self.keys:
            return None
        copied = sorted(
            (place.start, place.stop)
            for key, place in self.plan.table.places.items()
            if key not in self.keys and place.spec.size_bytes
        )
        copied.append((self.plan.slices.data_bytes, self.plan.slices.data_bytes))
        found, end = [], -(-self.plan.early_bytes // LEAF_BYTES)
        for start, stop in copied:
            if start // LEAF_BYTES > end:
                found.append((end, start // LEAF_BYTES))
            end = max(end, -(-stop // LEAF_BYTES))
        longest = sorted(found, key=lambda one: one[0] - one[1])[:_MOST_RANGES]
        return KeptLeaves(since=self.since, ranges=tuple(sorted(longest))) if longest else None


def uncounted(keys: Sequence[str]) -> str:
    """Return the warning for frozen tensors that changed."""
    others = f" and {len(keys) - 1} more tensors" if len(keys) > 1 else ""
    return (
        f"{keys[0]!r}{others} changed, though no gradient is taken and torch has counted no change (as through .data): "
        "cuts in memory since the save before may hold an older value. From now on each capture copies them. Change "
        "them by operations that torch counts (copy_, lerp_), under torch.no_grad()"
    )


class KeptTensors:
    """The frozen tensors that each slot of one arena holds."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Mapping[str, object], dict[str, tuple[int, int]]]] = {}
        """slot → the late tensors that it was written from, and key → (count of changes, sequence number)."""
        self._distrusted: set[str] = set()

    def clear(self) -> None:
        """Forget all slots: the arena is another one."""
        self._slots.clear()

    def distrust(self, keys: Iterable[str]) -> list[str]:
        """Skip these tensors never again. Returns those that were skipped until now."""
        found = sorted(set(keys) - self._distrusted)
        self._distrusted.update(found)
        return found

    def begin(self, plan: CapturePlan, number: int, counts: Mapping[str, int], *, whole: bool) -> Skipped:
        """Return what a capture into slot ``number`` skips; nothing if it is to be ``whole``. ``counts``: how often
        each frozen tensor has changed."""
        late, held = self._slots.pop(number, ({}, {}))
        if whole or late is not plan.late:
            return Skipped(number=number, plan=plan, counts=counts)
        trusted = {key: at for key, at in held.items() if key not in self._distrusted}
        keys = frozenset(key for key, (count, _) in trusted.items() if counts.get(key) == count)
        since = max((trusted[key][1] for key in keys), default=0)
        self._slots[number] = plan.late, {key: trusted[key] for key in keys}
        return Skipped(number=number, plan=plan, counts=counts, keys=keys, since=since)

    def complete(self, skipped: Skipped, sequence: int) -> None:
        """The capture has completed its generation, with this sequence number."""
        _, held = self._slots.get(skipped.number, ({}, {}))
        written = {key: (count, sequence) for key, count in skipped.counts.items() if key not in skipped.keys}
        self._slots[skipped.number] = skipped.plan.late, {**held, **written}
