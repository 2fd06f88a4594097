"""What becomes of the output that its place cannot take?  Characters are escaped; a place that fails is let go of.

A terminal or a pipe may have an encoding without the characters of a name or of a table: they are written by their
numbers. Where writing fails (a full disk, a reader that has left), nothing more is written, at exit neither: Python
would report that with an exit status of its own. Never decides what is written.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["drop_output", "escaping", "holds_all_characters"]


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """While the body runs, what stdout and stderr cannot encode is escaped; without one of them, that is nowhere."""
    with contextlib.ExitStack() as undo:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # it was closed before this process began
                nowhere = undo.enter_context(open(os.devnull, "w"))
                undo.callback(setattr, sys, name, None)
                setattr(sys, name, nowhere)
            elif getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
                undo.callback(_strict, stream)
        yield


def _strict(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # it writes what is left first
        stream.reconfigure(errors="strict")


def holds_all_characters(stream: object) -> bool:
    """Whether a stream's encoding has all characters, as far as can be told."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-").startswith("utf-")


def drop_output() -> None:
    """Write nothing more to stdout, and drop what is still to be written there."""
    with contextlib.suppress(OSError, ValueError):  # it may be no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
