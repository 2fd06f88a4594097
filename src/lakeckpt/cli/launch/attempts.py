"""This module keeps what the launcher `lakeckpt run` knows of its attempts: which began, and how their ranks ended.

Each rank notes in the launcher's folder where its page will lie, and then that its attempt began. If an attempt fails,
the launcher notes the exit status of its ranks beside their pages, and when it has perceived the fault. A rank that was
killed before it made its page gets a note, too, if another rank of this node has a page: else the next attempt would
take it for a rank of a lost node. The module starts no threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.faults.causes import cause_of_status, killed_for_memory
from lakeckpt.checkpoint.faults.notes import attempt_of, leave_note, note_of, page_beside
from lakeckpt.recovery.progress import LEAVES, STOPS
from lakeckpt.watch.beat import Page, read_page

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
        noted = [one.read_text() for one in self._folder.glob(f"{number}.[0-9]*")]
        begun = [int(step) for step in noted if step]  # empty: the rank was killed before it had written it
        self._failed = 0 if begun else self._failed + 1
        paths = {int(one.suffix[1:]): one.read_text() for one in self._folder.glob(f"{number}.page.*")}
        steps = [page.step for path in paths.values() if (page := read_page(path)) is not None]
        step = max((*begun, *steps), default=-1)
        self._deaths = 1 if step > self._furthest else self._deaths + 1
        self._furthest = max(self._furthest, step)
        for rank, failure in (failures or {}).items():
            _note(rank, paths, failure)
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


def _note(local_rank: int, paths: Mapping[int, str], failure: Any) -> None:
    """Leave a note of how the process of ``local_rank`` failed, beside its page. ``paths``: local rank → where the page
    of a rank of this node lies, or would."""
    found = _page_of(local_rank, paths)
    if found is None:
        return
    path, page, text = found
    cause, what = cause_of_status(failure.exitcode, killed=killed_for_memory() - page.killed)
    if failure.exitcode > 0 and failure.error_file_data:  # of an exception, as torch's ``record`` writes it
        said = failure.error_file_data.get("message", "")
        what, _, text = str(said.get("message", "") if isinstance(said, dict) else said).partition(": ")
        cause = "exception"
    leave_note(
        path, note_of(page, attempt_of(path), cause=cause, what=what, text=text)
    )  # torch's own time is whole seconds


def _page_of(local_rank: int, paths: Mapping[int, str]) -> tuple[str, Page, str] | None:
    """Return the page of a rank, its path, and what the launcher saw. If it has none, the page that it would have begun
    with, made from that of another rank of this node; None if no rank has one."""
    path = paths.get(local_rank, "")
    if (page := read_page(path)) is not None:
        return path, page, "the launcher saw it end"
    for other, its in paths.items():
        if (mate := read_page(its)) is not None:
            rank = mate.rank + local_rank - other  # ranks of a node are consecutive
            page = replace(mate, rank=rank, phase="start", reader="", step=mate.begun, batches=0, used=0, rows=0)
            return page_beside(its, rank), page, "the launcher saw it end before it had made its page"
    return None
