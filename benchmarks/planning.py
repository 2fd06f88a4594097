"""What does planning an epoch over a million row groups cost?  ``python -m benchmarks.planning [--json FILE]``

The limit is 1 s and 100 MB (DESIGN section 7). Beside it, in the same run: numpy's own shuffle of as many numbers, and
the bare sort of as many random 64-bit words, which is the physical limit of ordering by hash.
"""

from __future__ import annotations

import numpy as np

from benchmarks.measure import measure, report
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Plan, start
from lakeckpt.core.state import Identity

GROUPS = 1_000_000
SPEC = OrderSpec(seed=7, shuffle=True, window=4)


def main() -> None:
    generator = np.random.default_rng(0)
    group_rows = generator.integers(1, 200_000, GROUPS)
    words = generator.integers(0, 2**63, GROUPS, dtype=np.uint64)
    rows = int(group_rows.sum())

    def order() -> None:
        EpochLayout.build(group_rows, SPEC, 3, 1024)

    def order_and_first_step() -> None:
        layout = EpochLayout.build(group_rows, SPEC, 3, 1024)
        identity = Identity(table="", selection="", rows=rows, spec=SPEC, tail="short", endless=False)
        plan = Plan(start(identity, epoch=3, num_lanes=1024, batch_size=4096, world_size=128))
        spans = plan.assignment(plan.steps * 9 // 10 if plan.steps else 0, 17).receipt.spans
        layout.window_at(spans[0].start)

    cases = {
        "lakeckpt: order of an epoch": order,
        "lakeckpt: order, lanes, plan, a window at 90 %": order_and_first_step,
        "numpy: Generator.permutation": lambda: np.random.default_rng(0).permutation(GROUPS),
        "numpy: argsort of random words": lambda: np.argsort(words),
    }
    measured = measure(cases, repetitions=7)
    base = measured[-1].median_s
    rows_shown = [
        (
            one.name,
            f"{one.median_s * 1e3:.0f} ms",
            f"{min(one.seconds) * 1e3:.0f} … {max(one.seconds) * 1e3:.0f} ms",
            f"{one.median_s / base:.2f}",
            f"{one.peak_bytes / 1e6:.0f} MB",
        )
        for one in measured
    ]
    columns = ("planning", "median", "spread", "to the bare sort", "peak memory")
    report(f"{GROUPS:,} row groups, {rows:,} rows", columns, rows_shown, measured)


if __name__ == "__main__":
    main()
