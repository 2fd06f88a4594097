"""The script of docs/how-to/lightning.md, killed by SIGKILL in mid-epoch, and resumed on the same and other ranks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks import forked_ranks
from tests.frameworks.harness import ROOT, Job, free_port

pytestmark = pytest.mark.frameworks

ROWS, BATCH = 300, 8
SCRIPT = re.findall(r"^```python no-run\n(.*?)^```$", (ROOT / "docs/how-to/lightning.md").read_text(), re.S | re.M)[0]

NOTES = """
import os

import lightning

from tests.frameworks.notes import note

lightning.seed_everything(0)
found = getattr(lightning, "pytorch", lightning).callbacks
AVERAGES = [found.EMAWeightAveraging(decay=0.9)] if hasattr(found, "EMAWeightAveraging") else []


class Notes(lightning.Callback):
    def on_train_start(self, trainer, module):
        self.done, self.rows = trainer.global_step, []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.rows += batch["user"].tolist()
        if trainer.global_step != self.done:
            self.done = trainer.global_step
            averages = [one._average_model for one in trainer.callbacks if hasattr(one, "_average_model")]
            weights = [one.tolist() for each in (module, *averages) for one in each.parameters()]
            note(self.done, self.rows, epoch=trainer.current_epoch, weights=weights)
            self.rows = []

"""


def script(options: str, package: str) -> str:
    """The page's script on a small table, with notes of what each step used, and further options of the trainer."""
    found = (NOTES + SCRIPT).replace("import lightning\n", f"import {package} as lightning\n")
    for old, new in {
        "batch_size=64": f"batch_size={BATCH}",
        "num_workers=2": "num_workers=1",
        "persist_every=100)]": "persist_every=2), *AVERAGES, Notes()]",
        'strategy="ddp"': 'strategy="ddp", accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), logger=False, '
        f"enable_progress_bar=False, enable_model_summary=False{options}",
    }.items():
        assert found.count(old) == 1, f"{old!r} is not in the page's script"
        found = found.replace(old, new)
    return found


def job(folder: Path, options: str = "", package: str = "lightning") -> Job:
    """A job of the script, in a folder with a table ``events`` of which ``user`` names the row."""
    (folder / "events").mkdir(parents=True)
    for part in range(3):
        users = pa.array(range(part * ROWS // 3, (part + 1) * ROWS // 3), pa.int64())
        table = pa.table({"user": users, "item": users, "label": users.cast(pa.float32())})
        pq.write_table(table, folder / "events" / f"{part}.parquet", row_group_size=16)
    (folder / "train.py").write_text(script(options, package))
    return Job(folder, folder / "train.py")


def run(one: Job, ranks: int = 1, kill_after: int | None = None, package: str = "lightning") -> None:
    """Run an attempt of the job on so many ranks; see `Job.run`."""
    launcher = [sys.executable, forked_ranks.__file__, package, str(ranks)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    one.run(kill_after=kill_after, launcher=launcher, environment=place)


def surviving(one: Job) -> list[dict[str, object]]:
    """The notes of the history that survives, by step and rank."""
    steps = one.history()
    newest = {step: max(line["attempt"] for line in one.lines() if line["step"] == step) for step in steps}
    lines = [line for line in one.lines() if newest.get(line["step"]) == line["attempt"]]
    return sorted(lines, key=lambda line: int(line["step"]))


def assert_exactly_once(one: Job, *, epochs: int = 3) -> None:
    counts = [Counter[int]() for _ in range(epochs)]
    for line in surviving(one):
        counts[int(str(line["epoch"]))].update(line["ids"])  # type: ignore[call-overload]
    assert [(len(found), set(found.values())) for found in counts] == [(ROWS, {1})] * epochs
    report = audit(open_storage(str(one.folder / "run")))
    assert (report.verdict, len(one.history())) == ("proved", report.step)


def test_the_script_has_at_most_five_lines_of_ours() -> None:
    ours = [line for line in SCRIPT.splitlines() if re.search("lakeckpt|LakeCheckpoint|dataset", line)]
    assert len(ours) == 5, ours


def test_killed_and_resumed_the_weights_and_their_average_are_those_of_the_same_steps(tmp_path: Path) -> None:
    whole, killed = job(tmp_path / "whole"), job(tmp_path / "killed")
    run(whole)
    run(killed, kill_after=41)  # in the second epoch
    run(killed)
    assert_exactly_once(killed)
    facts = [[(line["step"], line["ids"], line["weights"]) for line in surviving(one)] for one in (whole, killed)]
    assert facts[0] == facts[1] and len(facts[0]) == 114


def test_killed_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    """All in the first epoch, which has more steps than the epochs after it."""
    one = job(tmp_path / "job")
    run(one, 2, kill_after=5)
    run(one, 1, kill_after=5)
    run(one, 2)
    assert_exactly_once(one)


def test_accumulated_batches_on_other_ranks_with_the_package_pytorch_lightning(tmp_path: Path) -> None:
    """Five batches are one step. The first epoch has fewer batches than the epochs after it."""
    package = "pytorch_lightning"
    one = job(tmp_path / "job", ", accumulate_grad_batches=5", package)
    run(one, 1, kill_after=4, package=package)
    run(one, 2, kill_after=2, package=package)
    run(one, 1, package=package)
    assert_exactly_once(one)
    assert 5 * BATCH in {len(ids) for ids in one.history().values()}


def test_a_signal_saves_the_step_at_hand_and_ends_the_process(tmp_path: Path) -> None:
    one = job(tmp_path)
    text = one.script.read_text()
    at = "            self.rows = []\n\n"
    assert text.count(at) == 1 and text.count("persist_every=2)") == 1
    send = "            if self.done == 7 and os.environ['ATTEMPT'] == '0':\n                os.kill(os.getpid(), 15)\n"
    text = text.replace("persist_every=2)", "persist_every=100, save_on=('SIGTERM',))")
    one.script.write_text(text.replace(at, "            self.rows = []\n" + send + "\n"))
    with pytest.raises(AssertionError, match=r"SIGTERM: the job ends\. The newest checkpoint is of step [78]\n"):
        run(one)
    run(one)
    steps = [line["step"] for line in one.lines()]
    assert len(steps) == len(set(steps)) and max(steps) == 3 * -(-ROWS // BATCH)  # no step was done twice
    assert set(one.counts().values()) == {3} and len(one.counts()) == ROWS
    assert audit(open_storage(tmp_path / "run")).verdict == "proved"
