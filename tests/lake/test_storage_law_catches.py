"""The law of storages can fail: a right store passes, and each way to be wrong is caught."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lakeckpt

SUITE = '''
import pytest
from lakeckpt.errors import ObjectExists
from lakeckpt.lake.storage.open import open_storage
from tests.faults.storage_law import StorageLaw


class Store:
    """A store over a local folder, wrong in one way."""

    def __init__(self, folder, wrong):
        self.inner, self.wrong = open_storage(folder), wrong
        self.listed = {}

    def list(self, prefix=""):
        if self.wrong == "lists the past":
            return self.listed.setdefault(prefix, self.inner.list(prefix))
        return self.inner.list(prefix)

    def read(self, path, start=0, stop=None, *, etag=None):
        if self.wrong == "reads one too many" and stop is not None:
            return self.inner.read(path, start, stop + 1, etag=etag)
        return self.inner.read(path, start, stop, etag=etag)

    def put(self, path, chunks):
        if self.wrong == "shows what was torn":
            done = b""
            for chunk in chunks:
                done += bytes(chunk)
                self.inner.put(path, [done])
            return len(done)
        return self.inner.put(path, chunks)

    def put_new(self, path, data):
        if self.wrong == "overwrites":
            self.inner.put(path, [data])
        else:
            self.inner.put_new(path, data)

    def delete(self, path):
        if self.wrong == "misses" and not self.inner.list(path):
            raise KeyError(path)
        self.inner.delete(path)


WRONG = {}


@pytest.mark.parametrize("wrong", WRONG, scope="class")
class TestStore(StorageLaw):
    @pytest.fixture
    def make_storage(self, tmp_path, wrong):
        return lambda: Store(tmp_path, wrong)
'''


CAUGHT = {
    "nothing": None,
    "lists the past": "test_a_listing_is_never_of_the_past",
    "reads one too many": "test_a_read_gives_the_bytes_of_its_range_that_exist",
    "shows what was torn": "test_nothing_is_visible_before_a_put_returns",
    "overwrites": "test_exactly_one_of_racing_conditional_puts_wins",
    "misses": "test_an_empty_place_lists_nothing_and_misses_everything",
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tests that failed for stores that are wrong in each way, run once for all."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_store.py").write_text(SUITE.replace("{}", repr(list(CAUGHT))))
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(Path(lakeckpt.__file__).parents[1]), str(root), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rf", "-k", "not large_object"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return [line.split("::")[-1] for line in ran.stdout.splitlines() if line.startswith("FAILED")]


@pytest.mark.parametrize(("wrong", "caught"), CAUGHT.items())
def test_a_store_is_held_to_the_law(failed: list[str], wrong: str, caught: str | None) -> None:
    found = {line.partition("[")[0] for line in failed if f"{wrong}]" in line or f"[{wrong}" in line}
    assert found == set() if caught is None else caught in found
