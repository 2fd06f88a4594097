"""The script of docs/how-to/nvrx.md under ``ft_launcher``: a rank is killed, and the job goes on in the launcher."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import ROOT, Job, write_table

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROWS, EPOCHS, KILLED_AT, SAVED_AT = 200, 2, 20, 16
PAGE = ROOT / "docs/how-to/nvrx.md"
WITHOUT_US = """
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch.nn.parallel import DistributedDataParallel

import data

dist.init_process_group("gloo")
monitor = RankMonitorClient()
monitor.init_workload_monitoring()
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.AdamW(model.parameters())
dataset = data.Events("events")
sampler = torch.utils.data.DistributedSampler(dataset, seed=7)
loader = torch.utils.data.DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=2)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        features = torch.stack([batch["user"], batch["item"]], dim=1).float()
        errors = (model(features)[:, 0] - batch["label"]) ** 2
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        monitor.send_heartbeat()
monitor.shutdown_workload_monitoring()
dist.destroy_process_group()
"""


def script_of_page() -> str:
    found = re.search(r"^```python no-run\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def script_of_test() -> str:
    """The script of the page on a small table; it notes each step, and rank 1 kills itself once after a step."""
    noted = f"""
            if dist.get_rank() == 1 and (manager.steps_done, os.environ["ATTEMPT"]) == ({KILLED_AT}, "0"):
                os.kill(os.getpid(), signal.SIGKILL)
            weights = [*model.module.weight[0].tolist(), *model.module.bias.tolist()]
            note(manager.steps_done + 1, batch["id"].tolist(), weights=weights)
            manager.step(batch)
"""
    text = script_of_page()
    for old, new in (
        ("torch.nn.Linear(2, 1)", "torch.nn.Linear(1, 1)"),
        ("batch_size=64", "batch_size=4"),
        (", num_workers=2", ""),
        ("persist_every=100", "persist_every=8"),
        ("range(loader.epoch, 3)", f"range(loader.epoch, {EPOCHS})"),
        ('torch.stack([batch["user"], batch["item"]], dim=1).float()', 'batch["x"][:, None]'),
        ('batch["label"]', 'batch["y"]'),
        ("\n            manager.step(batch)\n", noted),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    first = 'import os, signal\nfrom tests.frameworks.notes import note\nos.environ["ATTEMPT"] = '
    return f'{first}os.environ["TORCHELASTIC_RESTART_COUNT"]\n{text}'


def test_a_killed_rank_is_restarted_in_the_job_and_every_row_counts_once(tmp_path: Path) -> None:
    write_table(tmp_path / "events", rows=ROWS)
    job = Job(tmp_path, tmp_path / "train.py")
    job.script.write_text(script_of_test())
    program = str(Path(sys.executable).with_name("ft_launcher"))
    said = job.run(launcher=[program, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"])

    first = {line["attempt"]: line["step"] for line in reversed(job.lines())}
    assert first == {0: 1, 1: SAVED_AT + 1}, said
    assert job.counts() == Counter(dict.fromkeys(range(ROWS), EPOCHS))
    weights = defaultdict(set)
    for line in job.lines():
        weights[line["step"]].add(tuple(line["weights"]))
    assert {len(one) for one in weights.values()} == {1}  # of both ranks, before and after the restart
    report = audit(open_storage(str(tmp_path / "run")))
    assert report.exactly_once, report


def test_the_script_is_at_most_five_lines_longer_than_without_lakeckpt() -> None:
    def lines(text: str) -> int:
        return len([line for line in text.splitlines() if line.strip()])

    compile(WITHOUT_US, "without", "exec")
    assert lines(script_of_page()) - lines(WITHOUT_US) <= 5
