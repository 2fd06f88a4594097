"""This module keeps what the launcher `lakeckpt run` knows of its attempts: which began, and how their ranks ended.

Each rank notes in the launcher's folder that its attempt began, and where its page lies. If an attempt fails, the
launcher notes the exit status of its ranks beside their pages, and when it has perceived the fault. The module starts
no threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.faults.causes import cause_of_status, killed_for_memory
from lakeckpt.checkpoint.faults.notes import leave_note, note_of
from lakeckpt.recovery.progress import LEAVES, STOPS
from lakeckpt.watch.beat import read_page

__all__ = ["ATTEMPTS_WITHOUT_BEGIN", "WARM_DEATHS", "Attempts"]

ATTEMPTS_WITHOUT_BEGIN = 3
"""After so many attempts that did not begin, no restart helps."""
WARM_DEATHS = 2
"""So many deaths in a row without progress are followed by a cold start."""


class Attempts:
    """What ranks noted in ``folder`` of the attempts of this launcher."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.ends = 0
        """The status with which the launcher ends, as a restore has found; 0: it goes on."""
        self._failed = self._deaths = 0
        self._furthest = -1

    def failed(self, number: int, failures: Mapping[int, Any] | None = None) -> None:
        """Note that attempt ``number`` failed. ``failures``: local rank → how its process failed, as torch says it."""
        (self._folder / f"{number}.perceived").write_text(repr(time.time()))
        begun = {int(one.suffix[1:]): one.read_text() for one in self._folder.glob(f"{number}.[0-9]*")}
        self._failed = 0 if begun else self._failed + 1
        pages = {rank: text.partition("\n")[2] for rank, text in begun.items()}
        steps = [int(text.partition("\n")[0]) for text in begun.values()]
        steps += [page.step for path in pages.values() if (page := read_page(path)) is not None]
        step = max(steps, default=-1)
        self._deaths = 1 if step > self._furthest else self._deaths + 1
        self._furthest = max(self._furthest, step)
        for rank, failure in (failures or {}).items():
            _note(pages.get(rank, ""), failure)
            if failure.exitcode in (STOPS, LEAVES):
                self.ends = int(failure.exitcode)

    @property
    def is_hopeless(self) -> bool:
        """True if no rank began in the last attempts."""
        return self._failed >= ATTEMPTS_WITHOUT_BEGIN

    @property
    def is_stuck(self) -> bool:
        """True if the last attempts died without progress beyond the attempts before."""
        return self._deaths >= WARM_DEATHS


def _note(path: str, failure: Any) -> None:
    """Leave a note of how a process failed, beside the page of its rank at ``path``, if there is one."""
    page, attempt = read_page(path), path.split(".")[-3:-2]
    if page is None or not attempt:
        return
    cause, what = cause_of_status(failure.exitcode, killed=killed_for_memory() - page.killed)
    text = "the launcher saw it end"
    if failure.exitcode > 0 and failure.error_file_data:  # of an exception, as torch's ``record`` writes it
        said = failure.error_file_data.get("message", "")
        what, _, text = str(said.get("message", "") if isinstance(said, dict) else said).partition(": ")
        cause = "exception"
    at_s = float(failure.timestamp or time.time())
    leave_note(path, note_of(page, int(attempt[0]), cause=cause, what=what, text=text, at_s=at_s))
