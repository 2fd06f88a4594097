"""How does a training script hear that rows are missing?  By a warning: once for each row group that is skipped."""

from __future__ import annotations

import warnings

from lakeckpt.core.receipts import Receipt
from lakeckpt.core.skips import SkipList

__all__ = ["SkipWarning", "warn_of_skips"]


class SkipWarning(UserWarning):
    """A row group cannot be read, and training goes on without its rows (``on_bad_row_group="skip"``)."""


def warn_of_skips(receipt: Receipt, known: SkipList) -> None:
    """Warn of the row groups skipped in ``receipt`` that are not ``known`` yet."""
    for skip in receipt.skips:
        if skip.group not in known:
            warnings.warn(
                f"epoch {skip.group.epoch}, step {receipt.step} of rank {receipt.rank}: row group "
                f"{skip.group.row_group} of {skip.group.file!r} is skipped, {skip.rows} rows of this micro-batch and "
                f"what follows of it. {skip.group.reason}",
                SkipWarning,
                stacklevel=4,
            )
