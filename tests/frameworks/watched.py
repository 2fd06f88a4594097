"""This module runs a user's script, unchanged, and notes the rows that its model was given in each optimizer step.

The first two numbers of each row that reaches an embedding of 256 words, or a linear layer of two features, name the
row (`ids_of`): this is what the model saw, whatever receipts say. Steps are noted where the manager counts them. With
``PAUSE_AFTER=n`` in the environment, the script stands still after its n-th step and before the cut, to be killed.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from lakeckpt import CheckpointManager
from tests.frameworks.harness import ROOT, Job
from tests.frameworks.notes import note

ROWS = 101

_seen: list[int] = []


def ids_of(rows: torch.Tensor) -> list[int]:
    """Return the ids that the first two numbers of each row name."""
    return [int(one) for one in (rows[:, 0] * 64 + rows[:, 1]).round()]


def page_script(page: str, **changes: str) -> str:
    """Return the first Python block of ``docs/how-to/<page>.md``, with ``name=…`` of the block as ``changes`` say."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    script = found.group(1)
    for name, value in changes.items():
        script, count = re.subn(rf'(\b{name}"?(?:=|: ))[^,)}}]+', rf"\g<1>{value}", script)
        assert count == 1, f"{name} stands {count} times in {page}.md"
    return script


def _watch(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
    is_words = isinstance(module, torch.nn.Embedding) and module.num_embeddings == 256
    if module.training and (is_words or (type(module) is torch.nn.Linear and module.in_features == 2)):
        _seen.extend(ids_of(given[0]))


def _weights(manager: Any) -> str:
    values = [one.detach().numpy().tobytes() for one in manager._objects["model"].parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def run(script: str) -> None:
    """Run the file ``script`` and note its steps."""
    restore, step = CheckpointManager.restore, CheckpointManager.step
    steps: list[int] = []

    def restored(self: Any, *args: Any, **options: Any) -> int:
        done = restore(self, *args, **options)
        print("restored", done, _weights(self), flush=True)
        return done

    def stepped(self: Any, *args: Any, **options: Any) -> None:
        note(self.steps_done + 1, _seen, weights=_weights(self))
        _seen.clear()
        steps.append(self.steps_done + 1)
        if len(steps) == int(os.environ.get("PAUSE_AFTER", "0")):
            signal.pause()
        step(self, *args, **options)

    CheckpointManager.restore, CheckpointManager.step = restored, stepped  # type: ignore[method-assign]
    torch.nn.modules.module.register_module_forward_pre_hook(_watch)  # type: ignore[arg-type]
    torch.manual_seed(0)
    runpy.run_path(script, run_name="__main__")


def run_killed_on_other_ranks(job: Job) -> None:
    """Run a page's job of three epochs of 26 batches on one rank, with two batches a step and a save every four steps:
    on one rank, one, two and one, all but the last attempt killed. Check rows and weights."""
    weights = {}
    for attempt, (ranks, pause, begins) in enumerate([(1, 15, 0), (1, 6, 12), (2, 6, 16), (1, 0, 20)]):
        environment = {"ACCELERATE_USE_CPU": "true", "PAUSE_AFTER": str(pause)}
        log = job.run(ranks=ranks, kill_after=pause or None, environment=environment)
        restored = set(re.findall(r"restored (\d+) (\w+)", log))
        made = {line["step"]: line["weights"] for line in job.lines() if line["attempt"] == attempt}
        assert len(restored) == 1 and (begins == 0 or restored == {(str(begins), weights[begins])}), log
        if attempt == 1:  # the steps of attempt 0 after the checkpoint are done again, the end of an epoch among them
            assert [made[step] for step in (13, 14, 15)] == [weights[step] for step in (13, 14, 15)]
        weights.update(made)
    assert job.counts() == dict.fromkeys(range(ROWS), 3)
    assert list(job.history()) == list(range(1, 36))  # 20 steps, the 4 batches that are left of an epoch, and an epoch


if __name__ == "__main__":
    run(str(Path(sys.argv[1])))
