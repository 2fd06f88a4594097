"""Does a trainer end as it would without the flight recorder?  ``python -m benchmarks.exits [--times N] [--json FILE]``

A trainer that serves torch's flight recorder to its agent has some more threads of C++. It does steps of DDP on gloo,
and ends in eight ways, with the recorder and without. Counted are the exit codes; a trainer that has not ended, and
has used no processor time for half a minute, counts as "hangs", and its stacks are printed if py-spy is on the path.
``--minutes``: begin no round later than that. Exit status 1: the codes are not the same.

Trainers are forked from processes that have imported torch, and end as any script does: with the interpreter's own end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from lakeckpt.watch.facts import look_at_process

WAYS = {
    "plain end": "0",
    "sys.exit(7)": "7",
    "exception": "1",
    "os._exit(3)": "3",
    "SIGTERM": "-15",
    "SIGKILL": "-9",
    "exception of a thread": "0",
    "exception of another rank": "1 1",
}
"""How a trainer ends, and the exit codes of its ranks."""
_HANGS_S = 30.0
_WARM, _STACKS = "--warm", ".stacks.txt"


def main() -> int:
    """End trainers, and print how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=500, help="how often each way is tried (default: 500)")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no round later than that")
    parser.add_argument("--beside", type=int, default=os.cpu_count(), help="trainers at a time (default: processors)")
    parser.add_argument("--json", type=Path, help="write what was counted to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        codes, times = _ended(name, options.times, options.beside, time.monotonic() + 60 * options.minutes)
        for stacks in sorted(Path(name).glob(f"**/*{_STACKS}")):
            print(f"{stacks.name} hangs:\n{stacks.read_text()}")
    found = [
        {"way": way, "without": dict(codes[way, False]), "with": dict(codes[way, True]), "expected": expected}
        for way, expected in WAYS.items()
    ]
    rows = [(str(one["way"]), str(one["without"]), str(one["with"])) for one in found]
    show(f"exit codes of {times} trainers each", ("way", "without the recorder", "with the recorder"), rows)
    same = [one["with"] == one["without"] == {one["expected"]: times} for one in found]
    print(f"{sum(same)} of {len(same)} ways end the same, {times} times of {times}; load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"times": times, "load": os.getloadavg()[0], "found": found}, indent=1) + "\n"
        )
    return int(not all(same))


def _ended(folder: str, times: int, beside: int, until_s: float) -> tuple[dict[tuple[str, bool], Counter[str]], int]:
    """Return how often each way has ended with which codes, and how many rounds there were."""
    codes: dict[tuple[str, bool], Counter[str]] = defaultdict(Counter)
    rounds, lock = iter(range(times)), threading.Lock()

    def end_some(folder: str) -> int:
        done = 0
        with _warmed(folder) as process:
            while time.monotonic() < until_s and _next(rounds, lock) is not None:
                for way in WAYS:
                    for recorder in (False, True):
                        ended = _order(process, way, recorder)
                        with lock:
                            codes[way, recorder][ended] += 1
                done += 1
        return done

    with ThreadPoolExecutor(beside) as pool:
        each = [pool.submit(end_some, tempfile.mkdtemp(dir=folder)) for _ in range(beside)]
        return codes, sum(one.result() for one in each)


def _next(rounds: Iterator[int], lock: threading.Lock) -> int | None:
    with lock:
        return next(rounds, None)


def _warmed(folder: str) -> subprocess.Popen[str]:
    """Start a process that has imported torch, and forks trainers, whose files lie in ``folder``. It ends with its
    input."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.exits", _WARM, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LAKECKPT_RECORDER": "1"},
    )


def _order(process: subprocess.Popen[str], way: str, recorder: bool) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([way, recorder]) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def _fork_trainers(folder: str) -> tuple[str, bool, int, int, str] | None:
    """Fork the trainers that the input orders, until its end, and print their exit codes. Returns in a trainer how it
    ends, whether it has a recorder, its rank, how many ranks there are, and its files; None in the process itself."""
    import torch
    import torch._dynamo  # DDP's constructor imports it, for seconds
    import torch.distributed

    import lakeckpt.checkpoint.faults.marks  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # else the end of each trainer copies the memory of all modules
    for number in count():
        line = sys.stdin.readline()
        if not line:
            return None
        way, recorder = json.loads(line)
        world = len(WAYS[way].split())
        pids = []
        for rank in range(world):
            pids.append(os.fork())
            if not pids[-1]:
                return way, recorder, rank, world, f"{folder}/{number}"
        print(*(_code(pid, f"{folder}/{number}.{way}.{pid}{_STACKS}") for pid in pids), flush=True)
    return None


def _code(pid: int, stacks: str) -> str:
    """Wait for the end of a child process, and return its exit code. ``stacks``: the file for those of one that
    hangs."""
    pidfd, ends = os.pidfd_open(pid), select.poll()
    ends.register(pidfd, select.POLLIN)
    ticks = -1
    while not (has_ended := bool(ends.poll(1000 * _HANGS_S))):
        before, ticks = ticks, process.ticks if (process := look_at_process(pid)) is not None else ticks
        if ticks == before:
            break
    os.close(pidfd)
    if not has_ended:
        if (spy := shutil.which("py-spy")) is not None:
            with open(stacks, "wb") as out:
                subprocess.run([spy, "dump", "--native", "--pid", str(pid)], stdout=out, stderr=out, check=False)
                subprocess.run(["bash", "-c", f"tail -n +1 /proc/{pid}/task/*/{{comm,wchan,syscall}}"], stdout=out)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return str(os.waitstatus_to_exitcode(status)) if has_ended else "hangs"


def _train(way: str, recorder: bool, rank: int, world: int, place: str) -> None:
    """Do some steps, and end."""
    import torch
    import torch.distributed as dist

    from lakeckpt.checkpoint.faults.marks import serve_recorder

    dist.init_process_group("gloo", store=dist.FileStore(f"{place}.store", world), rank=rank, world_size=world)
    if recorder and not serve_recorder(f"{place}.{rank}.sock"):
        os._exit(99)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
    if way == "exception of a thread":
        one = threading.Thread(target=_fail)
        one.start()
        one.join()
    elif way == "exception of another rank":
        if rank:
            _fail()
        dist.all_reduce(torch.ones(1))
    else:
        _end(way)


def _end(way: str) -> None:
    if way == "sys.exit(7)":
        sys.exit(7)
    elif way == "os._exit(3)":
        os._exit(3)
    elif way == "exception":
        _fail()
    elif way != "plain end":
        os.kill(os.getpid(), getattr(signal, way))


def _fail() -> Any:
    raise ValueError("this micro-batch is bad")


if __name__ == "__main__":
    if _WARM in sys.argv:
        trainer = _fork_trainers(sys.argv[-1])
        if trainer is not None:
            _train(*trainer)  # and the script is at its end
    else:
        sys.exit(main())
