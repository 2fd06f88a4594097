"""A job under `lakeckpt run` of which a random rank is killed at a random moment, again and again, and what that cost.

`killed` runs it, and kills from outside by SIGKILL. Each kill is of one of three kinds: ``step``: a random time after a
random step, wherever in a step or a capture the rank is then; ``restore``: a random time after it has called
`restore()`; ``start``: a random time after its script began. Between two kills the job comes on, so that none is taken
for a crash loop. `tests/jobs/test_random_kills.py` and `benchmarks/kills.py` use it.

Ranks note what each step uses, before its gradients are exchanged, and then that the step is finished. A rank that is
killed after the exchange has not finished the step, but the others may have: the job goes on from their state.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import ROOT, write_table
from tests.patience import PATIENCE_S

Kind = Literal["step", "restore", "start"]
BATCH = 4
STEP_S = 0.02
STEPS_A_KILL = 20
"""So many steps the table has for each kill: some are taken while the job waits for its killer."""
_OTHERS: tuple[Kind, ...] = ("restore", "start")
_OFTEN = 8
"""After one of so many kills in a step, the next one comes before a step is finished: as the second death in a row, it
is followed by a cold start."""
_LATEST_S = {"step": 3 * STEP_S, "restore": 0.3, "start": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill. ``finished``: the furthest step that all ranks had finished; ``restored``: from where the job went on;
    ``felt_s``: until the next step was finished.

    The rank that is killed between its gradients and its update of a step is one step behind the others, which still
    finish the step: the job has not."""

    kind: Kind
    rank: int
    finished: int
    restored: int
    felt_s: float
    passed_over: tuple[str, ...] = ()
    """Why newer cuts were not restored."""

    @property
    def steps_again(self) -> int:
        """How many finished steps were done again."""
        return max(0, self.finished - self.restored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a job. ``problem``: what is wrong with its rows, its audit or its end; empty: nothing."""

    kills: tuple[Kill, ...]
    weights: str
    problem: str
    faults: dict[str, Any] = field(repr=False)
    """What ``lakeckpt faults --json`` says."""
    said: str = field(repr=False)


def killed(folder: Path, *, kills: int, ranks: int = 2, seed: int = 0, rows: int | None = None) -> Result:
    """Run the job in ``folder`` to its end, with so many ``kills``."""
    rows = rows or ranks * BATCH * STEPS_A_KILL * max(1, kills)
    write_table(folder / "table", rows=rows, group=256)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "lakeckpt", "run", f"--nproc-per-node={ranks}", __file__, str(folder)]
    found: list[Kill] = []
    with (folder / "said.txt").open("wb") as out:
        launcher = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            job = _Job(folder, ranks, launcher)
            chance = random.Random(seed)
            while len(found) < kills:
                found += job.kill(chance, at_most=kills - len(found))
            (folder / "hurry").touch()
            launcher.wait(PATIENCE_S + rows / 100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    said = (folder / "said.txt").read_text(errors="replace")
    done = subprocess.run(
        [sys.executable, "-m", "lakeckpt", "faults", str(folder / "run"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert launcher.returncode == 0 and done.returncode == 0, said[-4000:] + done.stderr
    report = audit(open_storage(folder / "run"))
    problems = {
        "rows do not count once": job.counts() != Counter(range(rows)),
        f"the audit says {report.headline}": not report.exactly_once,
    }
    return Result(
        kills=tuple(found),
        weights=(folder / "weights.json").read_text(),
        problem="; ".join(name for name, holds in problems.items() if holds),
        faults=json.loads(done.stdout),
        said=said,
    )


class _Job:
    """What the ranks of a job in ``folder`` have noted. `kill` kills one of them."""

    def __init__(self, folder: Path, ranks: int, launcher: subprocess.Popen[bytes]) -> None:
        self._folder, self._ranks, self._launcher = folder, ranks, launcher
        self._read = dict.fromkeys(range(ranks), 0)
        self._notes: list[dict[str, Any]] = []
        self._starts = 0

    def kill(self, chance: random.Random, *, at_most: int) -> list[Kill]:
        """Kill a rank once or twice, and wait until the job has finished a step that it had not finished before."""
        rank = chance.randrange(self._ranks)
        finished = self._kill_at("step", rank, chance)
        if at_most == 1 or chance.randrange(_OFTEN):
            return [self._gone_on("step", rank, finished)]
        kind, other = chance.choice(_OTHERS), chance.randrange(self._ranks)
        finished = max(finished, self._kill_at(kind, other, chance))
        felt = self._gone_on("step", rank, finished)
        return [felt, replace(felt, kind=kind, rank=other, finished=felt.restored)]

    def _kill_at(self, kind: Kind, rank: int, chance: random.Random) -> int:
        """Kill ``rank`` at a moment of a kind; the furthest step that was finished by any."""
        if kind == "step":
            target = self._finished() + chance.randrange(2, 6)
            self._until(lambda: self._finished() >= target, f"step {target}")
        note = self._started(kind, rank)
        time.sleep(chance.uniform(0.0, _LATEST_S[kind]))
        os.kill(note["pid"], signal.SIGKILL)
        self._starts = note["start"] + 1
        self._until(lambda: any(one["start"] >= self._starts for one in self._noted("script")), "the next start")
        return self._finished()

    def _started(self, kind: Kind, rank: int) -> dict[str, Any]:
        """The note of ``rank`` in the current start that the moment follows."""
        what = {"step": "finished", "restore": "restore", "start": "script"}[kind]

        def found() -> list[dict[str, Any]]:
            return [one for one in self._noted(what) if one["rank"] == rank and one["start"] >= self._starts]

        self._until(lambda: bool(found()), f"{what} of rank {rank} in start {self._starts}")
        return found()[-1]

    def _gone_on(self, kind: Kind, rank: int, finished: int) -> Kill:
        """Wait for the first step of the next start."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self._noted("finished") if one["start"] >= self._starts]

        self._until(lambda: bool(found()), "the first step of the next start")
        first = min(found(), key=lambda one: float(one["at"]))
        restored = [one for one in self._noted("restored") if one["start"] == first["start"]]
        before = [one["at"] for one in self._noted("finished") if one["start"] < self._starts]
        return Kill(
            kind=kind,
            rank=rank,
            finished=finished,
            restored=min(one["step"] for one in found() if one["start"] == first["start"]) - 1,
            felt_s=first["at"] - max(before, default=first["at"]),
            passed_over=tuple(restored[0]["passed_over"]),
        )

    def _finished(self) -> int:
        furthest = dict.fromkeys(range(self._ranks), 0)
        for one in self._noted("finished"):
            furthest[one["rank"]] = max(furthest[one["rank"]], one["step"])
        return min(furthest.values())

    def _noted(self, what: str) -> Iterator[dict[str, Any]]:
        for rank in range(self._ranks):
            path = self._folder / f"notes-{rank}.jsonl"
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._read[rank])
                for line in file:
                    if line.endswith(b"\n"):
                        self._read[rank] += len(line)
                        self._notes.append(json.loads(line))
        return (one for one in self._notes if one["what"] == what)

    def counts(self) -> Counter[int]:
        """How often each row counts, in what the newest start of each step used."""
        newest = {(one["rank"], one["step"]): one for one in self._noted("used")}
        return Counter(number for one in newest.values() for number in one["ids"])

    def _until(self, holds: Any, what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            if self._launcher.poll() is not None or time.monotonic() > end:
                said = (self._folder / "said.txt").read_text(errors="replace")
                raise AssertionError(f"waited for {what}: the launcher ended, or it took too long\n{said[-4000:]}")
            time.sleep(0.005)


def main(folder: Path) -> None:
    """The training script."""
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes = os.open(folder / f"notes-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, **facts: object) -> None:
        line = {"what": what, "rank": rank, "start": start, "pid": os.getpid(), "at": time.time(), **facts}
        os.write(notes, json.dumps(line).encode() + b"\n")

    note("script")
    import torch
    import torch.distributed as dist

    import lakeckpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(folder / "table", batch_size=BATCH, shuffle=True, seed=3))
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    with lakeckpt.CheckpointManager(folder / "run", state, persist_every=50, capture_every=1) as manager:
        note("restore")
        done = manager.restore()
        report = manager.restore_report
        note("restored", step=done, passed_over=report.passed_over if report else ())
        for batch in loader if loader.epoch == 0 else ():
            if not (folder / "hurry").exists():
                time.sleep(STEP_S)
            done += 1
            note("used", step=done, ids=batch["id"].tolist())  # before others get the gradients: their state has them
            optimizer.zero_grad()
            trained(batch["x"][:, None]).square().sum().backward()
            optimizer.step()
            manager.step(batch)
            note("finished", step=done)
    if rank == 0:
        (folder / "weights.json").write_text(json.dumps([one.tolist() for one in model.parameters()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
