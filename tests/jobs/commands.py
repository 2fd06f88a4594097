"""This module runs many cases of a real job for a command, some at a time, and prints a table of what the job did."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.frameworks.harness import free_port
from tests.patience import PATIENCE_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run_all` needs."""
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--only", default="", help="words that the name of a case has, such as 's3, renamed'")
    parser.add_argument("--json", type=Path, help="a file for the results")


def run_all(
    cases: Iterable[Any],
    run: Callable[[Any, Path, str], Any],
    line: Callable[[Any, Any], str],
    *,
    head: str,
    name: str,
    args: argparse.Namespace,
) -> int:
    """Run the cases, some at a time, and print a table, a ``line`` each; 1 if there is a problem, else 0.

    The log of a case with a problem is kept as ``<name>-<number>.log`` in the current folder."""
    chosen = [one for one in cases if all(word in str(one) for word in args.only.split(", "))]
    results = []
    with moto() as endpoint, tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:

        def one(numbered: tuple[int, Any]) -> tuple[dict[str, Any], str]:
            number, case = numbered
            own = Path(folder, str(number))
            own.mkdir()
            try:
                found = run(case, own, endpoint)
                row, text = {**asdict(case), **asdict(found)}, line(case, found)
            except AssertionError as error:
                row, text = {**asdict(case), "problem": str(error)}, f"{case} ✗ {error}"
            if row["problem"]:
                shutil.copy(own / "log.txt", f"{name}-{number}.log")
            return row, text

        print(head, flush=True)
        with ThreadPoolExecutor(args.at_once) as pool:
            for row, text in pool.map(one, enumerate(chosen)):
                results.append(row)
                print(text, flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps(results, indent=1))
    bad = sum(bool(one["problem"]) for one in results)
    print(f"{len(chosen) - bad} of {len(chosen)} kept the law")
    return int(bool(bad))


def until(holds: Callable[[], bool], log: Path, patience_s: float = PATIENCE_S) -> None:
    """Wait until something holds; after ``patience_s``, AssertionError with the end of the ``log``."""
    end = time.monotonic() + patience_s
    while not (log.exists() and holds()):
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.1)


@contextmanager
def moto() -> Iterator[str]:
    """Serve S3 while the block runs. Yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            end = time.monotonic() + PATIENCE_S
            while not _answers(port):
                assert time.monotonic() < end, "moto's server does not answer"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
