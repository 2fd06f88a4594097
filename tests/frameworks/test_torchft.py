"""The script of docs/how-to/torchft.md, in real replica groups: one is killed and heals, then the whole job dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.errors import CheckpointNotFound
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import ROOT, Job, free_port, write_table
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROWS, EPOCHS = 400, 2
PAGE = ROOT / "docs/how-to/torchft.md"
WITHOUT_US = """
import os

import torch
import torchft

import data

group = int(os.environ["REPLICA_GROUP_ID"])
model = torch.nn.Linear(2, 1)
adam = torch.optim.AdamW(model.parameters())


def state_dict():
    return {"model": model.state_dict(), "optimizer": adam.state_dict()}


def load_state_dict(state):
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["optimizer"])


backend = torchft.ProcessGroupGloo()
manager = torchft.Manager(backend, load_state_dict, state_dict, 1, replica_id=f"group{group}")
trained = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, adam)
dataset = data.Events("events")
sampler = torchft.DistributedSampler(dataset, group, num_replica_groups=2, group_rank=0, num_replicas=1, seed=7)
loader = torch.utils.data.DataLoader(dataset, batch_size=64, sampler=sampler)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        features = torch.stack([batch["user"], batch["item"]], dim=1).float()
        errors = (trained(features)[:, 0] - batch["label"]) ** 2
        errors.mean().backward()
        optimizer.step()
manager.shutdown()
"""


def script_of_page() -> str:
    found = re.search(r"^```python no-run\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def changed(text: str, *changes: tuple[str, str]) -> str:
    """Return ``text`` with each (old, new) of ``changes``; each old one is there once."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


PAUSE = """
import time
from pathlib import Path

from tests.frameworks.notes import note


def pause(at):
    here, me = Path(os.environ["NOTES"]), os.environ["ME"]
    (here / f"at-{me}.new").write_text(str(at))
    (here / f"at-{me}.new").rename(here / f"at-{me}")
    while float((here / f"allowed-{me}").read_text()) < at:
        time.sleep(0.005)

"""


def script_of_test() -> str:
    """The script of the page on a small table, which notes what it does, and pauses where the test wants it to: before
    it begins (at 0), before step k (at k), and when it has the rows of step k (at k + 0.5)."""
    return changed(
        script_of_page(),
        ("torch.nn.Linear(2, 1)", "torch.nn.Linear(1, 1)"),
        ("batch_size=64", "batch_size=4"),
        ("persist_every=100", 'persist_every=8, capture_every=4, arenas="arenas"'),
        ("replica.epoch < 3", f"replica.epoch < {EPOCHS}"),
        ('torch.stack([batch["user"], batch["item"]], dim=1).float()', 'batch["x"][:, None]'),
        ('batch["label"]', 'batch["y"]'),
        ("\nbackend = ", f"\n{PAUSE}pause(0)\nbackend = "),
        (
            "        optimizer.zero_grad()",
            "        step = manager.current_step() + 1\n        pause(step)\n        optimizer.zero_grad()",
        ),
        ("        features", "        step = manager.current_step() + 1\n        pause(step + 0.5)\n        features"),
        (
            "        replica.step()",
            "        if replica.step():\n"
            "            weights = [*model.weight[0].tolist(), *model.bias.tolist()]\n"
            '            note(step, batch["id"].tolist(), weights=weights, of=manager.num_participants())\n'
            "        del batch",
        ),
    )


class Replicas:
    """The processes of a job, each with a name and a store of its own, and a lighthouse."""

    def __init__(self, folder: Path) -> None:
        self.job = Job(folder, folder / "train.py")
        self.job.script.write_text(script_of_test())
        self.address = f"http://127.0.0.1:{free_port()}"
        binding = f"[::]:{self.address.rsplit(':', 1)[1]}"
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        options = {"bind": binding, "min_replicas": 1, "join_timeout_ms": 30_000, "heartbeat_timeout_ms": 1_000}
        command = [program, *(str(one) for key, value in options.items() for one in (f"--{key}", value))]
        self.processes = {"lighthouse": self._begin("lighthouse", command, {})}
        self.stores: list[Any] = []

    def _begin(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.job.folder / f"log-{name}").open("w") as out:
            return subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=out, stderr=out, cwd=self.job.folder
            )

    def start(self, name: str, group: int, *, attempt: int = 0) -> None:
        """Start a process of replica group ``group``, which pauses at 0."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's, on a cluster
        self.stores.append(store)
        self.allow(name, -1)
        environment = {
            "REPLICA_GROUP_ID": str(group),
            "TORCHFT_LIGHTHOUSE": self.address,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "ME": name,
            "NOTES": str(self.job.notes),
            "ATTEMPT": str(attempt),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        self.processes[name] = self._begin(name, [sys.executable, str(self.job.script)], environment)

    def allow(self, name: str, at: float) -> None:
        """Let a process go on while it is at ``at`` or before."""
        place = self.job.notes / f"allowed-{name}"
        place.with_suffix(".new").write_text(str(at))
        place.with_suffix(".new").rename(place)

    def await_at(self, name: str, at: float) -> None:
        """Return when a process has come to ``at``."""
        end, place = time.monotonic() + PATIENCE_S, self.job.notes / f"at-{name}"
        while not place.exists() or float(place.read_text()) < at:
            assert self.processes[name].poll() is None and time.monotonic() < end, self.log(name)
            time.sleep(0.01)

    def go(self, at: float, *names: str) -> None:
        """Let processes go on to ``at``, and return when they are there."""
        for name in names:
            self.allow(name, at - 0.1)
        for name in names:
            self.await_at(name, at)

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
            self.processes[name].wait()

    def log(self, name: str) -> str:
        return (self.job.folder / f"log-{name}").read_text()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    write_table(tmp_path / "events", rows=ROWS)
    found = Replicas(tmp_path)
    try:
        yield found
    finally:
        found.kill(*found.processes)


def test_a_group_that_dies_in_a_step_and_heals_and_a_job_that_starts_again_count_every_row_once(
    replicas: Replicas,
) -> None:
    for name, group, attempt in (("first", 0, 0), ("other", 1, 0), ("healing", 0, 0), ("last", 0, 1)):
        replicas.start(name, group, attempt=attempt)  # all now: most of a process's time goes into its imports
    replicas.go(1, "first", "other")
    replicas.go(21, "first", "other")  # group 0 saves steps 8 and 16, and captures step 20
    replicas.go(21.5, "first", "other")  # both have the rows of step 21
    replicas.allow("other", 32)
    replicas.kill("first")
    replicas.go(33, "other")  # alone, step 21 included
    replicas.go(17, "healing")  # it has restored step 20, or 16 if its capture was not complete
    replicas.go(61, "healing", "other")
    replicas.kill("healing", "other")
    replicas.allow("last", 1e9)
    assert replicas.processes["last"].wait(PATIENCE_S) == 0, replicas.log("last")

    job = replicas.job
    assert job.counts() == Counter(dict.fromkeys(range(ROWS), EPOCHS))
    of, weights = defaultdict(set), defaultdict(set)
    for line in job.lines():
        of[line["attempt"], line["step"]].add(line["of"])
        weights[line["attempt"], line["step"]].add(tuple(line["weights"]))
    assert [of[0, step] for step in (20, 21, 32, 60)] == [{2}, {1}, {1}, {2}]
    assert of[1, 61] == {1}  # of the job that started again
    assert {len(one) for one in weights.values()} == {1}

    run = open_storage(str(job.folder / "run"))
    report = audit(run)
    assert report.exactly_once, report
    healed = min(step for attempt, step in of if attempt == 0 and step > 32 and of[0, step] == {2})
    for step in (16, healed, 56, 61):
        ranks = explain(run, step).readers[0].ranks
        assert sorted(row for rank in ranks for row in rank.table_rows) == sorted(job.history()[step])
    for step in (21, healed - 1):
        with pytest.raises(CheckpointNotFound, match=f"other processes did step {step}"):
            explain(run, step)


def test_the_script_is_at_most_five_lines_longer_than_without_lakeckpt() -> None:
    def lines(text: str) -> int:
        return len([line for line in text.splitlines() if line.strip()])

    compile(WITHOUT_US, "without", "exec")
    assert lines(script_of_page()) - lines(WITHOUT_US) <= 5
