"""How is something measured in a process of its own?  `told_by`: what it prints; where it fails, all that it said."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["ChildFailed", "told_by"]


class ChildFailed(Exception):
    """The process did not end well: the message says how it ended, and what it printed to its errors."""


def told_by(arguments: Sequence[str]) -> str:
    """What ``python ARGUMENTS`` prints. Where a signal ends it, its threads' stacks are part of what it says."""
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        how = f"with {ran.returncode}" if ran.returncode > 0 else f"by {signal.Signals(-ran.returncode).name}"
        said = ran.stderr.strip() or "nothing was said"
        raise ChildFailed(f"python {' '.join(arguments)} was ended {how}:\n{said}")
    return ran.stdout
