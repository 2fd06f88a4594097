"""May rows be missing, and how does a training script hear of it?  By a warning, once for each row group skipped."""

from __future__ import annotations

import warnings

from lakeckpt.core.receipts import Receipt
from lakeckpt.core.skips import SkipList
from lakeckpt.data.arguments import one_of
from lakeckpt.errors import ConfigError

__all__ = ["SkipWarning", "skips_bad_row_groups", "warn_of_skips"]


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


def skips_bad_row_groups(asked: object, batch_size: int | None) -> bool:
    """Return whether ``on_bad_row_group=asked`` is to skip; ConfigError where it cannot be."""
    one_of("on_bad_row_group", asked, ("raise", "skip"))
    if asked == "skip" and batch_size is None:
        raise ConfigError(
            'on_bad_row_group="skip" needs a batch_size: of single rows ranks would get different numbers, and no '
            "longer be in step"
        )
    return asked == "skip"
