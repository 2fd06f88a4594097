"""How is what the caller's own iterable of chunks raises told apart from what the store raises?

`guarded` wraps it on its way out of our handlers, `unwrapping` gives it back as it was. `take_up_to` looks whether the
chunks are few enough for a single request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from lakeckpt.lake.storage import Buffer

__all__ = ["CallersError", "guarded", "take_up_to", "unwrapping"]


class CallersError(Exception):
    """Holds the exception that the caller's iterable raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def guarded(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """The chunks as bytes-like views; an exception of the iterable comes as `CallersError`."""
    try:
        for chunk in chunks:
            yield memoryview(chunk).cast("B")
    except Exception as error:
        raise CallersError(error) from error


@contextlib.contextmanager
def unwrapping() -> Iterator[None]:
    """Raise the caller's exception itself, with its own cause and context, where `guarded` had wrapped it."""
    error: Exception | None = None
    try:
        yield
    except CallersError as failure:
        error = failure.error
    if error is not None:
        raise error


def take_up_to(chunks: Iterator[memoryview], limit: int) -> tuple[list[bytes], Iterator[memoryview] | None, int]:
    """Copies of the first chunks, up to ``limit`` bytes and one; the rest, or None if that was all; bytes so far."""
    head: list[bytes] = []
    size = 0
    for chunk in chunks:
        head.append(bytes(chunk))
        size += len(head[-1])
        if size > limit:
            return head, chunks, size
    return head, None, size
