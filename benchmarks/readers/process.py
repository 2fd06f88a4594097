"""What does one measured process do?  One task, of five kinds.

======== =============================================================================================================
speed    read epoch after epoch for some seconds after the first batch
save     read part of an epoch, and save the state at some batches of it
resume   load a state, and read the rest of the epoch (or only its first batch)
flow     read packed sequences or a mixture for some seconds, and count tokens (`benchmarks.readers.streams.flow`)
tally    read an epoch of packed sequences, and count every token by its value
======== =============================================================================================================

A process of its own for each (`benchmarks.readers.starter`): nothing is warm but the page cache and the imports. What
it found goes to a JSON file; ids of rows go beside it. States pass between processes of one measurement only, as torch
files of plain types.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.readers.case import Case
from benchmarks.readers.counting import count
from benchmarks.readers.memory import pss
from benchmarks.readers.reader import Batch, NoState, Reader
from benchmarks.readers.registry import ENTRIES
from benchmarks.readers.streams.flow import flow, tally

__all__ = ["resume", "run", "save", "speed"]

Clock = Callable[[], float]


def speed(make: Callable[[], Reader], case: Case, seconds: float, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Read for ``seconds`` after the first batch, over the ends of epochs, and count every whole epoch.

    ``rows_per_s`` is of what came after the first batch, by the time that it took: also the starts of later epochs.
    """
    own_bytes = pss(os.getpid())[0]
    begin = clock()
    reader, first, now = make(), 0.0, 0.0
    rows = batches = first_rows = epochs = lost = repeated = 0
    while not first or now - first < seconds:
        ids = []
        for batch in reader.batches():
            now = clock()
            ids.append(_ids(batch))
            rows += len(ids[-1])
            batches += 1
            if not first:
                first, first_rows = now, rows
            elif now - first >= seconds:
                break
        else:
            now = clock()
            found = count(case.rows, ids)
            epochs, lost, repeated = epochs + 1, lost + found.lost, repeated + found.repeated
            if not ids:
                raise ValueError("an epoch without a batch")
            continue
        repeated += count(case.rows, ids).repeated
    return {
        "rows": rows,
        "batches": batches,
        "first_batch_s": first - begin,
        "seconds": now - first,
        "rows_per_s": (rows - first_rows) / (now - first),
        "whole_epochs": epochs,
        "lost_in_whole_epochs": lost,
        "repeated": repeated,
        "start_bytes": own_bytes,
    }


def _ids(batch: Batch) -> np.ndarray[Any, Any]:
    """The ids of a batch's rows; packed sequences have none."""
    found: Any = batch.get("row")
    return np.empty(0, np.int64) if found is None else found.numpy().copy()


def save(
    make: Callable[[], Reader], at: dict[str, int], keep: Callable[[str, Any], None]
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Read up to the last of the places ``at`` (name to batches), and ``keep`` the state at each; then stop, as a job
    that is killed does. Return the sizes of the states, and the ids consumed, batch after batch."""
    reader, ids, sizes = make(), [], {}
    done = 0
    places: dict[int, list[str]] = {}
    for name, batches in at.items():
        places.setdefault(batches, []).append(name)
    for batch in reader.batches():
        ids.append(_ids(batch))
        done += 1
        for name in places.pop(done, ()):
            state = reader.state()
            keep(name, state)
            sizes[name] = {"bytes": len(pickle.dumps(state)), "rows": sum(map(len, ids))}
        if not places:
            break
    if places:
        raise ValueError(f"the epoch had {done} batches, fewer than {min(places)}")
    return {"states": sizes}, np.concatenate(ids)


def resume(
    make: Callable[[], Reader], state: Any, *, whole: bool, clock: Clock = time.perf_counter
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Load ``state`` (None: begin an epoch), and read the rest, or where not ``whole`` its first batch."""
    begin = clock()
    reader, ids, first = make(), [], 0.0
    if state is not None:
        reader.load(state)
    for batch in reader.batches():
        first = first or clock()
        ids.append(_ids(batch))
        if not whole:
            break
    return {"first_batch_s": first - begin}, np.concatenate([np.empty(0, np.int64), *ids])


def _join_ranks(case: Case) -> None:
    """Make the process a rank of a job, where there are several; the runner set what torchrun would have set."""
    if case.world_size > 1:
        torch.distributed.init_process_group("gloo", rank=case.rank, world_size=case.world_size)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _do(task: dict[str, Any], case: Case, out: Path) -> dict[str, Any]:
    kind = ENTRIES[case.reader].load()
    for module in kind.modules:
        importlib.import_module(module)
    kind.prepare(case)
    if task["do"] == "prepare":
        return {}
    _join_ranks(case)
    if task["do"] == "speed":
        return speed(lambda: kind(case), case, task["seconds"])
    if task["do"] == "flow":
        return flow(lambda: kind(case), task["seconds"], at_least=task["at_least"])  # type: ignore[arg-type, return-value]
    if task["do"] == "tally":
        return tally(lambda: kind(case), case)  # type: ignore[arg-type, return-value]
    if task["do"] == "save":
        folder = Path(task["states"])
        found, ids = save(lambda: kind(case), task["at"], lambda name, state: torch.save(state, folder / name))
    else:
        state = None if task["state"] is None else _load(Path(task["state"]))
        found, ids = resume(lambda: kind(case), state, whole=task["whole"])
    np.save(out.with_suffix(".npy"), ids)
    return found


def run(task: dict[str, Any], case: Case, out: Path) -> None:
    """Do ``task``, and write what it came to, or why it failed, to ``out``."""
    torch.set_num_threads(1)  # of tensor arithmetic, of which there is none: readers' own threads are theirs
    try:
        found = {"ok": True, **_do(task, case, out)}
    except NoState as error:
        found = {"ok": False, "why": str(error)}
    except BaseException as error:
        traceback.print_exc()
        found = {"ok": False, "why": f"{type(error).__name__}: {error}"}
    out.write_text(json.dumps(found))
