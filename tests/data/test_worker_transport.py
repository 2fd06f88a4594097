"""What a worker delivers is the loop's as long as it looks; workers are what users know, and leave nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from lakeckpt import Batch
from lakeckpt.errors import StateUnavailable, WorkerDied, WorkerTimeout
from tests.data.reading import ROWS, flat, ids, loader_of, same, some, until_error
from tests.lakes import LakeSpec
from tests.patience import PATIENCE_S

Pair = namedtuple("Pair", ["left", "right"])


# --- loaders


def test_batches_that_the_loop_keeps_never_change(lake: Path) -> None:
    loader = loader_of(lake, num_workers=2, num_lanes=4, batch_size=2, loader={"persistent_workers": True})
    kept, copies = [], []
    for _ in range(3):
        for batch in loader:
            assert isinstance(batch, Batch)
            batch["id"] += 1000  # they are writable
            kept.append(batch)
            copies.append({"id": batch["id"].clone(), "string": batch["string"]})
    assert sorted(row - 1000 for batch in kept for row in batch["id"].tolist()) == sorted([*range(ROWS)] * 3)
    del loader, batch
    gc.collect()
    assert all(torch.equal(batch["id"], copy["id"]) for batch, copy in zip(kept, copies, strict=True))
    assert all(batch["string"] == copy["string"] for batch, copy in zip(kept, copies, strict=True))


def big(batch: Batch) -> dict[str, Any]:
    return {"id": batch["id"], "image": torch.full((1 << 16,), int(batch["id"][0]))}


BIG = (1 << 16) * 8


def memories() -> list[int]:
    """The bytes of each slot memory that this process has looked at, or looks at still."""
    found: list[int] = []
    of_slots = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            of_slots = "lakeckpt-slots" in line
        elif of_slots and line.startswith("Rss:"):
            found.append(int(line.split()[1]) * 1024)
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux what is mapped")
def test_slots_are_used_again_and_more_are_taken_for_what_is_kept(tmp_path: Path) -> None:
    folder = LakeSpec(files=((200,),)).write(tmp_path / "lake")
    loader = loader_of(folder, batch_size=2, num_workers=1, transform=big, loader={"prefetch_factor": 2})
    most, kept = 0, []
    for number, batch in enumerate(loader):
        assert (batch["image"] == batch["id"][0]).all()
        if number % 20 == 19:
            most = max(most, *memories())
    assert most <= 8 * BIG, "of 100 micro-batches"
    del batch
    for batch in loader:
        kept.append(batch)
    assert all((batch["image"] == batch["id"][0]).all() for batch in kept)
    assert sum(memories()) >= 100 * BIG
    del kept, batch
    gc.collect()
    assert memories() == []


def grows(batch: Batch) -> dict[str, Any]:
    first = int(batch["id"][0])
    return {"id": batch["id"], "image": torch.zeros(1 if first < 200 else 1 << 18, dtype=torch.int64)}


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux what is mapped")
def test_what_the_loop_kept_for_a_while_is_given_back_to_the_system(tmp_path: Path) -> None:
    folder = LakeSpec(files=((420,),)).write(tmp_path / "lake")
    loader = loader_of(folder, batch_size=1, shuffle=False, num_workers=1, transform=grows)
    iterator, kept = iter(loader), []
    for batch in iterator:
        assert not batch["image"].any()
        if 240 <= batch["id"] < 300:
            kept.append(batch)
        if batch["id"] == 300:
            kept.clear()
        if batch["id"] == 400:
            break
    assert file_bytes(batch) <= 112 << 20, "64 MiB of spare slots, 48 in flight, and not the 120 that were kept"
    del iterator


def test_groups_in_flight_keep_within_the_memory_limit(tmp_path: Path) -> None:
    folder = LakeSpec(files=((600,),)).write(tmp_path / "lake")
    most = {}
    for limit in (None, 6 * BIG):
        loader = loader_of(folder, batch_size=2, transform=big, memory_limit_bytes=limit, num_workers=1)
        iterator = iter(loader)
        last = deque(itertools.islice(iterator, 150), maxlen=1).pop()
        until_settled(functools.partial(file_bytes, last))
        most[limit] = file_bytes(last)
        del iterator, last
    assert most[6 * BIG] <= 10 * BIG, "a group of each may end one micro-batch beyond its share"
    assert 1 << 24 <= most[None] <= 1.125 * (3 * (1 << 24) + 4 * BIG), "slots are an eighth larger at most"


def file_bytes(batch: Any) -> int:
    """The memory of the worker that ``batch`` is of, whatever process wrote to it."""
    address = batch["image"].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(one, 16) for one in line.split()[0].split("-"))
        if low <= address < high:
            inode = int(line.split()[4])
            break
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(descriptor))
            if about.st_ino == inode and "lakeckpt-slots" in os.readlink(f"/proc/self/fd/{descriptor}"):
                return about.st_blocks * 512
    raise AssertionError("no slot memory")


def until_settled(asked: Callable[[], int]) -> None:
    """Wait until what is asked does not change any more."""
    before, until = -1, time.monotonic() + PATIENCE_S
    while (found := asked()) != before and time.monotonic() < until:
        before = found
        time.sleep(0.5)


def odd(batch: Batch) -> Any:
    first = int(batch["id"][0])
    return [{"n": first}, Pair({first}, batch["id"].numpy()), f"row {first}", None][first % 4]


@pytest.mark.parametrize("output", ["torch", "numpy", "arrow"])
def test_every_output_comes_from_workers_as_from_none(lake: Path, output: str) -> None:
    for options in ({}, {"nulls": "mask"}, {"batch_size": None}):
        alone = list(loader_of(lake, output=output, num_lanes=2, **options))
        assert all(map(same, alone, loader_of(lake, output=output, num_lanes=2, num_workers=1, **options)))


def test_odd_results_of_a_transform_come_as_they_are(lake: Path) -> None:
    alone = list(loader_of(lake, batch_size=1, transform=odd))
    assert all(map(same, alone, loader_of(lake, batch_size=1, transform=odd, num_workers=1)))


def unpicklable(batch: Batch) -> Any:
    return {"f": lambda: batch}


class OwnError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("no message of its own")


def raises_own(batch: Batch) -> Any:
    class Local(OwnError):
        pass

    raise Local(1, 2)


@pytest.mark.parametrize(("transform", "says"), [(unpicklable, "pickle"), (raises_own, "Local")])
def test_what_cannot_be_pickled_is_an_error_with_its_traceback(lake: Path, transform: Any, says: str) -> None:
    found, error = until_error(loader_of(lake, transform=transform, num_workers=1))
    assert found == [] and says in str(error) and "DataLoader worker process 0" in str(error)


def tells_its_worker(batch: Batch) -> dict[str, Any]:
    worker = get_worker_info()
    assert worker is not None and type(worker.dataset).__name__ == "LakeDataset"
    draws = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    return {"worker": (worker.id, worker.num_workers, worker.seed), "draws": draws, "threads": torch.get_num_threads()}


def remembers(worker: int) -> None:
    os.environ["TOLD"] = str(worker)


def reads_it(batch: Batch) -> str:
    return os.environ["TOLD"]


def fails(worker: int) -> None:
    raise KeyError(f"worker {worker} cannot begin")


def test_workers_are_what_users_of_torch_know(lake: Path) -> None:
    loader = loader_of(lake, num_workers=2, num_lanes=2, transform=tells_its_worker)
    told, again = list(loader), list(loader_of(lake, num_workers=2, num_lanes=2, transform=tells_its_worker))
    assert told == again, "seeds follow from the place alone"
    assert {one["worker"][:2] for one in told} == {(0, 2), (1, 2)} and {one["threads"] for one in told} == {1}
    assert len({one["worker"][2] for one in told}) == 2 and len({one["draws"] for one in told}) == len(told)
    options = {"worker_init_fn": remembers}
    assert set(loader_of(lake, num_workers=2, num_lanes=2, transform=reads_it, loader=options)) == {"0", "1"}
    _, error = until_error(loader_of(lake, num_workers=1, loader={"worker_init_fn": fails}))
    assert isinstance(error, KeyError) and "worker 0 cannot begin" in str(error)


PIN_THREAD = "_pin_memory_loop"


def pinning(expected: int = 0) -> int:
    """How many threads pin, once they are as many as ``expected``."""
    until = time.monotonic() + PATIENCE_S
    while (found := sum(PIN_THREAD in thread.name for thread in threading.enumerate())) != expected:
        if time.monotonic() > until:
            break
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_threads_pin_and_free_slots_at_once(lake: Path, accelerator: None, persistent: bool) -> None:
    options = {"pin_memory": True, "persistent_workers": persistent}
    loader = loader_of(lake, num_workers=2, num_lanes=4, columns=["id", "string"], loader=options)
    expected = ids(loader_of(lake, num_lanes=4, columns=["id"]))
    started = iter(loader)
    kept = [next(started)]
    assert pinning(2) == 2, "one for each worker"
    kept += list(started)
    del started
    assert ids(kept) == expected and kept[0]["string"]
    assert kept[0]["id"].untyped_storage().nbytes() > kept[0]["id"].nbytes, "a view of one pinned slab"
    lasting = 2 * persistent  # torch's threads live as long as its workers
    assert pinning(lasting) == lasting
    first = some(loader, 3)
    assert sorted(flat(first) + flat(loader)) == list(range(ROWS))
    older = iter(loader)
    before = [next(older)]
    assert sorted(flat(before) + flat(loader)) == list(range(ROWS)), "a newer iterator goes on with the workers"
    del older, loader
    gc.collect()
    assert pinning() == 0


def test_what_goes_wrong_beside_the_loop_is_raised_in_its_place(lake: Path, accelerator: None) -> None:
    for transform, kind in ((dies_at_20, WorkerDied), (odd_error, KeyError)):
        loader = loader_of(
            lake, shuffle=False, num_lanes=1, num_workers=1, transform=transform, loader={"pin_memory": True}
        )
        found, error = until_error(loader)
        # What a worker that is killed had not sent yet is read again by others.
        assert isinstance(error, kind) and len(found) <= 5 and (len(found) == 5 or kind is WorkerDied)
        assert flat(found) == list(range(4 * len(found))) and loader.state_dict()["step"] == len(found)
        assert pinning() == 0


def odd_error(batch: Batch) -> Batch:
    if (batch["id"] == 20).any():
        raise KeyError("twenty")
    return batch


# --- death


def dies_at_20(batch: Batch) -> Batch:
    if (batch["id"] == 20).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def dies_of_40_at_20(batch: Batch) -> Batch:
    if (batch["id"] == 20).any():
        os.kill(os.getpid(), 40)  # one that has no name
    return batch


def exits_at_20(batch: Batch) -> Batch:
    if (batch["id"] == 20).any():
        sys.exit(3)
    return batch


@pytest.mark.parametrize(
    ("transform", "how", "persistent"),
    [
        (dies_at_20, "SIGKILL", False),
        pytest.param(dies_of_40_at_20, "signal 40", True, marks=pytest.mark.soak),
        pytest.param(exits_at_20, "exit code 3", True, marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_dies_is_named_and_nothing_is_lost(
    lake: Path, transform: Any, how: str, persistent: bool
) -> None:
    options = {"persistent_workers": persistent}
    loader = loader_of(lake, shuffle=False, num_lanes=2, num_workers=2, transform=transform, loader=options)
    before = set(multiprocessing.active_children())
    found, error = until_error(loader)
    assert isinstance(error, WorkerDied) and how in str(error) and error.worker in (0, 1)
    assert f"worker {error.worker} (process " in str(error) and error.exit_code
    assert pickle.loads(pickle.dumps(error)).exit_code == error.exit_code
    assert loader.state_dict()["step"] == len(found)
    rest, again = until_error(loader)
    found += rest
    assert isinstance(again, WorkerDied) and loader.state_dict()["step"] == len(found)
    assert set(multiprocessing.active_children()) <= before
    resumed = loader_of(lake, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert sorted(flat(found) + flat(resumed)) == list(range(ROWS))


def waits(batch: Batch) -> Batch:
    threading.Event().wait()
    return batch


def test_no_answer_within_the_timeout_is_an_error_that_says_what_was_due(lake: Path) -> None:
    loader = loader_of(lake, num_workers=1, transform=waits, loader={"timeout": 0.2})
    _, error = until_error(loader)
    assert isinstance(error, WorkerTimeout) and "step 0" in str(error) and isinstance(error, TimeoutError)


def a_fifth_of_a_second(batch: Batch) -> Batch:
    threading.Event().wait(0.2)
    return batch


def test_a_slow_transform_is_not_taken_for_one_that_waits_for_ever(lake: Path) -> None:
    loader = loader_of(lake, num_workers=1, transform=a_fifth_of_a_second, loader={"timeout": 60})
    began = time.monotonic()
    assert time.monotonic() - began < 60 and sorted(flat(loader)) == list(range(ROWS))


def test_an_iterator_that_is_let_go_of_takes_its_workers_with_it(lake: Path) -> None:
    before = set(multiprocessing.active_children())
    loader = loader_of(lake, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert len(set(multiprocessing.active_children()) - before) == 2
    del iterator
    assert set(multiprocessing.active_children()) <= before
    begun = iter(loader)
    del begun
    assert set(multiprocessing.active_children()) <= before
    lasting = loader_of(lake, num_workers=1, loader={"persistent_workers": True})
    kept = some(lasting, 2)
    assert len(set(multiprocessing.active_children()) - before) == 1
    del lasting
    gc.collect()
    assert set(multiprocessing.active_children()) <= before and len(ids(kept)) == 2


def ends_well(work: Callable[[], bool]) -> bool:
    """Whether ``work`` is true in a process that is forked now."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_a_fork_of_the_main_process_takes_nothing_from_its_workers(lake: Path, persistent: bool) -> None:
    options = {"persistent_workers": persistent, "multiprocessing_context": "fork"}
    loader = loader_of(lake, num_workers=1, loader=options)
    iterator = iter(loader)
    found = [next(iterator)]

    def goes_on() -> bool:
        with pytest.raises(StateUnavailable, match="this one was forked from"):
            next(iterator)
        return True

    assert ends_well(goes_on)
    assert ends_well(lambda: len(flat(loader)) == ROWS - len(found[0]["id"])), "with workers of its own"
    assert sorted(flat([*found, *iterator])) == list(range(ROWS))
    loader._reader.start()
    assert ends_well(lambda: len(flat(loader)) == ROWS)
    assert sorted(flat(loader)) == list(range(ROWS))


def ends(pid: int) -> bool:
    """Whether a process that is no child of this one ends, or has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(60_000))
    finally:
        os.close(process)


MAIN = """
import json, multiprocessing, os, signal, sys
from lakeckpt import LakeDataset, LakeLoader, ReadOptions

def main():
    dataset = LakeDataset(sys.argv[1], batch_size=2, options=ReadOptions(num_lanes=2))
    loader = LakeLoader(dataset, num_workers=2, multiprocessing_context=sys.argv[2])
    kept = [batch for batch, _ in zip(loader, range(3))] if sys.argv[3] == "exits" else None
    iterator = iter(loader)
    next(iterator)
    pids = [process.pid for process in multiprocessing.active_children()]
    named = [line for pid in [os.getpid(), *pids] for line in open(f"/proc/{pid}/maps") if is_named(line)]
    print(json.dumps({"pids": pids, "named": named}), flush=True)
    if sys.argv[3] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)

def is_named(line):
    return "/dev/shm" in line and "(deleted)" not in line and "/sem." not in line

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="asks Linux which processes there are")
@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("fork", "is killed"),
        *(pytest.param(method, "is killed", marks=pytest.mark.soak) for method in ("spawn", "forkserver")),
        *(pytest.param(method, "exits", marks=pytest.mark.soak) for method in ("fork", "spawn", "forkserver")),
    ],
)
def test_no_process_and_no_memory_outlives_the_main_process(lake: Path, tmp_path: Path, method: str, how: str) -> None:
    script = tmp_path / "main.py"
    script.write_text(MAIN)
    ran = subprocess.run([sys.executable, script, lake, method, how], capture_output=True, timeout=280)
    assert ran.returncode == (-signal.SIGKILL if how == "is killed" else 0), ran.stderr.decode()
    told = json.loads(ran.stdout)
    assert len(told["pids"]) == 2 and told["named"] == []
    # Python's own tracker frees the semaphores of torch's queues behind a process that was killed, and prints that.
    ours = [line for line in ran.stderr.decode().splitlines() if "resource_tracker" not in line]
    assert ours == [], ran.stderr.decode()
    assert all(map(ends, told["pids"]))


def alternates(batch: Batch) -> dict[str, Any]:
    first = int(batch["id"][0])
    return {f"row {first}": batch["id"]} if first % 2 else {"id": batch["id"]}


def test_micro_batches_of_many_forms_come_as_they_are(tmp_path: Path) -> None:
    folder = LakeSpec(files=((256,),)).write(tmp_path / "lake")
    alone = list(loader_of(folder, batch_size=1, shuffle=False, transform=alternates))
    loader = loader_of(folder, batch_size=1, shuffle=False, transform=alternates, num_workers=1)
    assert all(map(same, alone, loader))


def test_groups_that_nobody_wanted_give_their_slots_back(tmp_path: Path) -> None:
    folder = LakeSpec(files=((200,),)).write(tmp_path / "lake")
    loader = loader_of(folder, batch_size=2, num_workers=1, transform=big, loader={"persistent_workers": True})
    for _ in range(6):
        iterator = iter(loader)
        last = deque(itertools.islice(iterator, 40), maxlen=1).pop()
        loader.rewind()
    until_settled(functools.partial(file_bytes, last))
    assert file_bytes(last) <= 1.125 * (3 * (1 << 24) + 8 * BIG), "as much as one iteration has in flight"


@pytest.mark.parametrize("pins", [False, True])
def test_an_iterator_says_that_start_gave_its_workers_to_the_next_one(
    lake: Path, accelerator: None, pins: bool
) -> None:
    loader = loader_of(lake, num_workers=1, loader={"persistent_workers": True, "pin_memory": pins})
    iterator = iter(loader)
    found = [next(iterator)]
    loader._reader.start()
    with pytest.raises(StateUnavailable, match="iterate again"):
        next(iterator)
    assert sorted(flat([*found, *loader])) == list(range(ROWS))


@pytest.mark.parametrize(("num_lanes", "num_workers"), [(1, 2), (4, 3), (5, 4)])
def test_workers_that_own_more_lanes_than_others_do_not_change_the_order(
    tmp_path: Path, num_lanes: int, num_workers: int
) -> None:
    folder = LakeSpec(files=((2000,), (1500,))).write(tmp_path / "lake")
    for options in ({}, {"drop_last": True, "rank": 1, "world_size": 2}):
        lanes = num_lanes * options.get("world_size", 1)
        alone = ids(loader_of(folder, batch_size=3, num_lanes=lanes, **options))
        assert ids(loader_of(folder, batch_size=3, num_lanes=lanes, num_workers=num_workers, **options)) == alone
