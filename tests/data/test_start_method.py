"""Workers of a table in an object store are started by forkserver, and what cannot reach them is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import Batch
from lakeckpt.data.workers.start_method import check_picklable, worker_context
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.object_store import ObjectStorage
from tests.data.reading import ROWS, flat, loader_of

NOT_FORKED = {"multiprocessing_context": "forkserver"}


def test_only_workers_of_object_stores_are_started_otherwise_than_torch_would(tmp_path: Path) -> None:
    store = ObjectStorage.__new__(ObjectStorage)
    assert worker_context(None, LocalStorage(tmp_path)) is None
    assert worker_context(None, store).get_start_method() == "forkserver"
    assert worker_context("spawn", store) == "spawn"


def kept(batch: Batch) -> Batch:
    return batch


def local() -> Callable[[Batch], Batch]:
    return lambda batch: batch


@pytest.mark.parametrize("options", [{}, {"batch_size": None}])
def test_a_transform_that_cannot_be_pickled_is_refused_before_a_worker_starts(
    lake: Path, options: dict[str, Any]
) -> None:
    loader = loader_of(lake, num_workers=1, transform=local(), loader=NOT_FORKED, **options)
    with pytest.raises(ConfigError, match=r"transform= cannot reach .* forkserver.*top of a module"):
        next(iter(loader))
    loader = loader_of(lake, num_workers=1, loader={**NOT_FORKED, "worker_init_fn": local()}, **options)
    with pytest.raises(ConfigError, match="worker_init_fn= cannot reach"):
        next(iter(loader))


def test_what_can_be_pickled_reaches_workers_that_are_not_forked(lake: Path) -> None:
    assert sorted(flat(loader_of(lake, num_workers=1, transform=kept, loader=NOT_FORKED))) == list(range(ROWS))


def test_a_function_of_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(main, "in_a_cell", kept, raising=False)
    monkeypatch.setattr(kept, "__module__", "__main__")
    monkeypatch.setattr(kept, "__qualname__", "in_a_cell")
    context = multiprocessing.get_context("spawn")
    with pytest.raises(ConfigError, match="notebook"):
        check_picklable(context, {"transform": kept})
    check_picklable(multiprocessing.get_context("fork"), {"transform": kept})


UNGUARDED = """
import sys
from lakeckpt import LakeDataset, LakeLoader

for batch in LakeLoader(LakeDataset(sys.argv[1], batch_size=4), num_workers=1, multiprocessing_context=sys.argv[2]):
    pass
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.soak
def test_a_script_without_a_guard_says_what_to_do(lake: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "main.py"
    script.write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, script, lake, method], capture_output=True, timeout=280, text=True)
    assert ran.returncode == 1 and "if __name__ == '__main__':" in ran.stderr.splitlines()[-1], ran.stderr
