"""Does ``lakeckpt doctor --node`` find the slow node?  ``python -m benchmarks.node_check [--rounds N] [--json FILE]``

Four "nodes" check themselves one after the other, each pinned to the same core. Beside one of them, another one in each
round, three processes burn the core. Then each node checks itself once more against the others, which is what names it.
A round is right if the burnt node is named, and no other. The command is the real one, in processes of its own; the
nodes share a run of their own for each round. Printed is also the load of the machine, which decides how hard this is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import show

NODES = ("node-0", "node-1", "node-2", "node-3")
_BURN = "while True: pass"
_RATES = ("matmul", "host copy", "disk write")


def main() -> int:
    """Run the rounds, and print. Returns 1 if a round was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6, help="of each check (default: 6)")
    parser.add_argument("--burners", type=int, default=3, help="processes beside the slow node (default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    rounds = []
    for number in range(args.rounds):
        rounds.append(one_round(number, core, args.seconds, args.burners))
        print(f"round {number}: burnt {rounds[-1]['burnt']}, named {rounds[-1]['named']}", flush=True)
    rows = [
        (
            str(one["round"]),
            one["burnt"],
            ", ".join(one["named"]) or "nobody",
            f"{one['longest_s']:.1f}",
            f"{one['load_before']:.1f}",
            " | ".join("/".join(f"{rate:.3g}" for rate in one["rates"][name]) for name in _RATES),
        )
        for one in rounds
    ]
    show("Four nodes, one burnt", ("round", "burnt", "named", "longest check s", "load", " | ".join(_RATES)), rows)
    right = sum(one["named"] == [one["burnt"]] for one in rounds)
    print(f"{right} of {len(rounds)} rounds are right")
    if args.json:
        found = {"rounds": rounds, "right": right, "cores": os.cpu_count(), "burners": args.burners}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(right < len(rounds))


def one_round(number: int, core: int, seconds: float, burners: int) -> dict[str, Any]:
    """NodeCheck four nodes twice, and return who was named in the second check."""
    burnt, load, longest = NODES[number % len(NODES)], os.getloadavg()[0], 0.0
    named, reasons, rates = [], {}, {name: [] for name in _RATES}  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as run:
        for is_last in (False, True):
            for node in NODES:
                with burning(core, burners if node == burnt else 0):
                    begin = time.monotonic()
                    said = check(node, run, core, seconds)
                    longest = max(longest, time.monotonic() - begin)
                if not is_last:
                    continue
                if said["avoid"]:
                    named.append(node)
                    reasons[node] = said["reasons"]
                for one in said["checks"]:
                    if one["name"] in rates and one["value"] is not None:
                        rates[one["name"]].append(one["value"])
    return {
        "round": number,
        "burnt": burnt,
        "named": named,
        "reasons": reasons,
        "rates": rates,
        "longest_s": longest,
        "load_before": load,
    }


def check(node: str, run: str, core: int, seconds: float) -> dict[str, Any]:
    """Run the command, pinned to a core. Returns what it said."""
    command = [sys.executable, "-m", "lakeckpt", "doctor", "--node", "--json", "--name", node, "--peers", run]
    done = subprocess.run(
        ["taskset", "-c", str(core), *command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=False
    )
    if done.returncode not in (0, os.EX_TEMPFAIL):
        raise RuntimeError(f"the check of {node} ended with {done.returncode}: {done.stdout.decode()}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@contextmanager
def burning(core: int, count: int) -> Iterator[None]:
    """Run processes that take all they get of a core."""
    burners = [subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", _BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for one in burners:
            one.kill()
            one.wait()


if __name__ == "__main__":
    sys.exit(main())
