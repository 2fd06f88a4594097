"""How much memory do a process and all that it started take?  The peak of their proportional set size (PSS).

PSS shares what several processes map among them, so that forked workers and shared memory count once. Sampled by a
thread of the watching process from ``/proc`` (Linux), in repetitions that are not the fastest's concern: reading it
stops the process for moments. The peak between two samples is not seen.
"""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["MemoryWatch", "descendants", "pss"]

INTERVAL_S = 0.2


def descendants(pid: int) -> list[int]:
    """``pid`` and every process below it, now."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended
            below.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(below.get(one, []))
    return found


def pss(pid: int) -> tuple[int, int]:
    """(bytes in all, bytes of them that are pages of files) of one process; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kilobytes.get("Pss", 0) << 10, kilobytes.get("Pss_File", 0) << 10


class MemoryWatch:
    """Watches a process tree from entering to leaving; then ``peak_bytes``, and ``peak_own_bytes`` without files."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self.peak_bytes = 0
        self.peak_own_bytes = 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            parts = [pss(pid) for pid in descendants(self._pid)]
            whole = sum(part[0] for part in parts)
            self.peak_bytes = max(self.peak_bytes, whole)
            self.peak_own_bytes = max(self.peak_own_bytes, whole - sum(part[1] for part in parts))
