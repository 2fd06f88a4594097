"""Why does reading a few kilobytes stop for a tenth of a second?  The garbage collector looks at everything, meanwhile.

A reader makes as many containers as a document has, none of which is garbage. Python's collector counts what is made,
and every so often looks through all that the process holds: beside torch, that takes longer than to read the document.
So it waits while one is read. What is garbage by then is found a moment later; memory stays in proportion to the
document, as it does anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_waits"]


@contextmanager
def collector_waits() -> Iterator[None]:
    """No cyclic garbage is collected while the block runs, on any thread. Where it was disabled before, it stays so."""
    if not gc.isenabled():  # by the user, or by another thread that reads: who disabled it enables it again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
