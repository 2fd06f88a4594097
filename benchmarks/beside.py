"""This benchmark compares two commits side by side: ``python -m benchmarks.beside [COMMIT] [--only CASE …]``.

The source of ``COMMIT`` (default: the last commit before the house was made simple) is taken from git. One process runs
it, and another process runs the working tree. Both read the same tables and write into folders of the same disk. They
take turns in every round, in changing order, and use public names only. The default commit needs pycurl: install it
with pip. The table shows the seconds of both, and the speed of the working tree as a part of the other's: the median of
the rounds, with quartiles, and the same of processor time, which other work on the machine disturbs less. Cases:

* ``read …``: one epoch in process, of numeric columns, tokens and images, in order and shuffled; at least 0.95.
* ``workers …``: one epoch with two workers that live on; at least 0.85.
* ``save``: a synchronous save of a model, from memory to the commit; at least 0.95.
* ``capture``: what a capture takes of the training thread, beside the bytes of its arena; no more than before.

The processes end with the benchmark.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from benchmarks.places import place_for_a_run

BEFORE = "12691dd8767b83ef085b0e18a936d0386a6109dd"
ROOT = Path(__file__).parents[1]
TABLES = ("tabular", "tokens", "images")
CASES = [
    *(f"read {name}{how}" for name in TABLES for how in ("", ", shuffled")),
    *(f"workers {name}{how}" for name in TABLES for how in ("", ", shuffled")),
    "save",
    "capture",
]
TENSORS = 64
_SHARE = 0.2
"""How much of the tables of `benchmarks.reading` is read: an epoch in process takes about half a second."""


# --- one side: a process that runs the cases it is asked for


class Side:
    """The cases, in the process that has one of the sources on its path."""

    def __init__(self, folder: Path, tables: Path, mebibytes: int) -> None:
        self._folder, self._tables, self._mebibytes = folder, tables, mebibytes
        self._loaders: dict[str, Any] = {}

    def run(self, case: str) -> dict[str, float]:
        """Run a case once. Returns seconds, and for a capture the bytes of the arena."""
        kind, _, name = case.partition(" ")
        run: Callable[..., dict[str, float]] = getattr(self, f"_{kind}")
        return run(*filter(None, [name]))

    def _read(self, name: str) -> dict[str, float]:
        return self._epoch(name, num_workers=0)

    def _workers(self, name: str) -> dict[str, float]:
        return self._epoch(name, num_workers=2)

    def _epoch(self, name: str, *, num_workers: int) -> dict[str, float]:
        from benchmarks.reading import KINDS
        from lakeckpt import LakeDataset, LakeLoader

        table, _, shuffled = name.partition(", ")
        kind = next(one for one in KINDS if one.name == table)
        key = f"{name} {num_workers}"
        if key not in self._loaders:
            dataset = LakeDataset(str(self._tables / table), batch_size=kind.batch_size, shuffle=bool(shuffled))
            how = {"num_workers": num_workers, "persistent_workers": True} if num_workers else {}
            self._loaders[key] = LakeLoader(dataset, **how)
            for _ in self._loaders[key]:  # memory of the system is touched, and workers are started
                pass
        begin_s, used_s = time.perf_counter(), time.process_time()
        for _ in self._loaders[key]:
            pass
        found = {"seconds": time.perf_counter() - begin_s}
        return found if num_workers else {**found, "processor": time.process_time() - used_s}

    def _model(self) -> Any:
        import torch

        elements = self._mebibytes * 2**20 // 4 // TENSORS
        return torch.nn.ParameterList(torch.randn(elements) for _ in range(TENSORS))

    def _save(self) -> dict[str, float]:
        from lakeckpt import CheckpointManager

        run = self._folder / "saved"
        with CheckpointManager(str(run), {"model": self._model()}, persist_every=10**9) as manager:
            manager.restore()
            manager.step()
            begin_s, used_s = time.perf_counter(), time.process_time()
            manager.save()
            found = {"seconds": time.perf_counter() - begin_s, "processor": time.process_time() - used_s}
        shutil.rmtree(run)
        return found

    def _capture(self) -> dict[str, float]:
        import torch

        from lakeckpt import CheckpointManager

        model, stalls = self._model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # without gradients its step takes no time
        state = {"model": model, "optimizer": optimizer}
        run, arenas = self._folder / "captured", self._folder / "arenas"
        with CheckpointManager(
            str(run), state, persist_every=10**9, capture_every=1, arenas=str(arenas), fail_after=0
        ) as manager:
            manager.restore()
            for number in range(12):
                begin_s = time.perf_counter()
                manager.step()
                stepped_s = time.perf_counter()
                time.sleep(max(0.1, self._mebibytes / 1000))  # forward and backward, in which the copy moves
                update_s = time.perf_counter()
                optimizer.step()
                if number >= 4:  # the arena is there, and touched
                    stalls.append(stepped_s - begin_s + time.perf_counter() - update_s)
            size_bytes = sum(one.stat().st_blocks * 512 for one in arenas.rglob("*") if one.is_file())
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(arenas, ignore_errors=True)
        return {"seconds": statistics.median(stalls), "bytes": size_bytes}


def answer(folder: str, tables: str, mebibytes: str) -> None:
    """Run the cases that are named on standard input, a line each, and print what came of each as JSON."""
    side = Side(Path(folder), Path(tables), int(mebibytes))
    for line in sys.stdin:
        print(json.dumps(side.run(line.strip())), flush=True)


# --- both sides


@contextmanager
def started(source: Path, folder: Path, tables: Path, mebibytes: int) -> Iterator[Callable[[str], dict[str, float]]]:
    """Start a process over ``source``, and yield what runs a case in it."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import sys; from benchmarks.beside import answer; answer(*sys.argv[1:])",
    ]
    command += [str(folder), str(tables), str(mebibytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        to, back = process.stdin, process.stdout

        def run(case: str) -> dict[str, float]:
            print(case, file=to, flush=True)
            found: dict[str, float] = json.loads(back.readline())
            return found

        try:
            yield run
        finally:
            to.close()
            process.wait()


def source_of(commit: str, folder: Path) -> Path:
    """Write the package of a commit into ``folder``, and return the folder that holds it."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def main() -> int:
    """Run the cases and show a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default=BEFORE)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these texts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, default=512, help="the size of the model")
    parser.add_argument("--place", help="where folders are made (default: where temporary files lie)")
    parser.add_argument("--json", type=Path, help="where figures are written")
    asked = parser.parse_args()
    cases = [case for case in CASES if not asked.only or any(text in case for text in asked.only)]
    with place_for_a_run("beside", under=asked.place or tempfile.gettempdir()) as place:
        _write_tables(place / "tables")
        before = source_of(asked.commit, place / "before")
        with (
            started(before, place / "a", place / "tables", asked.mebibytes) as old,
            started(ROOT / "src", place / "b", place / "tables", asked.mebibytes) as new,
        ):
            rows = [_compared(case, old, new, asked.rounds) for case in cases]
    _report(rows, asked.commit)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"before": asked.commit, "cases": rows}, indent=1) + "\n")
    return 0


def _write_tables(folder: Path) -> None:
    from benchmarks.reading import KINDS, written

    for kind in KINDS:
        (folder / kind.name).mkdir(parents=True)
        written(kind, folder / kind.name, _SHARE)


def _compared(case: str, old: Any, new: Any, rounds: int) -> dict[str, Any]:
    pairs = []
    for number in range(rounds + 1):
        order = (old, new) if number % 2 else (new, old)
        found = {id(side): side(case) for side in order}
        pairs.append((found[id(old)], found[id(new)]))
    pairs = pairs[1:]  # the first round is warm-up
    before, after = ([one[side]["seconds"] for one in pairs] for side in (0, 1))
    quartiles = statistics.quantiles([a / b for a, b in zip(before, after, strict=True)], n=4, method="inclusive")
    used = [one[0]["processor"] / one[1]["processor"] for one in pairs if "processor" in one[0]]
    sizes = {f"{name}_bytes": int(pairs[-1][side].get("bytes", 0)) for side, name in enumerate(("before", "after"))}
    return {
        "case": case,
        "before_s": before,
        "after_s": after,
        "speed": quartiles[1],
        "quartiles": quartiles,
        "processor": statistics.median(used) if used else None,
        **sizes,
    }


def _report(rows: list[dict[str, Any]], commit: str) -> None:
    show(
        f"the working tree beside {commit[:12]}",
        ["case", "before, ms", "now, ms", "speed", "quartiles", "by processor", "MB before", "MB now"],
        [
            [
                row["case"],
                f"{statistics.median(row['before_s']) * 1e3:,.2f}",
                f"{statistics.median(row['after_s']) * 1e3:,.2f}",
                f"{row['speed']:.2f}",
                f"{row['quartiles'][0]:.2f} to {row['quartiles'][2]:.2f}",
                "" if row["processor"] is None else f"{row['processor']:.2f}",
                *(f"{row[name] / 1e6:,.0f}" if row[name] else "" for name in ("before_bytes", "after_bytes")),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
