"""The row selection behind the golden document of this folder.

``python -m tests.golden.selection.make`` writes it where it is missing. A document that is there is never written
again: it stands for what a released version left in users' runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lakeckpt.reading.filters.selection import EVERY, NONE, RowSelection

PATH = Path(__file__).parent / "selection-1.0.lkc"


def selection() -> RowSelection:
    """What was written."""
    return RowSelection(
        table="3dda028a9ccb2b40ad41948578ae8716",
        text='a > 3 and b in ["x", "日本"]',
        expression="d02c2b606852466ea9cac5938e066d71",
        pyarrow="26.0.1",
        group_rows=np.array([0, 5, 12, 2**31], np.int64),
        group_digests=np.array([NONE, EVERY, 0x0123456789ABCDEF, 2**63], np.uint64),
    )


if __name__ == "__main__":
    if not PATH.exists():
        PATH.write_bytes(selection().dumps())
        print(f"wrote {PATH}")
