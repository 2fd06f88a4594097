"""Workers read on when a signal reaches them that their main process handles, until the main process ends them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.data.workers.signals import ignore_in_workers
from tests.frameworks.harness import write_table
from tests.patience import PATIENCE_S

ROWS = 400


@pytest.fixture
def ignored() -> Iterator[None]:
    ignore_in_workers([signal.SIGTERM, signal.SIGUSR1])
    yield
    ignore_in_workers([])


def processes(loader: lakeckpt.LakeLoader) -> list[Any]:
    assert loader._workers is not None
    return [one._process for one in loader._workers._workers]


def loader_of(folder: Path, method: str) -> lakeckpt.LakeLoader:
    dataset = lakeckpt.LakeDataset(write_table(folder / "table", rows=ROWS), batch_size=4)
    return lakeckpt.LakeLoader(
        dataset, num_workers=2, multiprocessing_context=method, persistent_workers=True, prefetch_factor=2
    )


def send(number: int, process: Any) -> None:
    """Send a signal from a process that is neither the worker's main process nor its parent."""
    subprocess.run(["/bin/kill", f"-{number}", str(process.pid)], check=True)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_that_gets_a_signal_of_the_job_reads_on_and_ends_with_the_loader(
    tmp_path: Path, ignored: None, method: str
) -> None:
    loader = loader_of(tmp_path, method)
    batches = iter(loader)
    ids = [row for _ in range(2) for row in next(batches)["id"].tolist()]  # one batch of each worker
    workers = processes(loader)
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            send(number, worker)
    ids += [row for batch in batches for row in batch["id"].tolist()]
    assert sorted(ids) == list(range(ROWS))
    for worker in workers:
        assert worker.is_alive()
        worker.terminate()  # as torch and multiprocessing do at the end of the main process
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
    del batches, loader


def test_a_worker_ends_by_a_signal_where_the_main_process_handles_none(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, "fork")
    next(iter(loader))
    worker = processes(loader)[0]
    send(signal.SIGTERM, worker)
    worker.join(PATIENCE_S)
    assert worker.exitcode == -signal.SIGTERM
