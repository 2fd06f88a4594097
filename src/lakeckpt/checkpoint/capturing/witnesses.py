"""Did the state change under a capture though nobody said so?  A few bytes of many slices, as they were at the cut.

What torch counts as a change in place is noticed without this. A change through ``.data`` is not counted: averages of
weights are swapped in for an evaluation that way, and whatever a rank's part of a larger tensor is changed by. So the
first and the last bytes of slices are copied at the cut, and compared with what was copied of them later. A swap of all
weights changes nearly all of them, whether it was undone before the fence or not.

It proves nothing where it finds nothing: a change of single elements goes by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lakeckpt.checkpoint.capturing.moves import Links, Moves, flat_bytes, link_of, wait_all
from lakeckpt.checkpoint.capturing.plan import CapturePlan

__all__ = ["Taken", "Witnesses"]

_BYTES = 64
_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Bytes of one cut: copies on devices, and rows of what lies in host memory."""

    moves: Moves
    here: torch.Tensor


class Witnesses:
    """Of a plan's late tensors. `take` is called by the training thread at a cut, `changed` by the copier, later, in
    the order of cuts."""

    def __init__(self, plan: CapturePlan, links: Links) -> None:
        self._plan, self._spots = plan, _spots(plan)
        self._rows = torch.zeros(len(self._spots), _BYTES, dtype=torch.uint8)
        self._moves = Moves()
        self._linked: list[bool] = []
        flats: dict[str, torch.Tensor | None] = {}
        for row, (key, start, stop, _) in zip(self._rows, self._spots, strict=True):
            tensor = plan.parted.late[key]
            if key not in flats:
                flats[key] = flat_bytes(tensor)
            flat = flats[key]
            link = link_of(tensor, links)
            self._linked.append(link is not None)
            if flat is not None:
                self._moves.add(row[: stop - start], flat[start:stop], link)
        self._known = {key for key, flat in flats.items() if flat is not None}

    def are_of(self, plan: CapturePlan) -> bool:
        """Whether they are of these tensors, in these places."""
        return self._plan.parted.late is plan.parted.late and self._plan.slices is plan.slices

    def take(self) -> Taken | None:
        """The bytes as they are now, for `changed`: on a device, as of all that this thread has given it to do."""
        try:
            moves = self._moves.kept()
        except torch.OutOfMemoryError:
            return None
        return Taken(moves=moves, here=self._rows.clone())

    def changed(self, taken: Taken | None, data: memoryview) -> frozenset[str]:
        """The keys of tensors of which ``data``, a generation that is filled, holds other bytes than were ``taken``."""
        if taken is None:
            return frozenset()
        wait_all(taken.moves.make())
        # What came from a device did so just now; what lies here was taken at the cut, and another cut may be taken.
        come, here = self._rows.numpy(), taken.here.numpy()
        return frozenset(
            key
            for number, (key, start, stop, at) in enumerate(self._spots)
            if key in self._known
            and (come if self._linked[number] else here)[number, : stop - start].tobytes()
            != data[at : at + stop - start]
        )


def _spots(plan: CapturePlan) -> list[tuple[str, int, int, int]]:
    """Key, [start, stop) within the tensor and place within the data, of some slices' first and last late bytes."""
    slices = [late for one in plan.slices.slices if (late := [piece for piece in one if piece.key in plan.parted.late])]
    found = []
    for pieces in slices[:: -(-2 * len(slices) // _MOST) or 1]:
        first, last = pieces[0], pieces[-1]
        found.append((first.key, first.start, min(first.stop, first.start + _BYTES), first.at))
        start = max(last.start, last.stop - _BYTES)
        found.append((last.key, start, last.stop, last.at + start - last.start))
    return found
