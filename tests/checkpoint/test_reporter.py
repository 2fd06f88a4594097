"""Results of saves are recorded, whatever a user's ``on_save`` does."""

from __future__ import annotations

import pytest

from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.outage import Outage
from lakeckpt.checkpoint.report import Reporter, Saved
from lakeckpt.counters import RunCounters
from lakeckpt.tracking.waiting import SystemWaiter


def test_an_on_save_that_raises_loses_no_result_of_the_saves_behind_it() -> None:
    def on_save(info: CheckpointInfo) -> None:
        raise KeyError(f"of step {info.step}")

    reporter = Reporter(on_save, outage=Outage(0.0, SystemWaiter()), counters=RunCounters())
    infos = [CheckpointInfo(slot=step, step=step, attempt=1, world_size=1, created_s=0.0) for step in (4, 8)]
    handles = [reporter.handle(one.step, lambda: None) for one in infos]
    with pytest.raises(KeyError, match="of step 4"):
        reporter.report([Saved(step=one.step, info=one, error=None) for one in infos])
    assert [one.wait() for one in handles] == infos
    assert reporter.saved_step == 8 and reporter.newest == infos[1]
