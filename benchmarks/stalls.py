"""Does the watch name the rank that holds up a job, and why?  ``python -m benchmarks.stalls [--json FILE]``

Each kind of fault is put into a real job of four ranks under torchrun, on ranks 0 and 2. Counted are the seconds until
the stall stands in the run, and whether its ranks and its kind are right. The healthy kinds last eight seconds, and are
perceived, but never acted on. Exit status 1: less than 95 % of the ranks or 90 % of the kinds are right.

``--restart`` lets the watch end the ranks of the twelve kinds that cannot heal, after five seconds instead of five
minutes: each job has to go on by itself, with the weights of a job without a fault and a proved audit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.jobs.stalls import FAULTS, HEALTHY, run


def main() -> int:
    """Run all kinds, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 2], help="the ranks at fault (default: 0 2)")
    parser.add_argument("--kinds", nargs="+", default=[*FAULTS, *HEALTHY], help="which faults (default: all)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--restart", action="store_true", help="let the watch act, and wait for the jobs' ends")
    options = parser.parse_args()
    if options.restart:
        return _restarted(options.ranks[-1], options.json)
    found = [_tried(kind, rank) for kind in options.kinds for rank in options.ranks]
    rows = [
        (
            one["fault"],
            str(one["on"]),
            "-" if one["seconds"] is None else f"{one['seconds']:.1f}",
            one["kind"] + ("" if one["right kind"] else " (wrong)"),
            "yes" if one["right rank"] else str(one["ranks"]),
            one["reason"][:80],
        )
        for one in found
    ]
    show("faults in a job of 4 ranks", ("fault", "on rank", "seconds", "kind", "right rank", "reason"), rows)
    faults = [one for one in found if one["fault"] in FAULTS]
    perceived = sum(one["seconds"] is not None for one in faults)
    ranks, kinds = (sum(one[name] for one in faults) for name in ("right rank", "right kind"))
    acted = sum(one["acted"] for one in found if one["fault"] in HEALTHY)
    slowest = max((one["seconds"] for one in faults if one["seconds"] is not None), default=0.0)
    load = os.getloadavg()[0]
    print(
        f"{len(faults)} faults: {perceived} perceived, {ranks} with the right rank, {kinds} with the right kind, "
        f"slowest {slowest:.1f} s; healthy jobs acted on: {acted}; load {load:.1f}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"load": load, "found": found}, indent=1) + "\n")
    return int(ranks < 0.95 * len(faults) or kinds < 0.9 * len(faults) or acted > 0)


def _restarted(rank: int, output: Path | None) -> int:
    """Run each kind that cannot heal to the end of its job, and print what came of it."""
    os.environ["LAKECKPT_WATCH_ACT_S"] = "5"
    found, rows = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder / "none", "none", watch="none", until="end")
        for fault in sorted(FAULTS.keys() - {"loop", "computes in C with the lock", "skips"}):
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


def _tried(fault: str, rank: int) -> dict[str, Any]:
    healthy = fault in HEALTHY
    with tempfile.TemporaryDirectory() as name:
        result = run(
            Path(name), fault, on=rank, launcher="torchrun", watch="restart" if healthy else "report",
            until="end" if healthy else "stall",
        )  # fmt: skip
    stalls = result["stalls"]
    one = stalls[0] if stalls else {"ranks": [], "kind": "none", "reason": "", "acted": False}
    return {
        "fault": fault,
        "on": rank,
        "seconds": one["perceived"] - result["injected"] if stalls else None,
        "ranks": one["ranks"],
        "kind": one["kind"],
        "reason": one["reason"],
        "acted": any(stall["acted"] for stall in stalls),
        "right rank": one["ranks"] == [rank],
        "right kind": healthy or one["kind"] in FAULTS[fault][1],
    }


if __name__ == "__main__":
    sys.exit(main())
