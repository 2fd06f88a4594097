"""The law of storages, shipped: a right store of a user's own passes, and each way to be wrong is caught."""

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
from lakeckpt.lake.storage import open_storage
from lakeckpt.testing import StorageLaw


class Store:
    """A user's own: over a local folder, wrong in one way."""

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


class TestStore(StorageLaw):
    @pytest.fixture
    def make_storage(self, tmp_path):
        return lambda: Store(tmp_path, WRONG)
'''


def failures(folder: Path, wrong: str) -> set[str]:
    (folder / "test_store.py").write_text(SUITE.replace("WRONG", repr(wrong)))
    path = os.pathsep.join([str(Path(lakeckpt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rf", "-k", "not large_object"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
    return {line.split("::")[-1].split(" ")[0].split("[")[0] for line in lines}


@pytest.mark.parametrize(
    ("wrong", "caught"),
    [
        ("nothing", None),
        ("lists the past", "test_a_listing_is_never_of_the_past"),
        ("reads one too many", "test_a_read_gives_the_bytes_of_its_range_that_exist"),
        ("shows what was torn", "test_what_the_callers_chunks_raise_goes_through_and_nothing_becomes_visible"),
        ("overwrites", "test_exactly_one_of_racing_conditional_puts_wins"),
        ("misses", "test_an_empty_place_lists_nothing_and_misses_everything"),
    ],
)
def test_a_store_is_held_to_the_law(tmp_path: Path, wrong: str, caught: str | None) -> None:
    found = failures(tmp_path, wrong)
    assert found == set() if caught is None else caught in found
