"""What does a job lose of which a random rank is killed again and again?  ``python -m benchmarks.kills [--kills N]``

Ranks train a small model under DDP with a capture at each step, under `lakeckpt run`. A random rank is killed by
SIGKILL at a random moment: in a step or a capture, in `restore()`, or at its start. Counted are the steps that all
ranks had finished and that are done again, the time until the next step, and the rows in the job's own logs: each row
has to count once. The same job runs without kills, and has to end with the same weights. Exit status 1: something of
that does not hold, or a kill cost more than one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import show
from tests.jobs.random_kills import BATCH, STEPS_A_KILL, killed


def main() -> int:
    """Run both jobs, and print what the kills cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--ranks", type=int, default=2, help="on this machine (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and ranks (default: 0)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    rows = options.ranks * BATCH * STEPS_A_KILL * max(1, options.kills)
    with tempfile.TemporaryDirectory() as name:
        job = killed(Path(name, "killed"), kills=options.kills, ranks=options.ranks, seed=options.seed, rows=rows)
        other = killed(Path(name, "other"), kills=0, ranks=options.ranks, rows=rows)
    table = []
    for kind in ("step", "restore", "start"):
        its = [one for one in job.kills if one.kind == kind]
        if its:
            seconds = sorted(one.felt_s for one in its)
            again = Counter(one.steps_again for one in its)
            spread = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
            table.append(
                (kind, f"{len(its)}", ", ".join(f"{many} x {one}" for one, many in sorted(again.items())), spread)
            )
    show(f"{options.kills} kills of {options.ranks} ranks", ("in", "kills", "steps again", "seconds to a step"), table)
    dear = [one for one in job.kills if one.steps_again > 1]
    for one in dear:
        print(f"{one.steps_again} steps again, from step {one.restored} after {one.finished}: {one.passed_over}")
    is_same = job.weights == other.weights
    print(f"faults by cause: {dict(Counter(one['cause'] for one in job.faults['faults']))}")
    print(f"account: {job.faults['account']}")
    print(f"rows and audit: {job.problem or 'each row counts once'}; weights: {'the same' if is_same else 'OTHERS'}")
    if options.json is not None:
        found = {"ranks": options.ranks, "kills": [asdict(one) for one in job.kills], "same weights": is_same}
        found |= {"problem": job.problem, "account": job.faults["account"]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(dear or job.problem or other.problem or not is_same or len(job.kills) != options.kills))


if __name__ == "__main__":
    sys.exit(main())
