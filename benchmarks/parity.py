"""How fast is the XOR that makes parity, beside a copy of memory?  ``python -m benchmarks.parity [--json FILE]``

Shares of three members are joined to one parity as the agents do it (`lakeckpt.checkpoint.peers.parity.xor_into`), leaf
by leaf on one thread. Beside it, in turn, as many bytes are copied from leaf to leaf (numpy's copy, which is memcpy).
Counted are bytes of shares a second. Printed are the best of five rounds of each, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measure import show
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.peers.parity import xor_into

_ROUNDS, _MEMBERS = 5, 3


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=96, help="of each member's pieces (default: 96)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    shares = [np.random.default_rng(at).integers(0, 256, args.mib * LEAF_BYTES, np.uint8) for at in range(_MEMBERS)]
    parity = np.zeros(args.mib * LEAF_BYTES, np.uint8)

    def copied(into: memoryview, data: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))

    best = {"xor": 0.0, "memcpy": 0.0}
    for _ in range(_ROUNDS):
        for name, work in (("xor", xor_into), ("memcpy", copied)):
            best[name] = max(best[name], _rate(work, shares, parity))
    ratio = best["xor"] / best["memcpy"]
    show(
        "parity of three shares, one thread",
        ("what", "GB/s of shares"),
        [(name, f"{rate / 1e9:.2f}") for name, rate in best.items()],
    )
    print(f"XOR has {ratio:.2f} of memcpy's rate; load {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps({"bytes_per_s": best, "ratio": ratio, "mib": args.mib}, indent=1) + "\n")


def _rate(
    work: Callable[[memoryview, memoryview], None],
    shares: list[np.ndarray[tuple[int], np.dtype[np.uint8]]],
    parity: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> float:
    begun_s = time.perf_counter()
    for share in shares:
        into, data = memoryview(parity), memoryview(share)
        for at in range(0, len(share), LEAF_BYTES):
            work(into[at : at + LEAF_BYTES], data[at : at + LEAF_BYTES])
    return sum(share.nbytes for share in shares) / (time.perf_counter() - begun_s)


if __name__ == "__main__":
    main()
