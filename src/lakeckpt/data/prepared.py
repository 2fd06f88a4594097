"""What does Hugging Face accelerate expect of a loader that `accelerator.prepare` was given?

Of any other DataLoader it makes one anew over its dataset, and deals the dataset's rows to the ranks: rows that a
`LakeDataset` has dealt already. A `LakeLoader` says that it is prepared, so accelerate takes it as it is. What
accelerate's own loaders would do besides is done here: put batches on the device, say when one is the last (so that
``accumulate`` steps there), and enter ``save_state`` with their state. They read a batch ahead for it, and this does
not: the loader knows its last step.

accelerate is never imported here: who prepares a loader has.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler

from lakeckpt.core.receipts import Receipt

__all__ = ["EpochSetter", "Prepared"]


class Prepared:
    """The names by which accelerate knows a loader of its own."""

    use_stateful_dataloader = True
    """``save_state`` and ``load_state`` of an accelerator are to have the loader's state."""
    end_of_dataloader = False
    """Whether the batch that the loop has is the last one of the epoch."""
    remainder = -1
    """Rows that the last batch has too many: none is ever repeated to fill it."""

    _is_prepared = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked by ``accelerator.prepare``, which may also set it. Others who look (an inspector, a debugger) learn
        what is, and change nothing."""
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        self._is_prepared = self._is_prepared or asks.partition(".")[0] == "accelerate"
        return self._is_prepared

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._is_prepared = prepared

    @property
    def last_receipt(self) -> Receipt | None:
        """The receipt of what the loop received last."""
        raise NotImplementedError

    def _as_prepared(self, items: Iterator[Any], steps: int | None) -> Iterator[Any]:
        """Deliver ``items`` as accelerate's loaders do; ``steps`` is how many the epoch has, None: it never ends."""
        state, operations = sys.modules["accelerate.state"], sys.modules["accelerate.utils.operations"]
        gradients, device = state.GradientState(), state.PartialState().device
        self.end_of_dataloader = False
        gradients._add_dataloader(self)
        try:
            for item in items:
                receipt = self.last_receipt
                assert receipt is not None
                is_last_of_step = receipt.row is None or receipt.row + 1 >= receipt.rows
                self.end_of_dataloader = is_last_of_step and receipt.step + 1 == steps
                yield operations.send_to_device(item, device)
        finally:
            gradients._remove_dataloader(self)


class EpochSetter(Sampler[None]):
    """The ``sampler`` of a `LakeLoader`: frameworks tell a loader its epoch by ``loader.sampler.set_epoch(epoch)``."""

    def __init__(self, set_epoch: Callable[[int], None]) -> None:
        self._set_epoch = weakref.WeakMethod(set_epoch)

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (EpochSetter, (self._set_epoch(),))

    def set_epoch(self, epoch: int) -> None:
        """See `LakeLoader.set_epoch`. An iterator of which nothing was asked yet goes on there."""
        if (told := self._set_epoch()) is not None:
            told(epoch)
