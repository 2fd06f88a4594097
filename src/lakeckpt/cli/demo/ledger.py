"""What does lakeckpt's own ledger say of a job of the demo?"""

from __future__ import annotations

from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.cli.demo.scenario import DemoConfig
from lakeckpt.cli.demo.verdict import Audit
from lakeckpt.core.intervals import Intervals
from lakeckpt.lake.storage import open_storage

__all__ = ["audit_job"]


def audit_job(config: DemoConfig) -> Audit:
    """TEMPORARY until lakeckpt.checkpoint.audit lands."""
    history = read_history(open_storage(config.checkpoints))
    import pyarrow.parquet as pq
    from pathlib import Path

    rows = sum(pq.read_metadata(p).num_rows for p in Path(config.lake).glob("*.parquet"))
    seen: dict[int, Intervals] = {e: Intervals.empty() for e in range(config.epochs)}
    repeated = 0
    for manifest in history.chain:
        for record in manifest.readers.values():
            for stretch in record.stretches:
                for epoch, positions in stretch.consumed.items():
                    had = seen.get(epoch, Intervals.empty())
                    repeated += had.intersection(positions).size
                    seen[epoch] = had.union(positions)
    lost = sum(rows - one.size for one in seen.values())
    return Audit(
        exactly_once=not lost and not repeated and history.whole,
        lost=lost,
        repeated=repeated,
        words=f"{len(history.chain)} checkpoints in the history, {len(history.abandoned)} abandoned, {len(history.damaged)} damaged",
    )
