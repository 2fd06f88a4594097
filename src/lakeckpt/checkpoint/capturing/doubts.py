"""What changes though nobody says so?  What captures that were given up have taught, and what is done about it.

A tensor that changed under two captures running is taken at the cut from then on, and so is one that seemed to be still
and was not. Where only witnesses saw a change, nobody knows what else was changed: then all is.

Called by the copier, and `Doubts.moved` by its helpers; what it says is read by the training thread.
"""

from __future__ import annotations

import threading

__all__ = ["Doubts"]


class Doubts:
    """``moving``: the keys of what is taken at the cut. ``everything``: that all is."""

    def __init__(self) -> None:
        self.moving: frozenset[str] = frozenset()
        self.everything = False
        self._suspected: frozenset[str] = frozenset()  # by the last capture
        self._lock = threading.Lock()

    def moved(self, key: str) -> None:
        """What seemed still has changed since the last capture."""
        with self._lock:
            self.moving |= {key}

    def intact(self) -> None:
        """Nothing changed under a capture."""
        self._suspected = frozenset()

    def changed(self, step: int, *, counted: frozenset[str], witnessed: frozenset[str]) -> str:
        """These changed under the capture of ``step``, as torch counts it or as witnesses saw: what to warn of."""
        changed = counted | witnessed
        again, self._suspected = changed & self._suspected, changed
        with self._lock:
            self.moving |= again & counted
        self.everything |= bool(again & witnessed)
        which = f", {min(changed)!r} among them" if changed else ""
        rest = "Call fence() before changing parameters otherwise"
        if again:
            rest = f"From now on {'all' if self.everything else len(again)} of them are copied while training waits"
        return (
            f"the capture of step {step} was given up: tensors were changed after the cut{which}, and neither an "
            f"optimizer's step nor load_state_dict said so. {rest}"
        )
