"""How long is a killed rank felt, under torchrun and under `lakeckpt run`?  ``python -m benchmarks.recovery``

Two and four ranks (``--ranks``) train a small model under DDP with a capture at each step, and rank 1 is killed by
SIGKILL. Counted is the time from the last step that was finished before the kill to the first step that is finished
after it, and the steps that were done again. Pairs of both launchers take turns, because the machine may be busy. The
table has medians and the spread, and the ratio of each pair.

``--stopped 15`` stops rank 1 by SIGSTOP instead, under `lakeckpt run`, with that time limit of collectives. Counted is
the time until the launcher perceives the fault, and from then until it has ended all ranks and started new processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.measure import show
from tests.cli import launched
from tests.frameworks.harness import write_table

KILLED_AFTER = 9


def felt(ranks: int, *, cold: bool) -> tuple[float, int]:
    """Return (seconds from the last step before the kill to the first after it, steps done again)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "table", rows=launched.ROWS)
        launched.run(folder, f"--nproc-per-node={ranks}", kills=str(KILLED_AFTER), cold=cold)
        notes = [one for rank in range(ranks) for one in launched.noted(folder, rank)]
        before = [one for one in notes if one["attempt"] == 0]
        after = [one for one in notes if one["attempt"] == 1]
        again = max(one["step"] for one in before) + 1 - min(one["step"] for one in after)
        return min(one["at"] for one in after) - max(one["at"] for one in before), again


def stopped(ranks: int, limit_s: float) -> tuple[float, float]:
    """Return (seconds until the launcher perceives that a rank was stopped, seconds until new processes run)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "table", rows=launched.ROWS)
        launched.run(folder, f"--nproc-per-node={ranks}", kills=str(KILLED_AFTER), mode=f"stop {limit_s:g}")
        (fault,) = launched.faults_of_run(folder)["faults"]
        return fault["phases"]["perceived"], fault["phases"]["processes"]


def main() -> None:
    """Measure pairs, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="on this machine (default: 2 4)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--stopped", type=float, metavar="SECONDS", help="stop the rank: the limit of collectives")
    options = parser.parse_args()
    if options.stopped is not None:
        measured = [(ranks, *stopped(ranks, options.stopped)) for ranks in options.ranks for _ in range(options.pairs)]
        table = [(f"{ranks}", f"{perceived_s:.2f}", f"{torn_s:.2f}") for ranks, perceived_s, torn_s in measured]
        show("A stopped rank", ("ranks", "perceived after s", "teardown and new processes s"), table)
        return
    rows, found = [], []
    for ranks in options.ranks:
        pairs = [(felt(ranks, cold=True), felt(ranks, cold=False)) for _ in range(options.pairs)]
        ratios = sorted(warm[0] / cold[0] for cold, warm in pairs)
        for launcher, runs in zip(("torchrun", "lakeckpt run"), zip(*pairs, strict=True), strict=True):
            seconds = sorted(one for one, _ in runs)
            again = max(steps for _, steps in runs)
            spread = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
            rows.append((f"{ranks}", launcher, spread, f"{again}"))
            found.append({"ranks": ranks, "launcher": launcher, "seconds": seconds, "steps_again": again})
        rows.append((f"{ranks}", "ratio", f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", ""))
        found.append({"ranks": ranks, "ratios": ratios})
    show("A killed rank, until the next step", ("ranks", "launcher", "seconds", "steps again, at most"), rows)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
