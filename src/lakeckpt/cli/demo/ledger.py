"""What does lakeckpt's own ledger say of a job of the demo? The same proof as ``lakeckpt audit`` prints.

Never: it reads neither the records of the training loop nor the table; those are what the verdict holds it against.
"""

from __future__ import annotations

from lakeckpt.checkpoint.audit import audit
from lakeckpt.cli.demo.scenario import DemoConfig
from lakeckpt.cli.demo.verdict import Audit
from lakeckpt.errors import CheckpointNotFound
from lakeckpt.lake.storage import open_storage

__all__ = ["audit_job"]


def audit_job(config: DemoConfig) -> Audit:
    """Audit the checkpoints of a job that came to its end: beside the proof, all of its epochs must be complete."""
    try:
        report = audit(open_storage(config.checkpoints))
    except CheckpointNotFound as error:
        return Audit(exactly_once=False, lost=0, repeated=0, words=str(error))
    complete = {
        epoch.epoch
        for reader in report.readers
        for epoch in reader.epochs
        if epoch.once == epoch.rows and not epoch.left
    }
    absent = sorted(set(range(config.epochs)) - complete)
    words = report.words
    if report.exactly_once and absent:
        words += f"; but the ledger does not have all rows of epoch {', '.join(map(str, absent))}"
    return Audit(
        exactly_once=report.exactly_once and not absent, lost=report.lost, repeated=report.surplus, words=words
    )
