"""The root of the repository holds what belongs there: no test and no script writes into it."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELD = {
    ".ci",
    ".git",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
}
HELD |= {"benchmarks", "docs", "pyproject.toml", "requirements", "src", "tests", "tox.ini"}


def test_nothing_is_left_in_the_root() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()]
    found = {one.name for one in ROOT.iterdir() if not any(fnmatch(one.name, pattern) for pattern in ignored)}
    assert found <= HELD, f"{sorted(found - HELD)} in {ROOT}: give what wrote it a folder of its own, such as tmp_path"
    assert not (found and HELD - found - {".git", ".ci"})
