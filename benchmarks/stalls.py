"""Does the watch name the rank that holds up a job, and why?  ``python -m benchmarks.stalls [--json FILE]``

Each kind of fault is put into a real job of four ranks under torchrun, on ranks 0 and 2. torchrun is its function, in a
process that has imported torch, or with ``--launcher torchrun`` the command, which takes longer to start. Counted are
the seconds until the stall stands in the run, and whether its ranks and its kind are right. Some faults end the job at
once: then the run says which rank died first, of what. A loader whose worker is stopped has read ahead: its seconds
count from the last batch that it had. The healthy kinds last at least eight seconds, and are never acted on. The frozen
disk needs root. Exit status 1: a fault is not perceived, or later than three steps and ten seconds, or less than 95 %
of the ranks or 90 % of the kinds are right, or a healthy job was ended.

The ranks serve torch's flight recorder, and stacks come from py-spy (``pip install 'lakeckpt[watch]'``). ``--without
py-spy,recorder`` takes away one of them or both: then 90 % of the ranks have to be right, and kinds do not count.

``--restart`` lets the watch end the ranks of the kinds that cannot heal, after five seconds instead of five
minutes: each job has to go on by itself, with the weights of a job without a fault and a proved audit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import ROOT
from tests.jobs.stall_kinds import DEATHS, FAULTS, HEALTHY
from tests.jobs.stalls import STEP_S, can_freeze, run

_SLOWEST_S = 10 + 3 * STEP_S
_NOT_RESTARTED = DEATHS | {"loop", "computes in C with the lock", "skips", "frozen disk", "stopped worker"}
"""Deaths end by themselves; the watch does not end ranks that compute or go on; a rank that waits for a disk cannot be
ended; and a loader with a worker has read ahead."""
_NOT_ENDED: dict[str, Any] = {
    "stalls": [{"ranks": [], "kind": "not ended", "reason": "", "acted": True, "perceived": 0.0}],
    "faults": [],
    "injected": 0.0,
}
"""A job that should have ended counts as one that was acted on."""
_HELPERS = ("py-spy", "recorder")
_NO_SPY = "import lakeckpt.watch.stacks as stacks\nstacks._by_pyspy = lambda pid: ()\n"


def main() -> int:
    """Run all kinds, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 2], help="the ranks at fault (default: 0 2)")
    parser.add_argument("--kinds", nargs="+", default=[*FAULTS, *HEALTHY], help="which kinds (default: all)")
    parser.add_argument("--without", default="", help="py-spy, recorder, or both with a comma: do without these")
    parser.add_argument("--beside", type=int, default=1, help="so many jobs run beside each other (default: 1)")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no job later than that")
    parser.add_argument(
        "--launcher", choices=("elastic", "torchrun"), default="elastic", help="torchrun's function, or the command"
    )
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--restart", action="store_true", help="let the watch act, and wait for the jobs' ends")
    options = parser.parse_args()
    if options.restart:
        return _restarted(options.ranks[-1], options.json)
    without = [one for one in options.without.split(",") if one]
    if unknown := set(without) - set(_HELPERS):
        parser.error(f"--without takes {' and '.join(_HELPERS)}, got {', '.join(sorted(unknown))}")
    kinds = list(options.kinds)
    if "frozen disk" in kinds and not can_freeze():
        kinds.remove("frozen disk")
        print("frozen disk: skipped. It needs root, mkfs.ext4, fsfreeze and a loop device.")
    if "py-spy" not in without and shutil.which("py-spy") is None:
        print("py-spy is not on the path: ranks write their own stacks.")

    until_s = time.monotonic() + 60 * options.minutes

    def tried(kind: str, rank: int) -> dict[str, Any] | None:
        if time.monotonic() > until_s:
            return None
        one = _tried(kind, rank, without, options.launcher)
        print(*_row(one), sep="  ", flush=True)
        return one

    with ThreadPoolExecutor(options.beside) as pool:
        tries = list(pool.map(tried, *zip(*product(kinds, options.ranks), strict=True)))
    found = [one for one in tries if one is not None]
    print(f"{len(tries) - len(found)} of {len(tries)} jobs were not begun in time")
    columns = ("kind", "on rank", "seconds", "verdict", "right rank", "reason")
    show("faults in a job of 4 ranks", columns, [_row(one) for one in found])
    return _judged(found, without, options.launcher, options.json)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    right = "yes" if one["right rank"] else str(one["ranks"])
    healthy = "ENDED" if one["acted"] else "left alone"
    return (
        one["fault"],
        str(one["on"]),
        "-" if one["seconds"] is None else f"{one['seconds']:.1f}",
        one["kind"] + ("" if one["right kind"] else " (wrong)"),
        healthy if one["fault"] in HEALTHY else right,
        one["reason"][:80],
    )


def _judged(found: list[dict[str, Any]], without: Collection[str], launcher: str, output: Path | None) -> int:
    """Print the counts, write them to ``output``, and return the exit status."""
    faults = [one for one in found if one["fault"] in FAULTS]
    perceived = sum(one["seconds"] is not None for one in faults)
    ranks, kinds = (sum(one[name] for one in faults) for name in ("right rank", "right kind"))
    acted = sum(one["acted"] for one in found if one["fault"] in HEALTHY)
    slowest = max((one["seconds"] for one in faults if one["seconds"] is not None), default=0.0)
    load = os.getloadavg()[0]
    print(
        f"{len(faults)} faults: {perceived} perceived, {ranks} with the right rank, {kinds} with the right kind, "
        f"slowest {slowest:.1f} s; {len(found) - len(faults)} healthy jobs, acted on: {acted}; load {load:.1f}"
    )
    counts = {
        "without": list(without), "launcher": launcher, "load": load, "faults": len(faults), "perceived": perceived,
        "right rank": ranks, "right kind": kinds, "slowest": slowest, "healthy": len(found) - len(faults),
        "acted on": acted,
    }  # fmt: skip
    if output is not None:
        output.write_text(json.dumps({**counts, "found": found}, indent=1) + "\n")
    if without:
        return int(ranks < 0.9 * len(faults))
    is_fast = perceived == len(faults) and slowest <= _SLOWEST_S
    return int(not is_fast or ranks < 0.95 * len(faults) or kinds < 0.9 * len(faults) or acted > 0)


def _restarted(rank: int, output: Path | None) -> int:
    """Run each kind that cannot heal to the end of its job, and print what came of it."""
    os.environ["LAKECKPT_WATCH_ACT_S"] = "5"
    found, rows = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder / "none", "none", watch="none", until="end")
        for fault in sorted(FAULTS.keys() - _NOT_RESTARTED):
            result = run(folder / fault, fault, on=rank, watch="restart", until="end")
            same = (folder / fault / "weights.json").read_text() == (folder / "none" / "weights.json").read_text()
            proved = audit(open_storage(folder / fault / "run")).exactly_once
            again = [one["steps_again"] for one in result["faults"]]
            acted = [one["ranks"] for one in result["stalls"] if one["acted"]]
            goes_on = result["status"] == 0 and same and proved and acted == [[rank]]
            found.append({"fault": fault, "acted": acted, "steps again": again, "weights": same, "proved": proved})
            rows.append((fault, str(acted), str(again), "yes" if same else "NO", "yes" if proved else "NO"))
            found[-1]["goes on"] = goes_on
    show("jobs that the watch has ended", ("fault", "ended for", "steps again", "same weights", "proved"), rows)
    well = sum(bool(one["goes on"]) for one in found)
    print(f"{well} of {len(found)} went on by themselves; load {os.getloadavg()[0]:.1f}")
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")
    return int(well < len(found))


def _tried(fault: str, rank: int, without: Collection[str], launcher: str) -> dict[str, Any]:
    ends = fault in HEALTHY or fault in DEATHS
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        try:
            result = run(
                Path(name), fault, on=rank, launcher=launcher, watch="restart" if fault in HEALTHY else "report",
                until="end" if ends else "stall",
                environment={} if "recorder" in without else {"LAKECKPT_RECORDER": "1"},
                site=_NO_SPY if "py-spy" in without else "",
            )  # fmt: skip
        except AssertionError as error:
            print(error)
            result = _NOT_ENDED
    stalls = [_death(one) for one in result["faults"]] if fault in DEATHS else result["stalls"]
    one = stalls[0] if stalls else {"ranks": [], "kind": "none", "reason": "", "acted": False}
    return {
        "fault": fault,
        "on": rank,
        "seconds": one["perceived"] - result["injected"] if stalls else None,
        "ranks": one["ranks"],
        "kind": one["kind"],
        "reason": one["reason"].replace(f"{ROOT}{os.sep}", ""),
        "acted": any(stall["acted"] for stall in stalls),
        "right rank": one["ranks"] == [rank],
        "right kind": fault in HEALTHY or one["kind"] in FAULTS[fault][1],
    }


def _death(fault: dict[str, Any]) -> dict[str, Any]:
    """Return a fault in the words of a stall."""
    kind = f"{fault['cause']} {fault['what']}"
    return {"ranks": [fault["rank"]], "kind": kind, "reason": fault["text"], "perceived": fault["at"], "acted": False}


if __name__ == "__main__":
    sys.exit(main())
