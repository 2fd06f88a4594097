"""A manager that was closed leaves nothing behind in its process: no thread, no descriptor, whatever it did before."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import CheckpointManager
from lakeckpt.errors import CheckpointMismatch
from tests.checkpoint.rig import Counter, MemoryStorage, train_step, training


def left_open() -> tuple[set[threading.Thread], set[str]]:
    """Threads of ours that live, and what descriptors are open on: files and sockets, by name."""
    names = set()
    for one in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{one}:{os.readlink(f'/proc/self/fd/{one}')}")
        except FileNotFoundError:  # that of the listing
            continue
    return {one for one in threading.enumerate() if one.name.startswith("lakeckpt")}, names


@pytest.mark.parametrize(
    ("options", "where"),
    [({}, "folder"), ({}, "object"), ({"capture_every": 1}, "folder")],
    ids=["direct-folder", "direct-object", "captured-folder"],
)
def test_a_closed_manager_leaves_no_thread_and_no_descriptor(
    options: dict[str, Any], where: str, tmp_path: Path
) -> None:
    before = left_open()
    for number in range(2):
        place = tmp_path / str(number) if where == "folder" else MemoryStorage()
        objects = training()
        # Each its own arenas: an agent may be about to remove those of the one before.
        arenas = (tmp_path / f"arenas {number}{one}" for one in "abc")
        with CheckpointManager(place, objects, persist_every=2, arenas=next(arenas), **options) as manager:
            manager.restore()
            for _ in range(3):
                train_step(objects)
                manager.step()
        refused = CheckpointManager(place, {"other": Counter()}, arenas=next(arenas), **options)
        with pytest.raises(CheckpointMismatch), refused:
            refused.restore()
        CheckpointManager(place, training(), arenas=next(arenas), **options).close()  # that never was used
        del manager, refused
    threads, names = left_open()
    assert threads <= before[0] and names <= before[1]  # what others left may end meanwhile
