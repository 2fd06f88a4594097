"""How long does ``manager.step`` take if each request to the store takes seconds?  ``python -m benchmarks.slow_store``

A job with a tracked reader captures every step and saves every ten. The store of the run, a local folder, answers each
request after ``--request-s``, in the trainer and in its agent. The table shows the percentiles of ``manager.step``
behind the first cut, how many requests the training thread made meanwhile (none is to be made), and how many
checkpoints the agent committed. Exit status 1: the 95th percentile is above ``--most-ms``, or there were requests.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.measure import show
from lakeckpt import CheckpointManager, LakeDataset, LakeLoader
from lakeckpt.lake.storage.local import LocalStorage

_METHODS = ("list", "read", "put", "put_new", "delete", "delete_all")
_SLOW_AGENT = """
import time
from lakeckpt.lake.storage.local import LocalStorage
def slow(call):
    def later(*args, **options):
        time.sleep({request_s})
        return call(*args, **options)
    return later
for name in {methods}:
    if hasattr(LocalStorage, name):
        setattr(LocalStorage, name, slow(getattr(LocalStorage, name)))
"""


class Requests:
    """Makes the requests of this process slow from `begin` on, and counts those of the thread that made it."""

    def __init__(self, request_s: float) -> None:
        self._request_s, self._thread = request_s, threading.get_ident()
        self.of_thread = 0

    def begin(self) -> None:
        """Make each request slow."""
        for name in _METHODS:
            if hasattr(LocalStorage, name):
                setattr(LocalStorage, name, self._slow(getattr(LocalStorage, name)))

    def _slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def later(*args: Any, **options: Any) -> Any:
            self.of_thread += threading.get_ident() == self._thread
            time.sleep(self._request_s)
            return call(*args, **options)

        return later


def steps_s(folder: Path, *, request_s: float, seconds: float) -> tuple[list[float], int, int]:
    """Return how long each `step` took, the requests of the training thread, and how many commits there were."""
    pq.write_table(pa.table({"x": pa.array(range(10**6), pa.int64())}), folder / "table.parquet")
    (folder / "agent").mkdir()
    (folder / "agent" / "sitecustomize.py").write_text(_SLOW_AGENT.format(request_s=request_s, methods=_METHODS))
    loader = LakeLoader(LakeDataset(str(folder / "table.parquet"), batch_size=4, rank=0, world_size=1))
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(32)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    committed: list[int] = []
    sys.path.insert(0, str(folder / "agent"))  # the agent imports what this process imports
    manager = CheckpointManager(
        str(folder / "run"),
        state,
        capture_every=1,
        persist_every=10,
        arenas=str(folder / "arenas"),
        on_save=lambda info: committed.append(info.step),
    )
    requests, found = Requests(request_s), []
    manager.restore()
    requests.begin()
    until_s = time.perf_counter() + seconds
    for number, batch in enumerate(loader):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        time.sleep(0.02)  # forward and backward, in which the copy moves
        begin_s = time.perf_counter()
        manager.step(batch)
        if number:  # the first cut makes the arena
            found.append(time.perf_counter() - begin_s)
        if time.perf_counter() > until_s:
            break
    manager.close()
    return found, requests.of_thread, len(committed)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request-s", type=float, default=3.0, help="what a request takes")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the job trains")
    parser.add_argument("--most-ms", type=float, default=5.0, help="what the 95th percentile may be")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        found, requests, commits = steps_s(Path(name), request_s=asked.request_s, seconds=asked.seconds)
    cuts = statistics.quantiles(found, n=100, method="inclusive")
    show(
        f"manager.step(), with {asked.request_s:g} s for each request",
        ["steps", "median, ms", "95th percentile, ms", "longest, ms", "requests of the thread", "commits"],
        [
            [
                str(len(found)),
                *(f"{1e3 * one:.2f}" for one in (cuts[49], cuts[94], max(found))),
                str(requests),
                str(commits),
            ]
        ],
    )
    return int(1e3 * cuts[94] > asked.most_ms or requests > 0)


if __name__ == "__main__":
    sys.exit(main())
