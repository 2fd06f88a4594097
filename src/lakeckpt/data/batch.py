"""What does the training loop get?  A dict of columns that knows its receipt."""

from __future__ import annotations

from typing import Any

from lakeckpt.core.receipts import Receipt

__all__ = ["Batch"]


class Batch(dict[str, Any]):
    """A micro-batch: column name to tensor (or array), with the ``receipt`` of its rows.

    Being a dict, it goes through torch's collate, pinning and device-moving helpers. In row-wise use it is one row.
    """

    receipt: Receipt

    def __init__(self, columns: dict[str, Any], receipt: Receipt) -> None:
        super().__init__(columns)
        self.receipt = receipt

    def __reduce__(self) -> tuple[Any, ...]:
        return (Batch, (dict(self), self.receipt))
