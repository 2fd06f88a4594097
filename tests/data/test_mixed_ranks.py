"""Two ranks of one job read a mixture. They stay at one place; a rank that goes another way is refused at a save."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, mix
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import StateMismatch, TrackingError
from lakeckpt.lake.storage.local import LocalStorage
from tests.tracking.processes import run_processes

NAMES = ("web", "code")


def loader_of(folder: Path, names: tuple[str, ...]) -> LakeLoader:
    return LakeLoader(mix({one: (LakeDataset(folder / one, batch_size=4, shuffle=True), 1) for one in names}, seed=1))


def on_both(value: Any) -> list[Any]:
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def job(rank: int, at: str, goes_astray: str) -> None:
    """Take 10 steps, with other weights from the sixth on; then one rank goes another way. Go on after a restore."""
    folder = Path(at)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    loader, used = loader_of(folder, NAMES), list[int]()
    manager = CheckpointManager(folder / "run", {"reader": loader})
    manager.restore()
    for weights in ({"web": 3, "code": 1}, {"web": 0, "code": 1}):
        for batch in itertools.islice(iter(loader), 5):
            manager.step(batch)
            used += batch["id"].tolist()
        manager.save()
        first, second = on_both(loader.state_dict())
        assert first == second
        if weights["web"] or (goes_astray == "weights" and rank == 0):
            loader.set_weights(weights)
    names = NAMES[::-1] if goes_astray == "order" and rank else NAMES
    other = loader if goes_astray == "weights" else loader_of(folder, names)
    if goes_astray == "order":
        with pytest.raises(StateMismatch, match=r"the number of source 'web': 1 in this mixture.*"):
            CheckpointManager(folder / "run", {"reader": other}).restore()
        manager = CheckpointManager(folder / "other", {"reader": other})
        manager.restore()
    manager.step(next(iter(other)))
    with pytest.raises(TrackingError, match=r"rank"):
        manager.save()
    again = loader_of(folder, NAMES)
    manager = CheckpointManager(folder / "run", {"reader": again})
    assert manager.restore() == 10
    for batch in itertools.islice(iter(again), 5):
        manager.step(batch)
        used += batch["id"].tolist()
    manager.save()
    (folder / f"used.{rank}").write_text(json.dumps(used))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("goes_astray", ["weights", "order"])
def test_a_rank_that_goes_another_way_is_refused_and_nothing_is_lost(tmp_path: Path, goes_astray: str) -> None:
    for number, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        table = pa.table({"id": range(1000 * number, 1000 * number + 200)})
        pq.write_table(table, tmp_path / name / "a.parquet", row_group_size=10)
    run_processes(2, job, str(tmp_path), goes_astray)
    counts = Counter(one for rank in range(2) for one in json.loads((tmp_path / f"used.{rank}").read_text()))
    assert counts.total() == 2 * 4 * 15 and set(counts.values()) == {1}
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.verdict == "proved", report
    rows = {one.name: sum(epoch.once for epoch in one.epochs) for one in report.readers}
    assert rows == {f"reader.{name}": sum(one // 1000 == n for one in counts) for n, name in enumerate(NAMES)}
