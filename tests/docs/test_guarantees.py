"""The README's table of guarantees names tests: each of them exists, and each guarantee names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[list[str]]:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith(("| **always**", "| **if**", "| **never**"))
    ]


def test_every_guarantee_names_tests_that_exist() -> None:
    laws = (ROOT / "src" / "lakeckpt" / "testing").glob("*_law.py")  # shipped laws are tests by inheritance
    sources = [path.read_text(encoding="utf-8") for path in (*(ROOT / "tests").rglob("test_*.py"), *laws)]
    existing = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    named = [re.findall(r"`(test_\w+)`", row[-1]) for row in rows()]
    assert len(named) > 10
    assert sum(not tests for tests in named) <= 1, "only what is said not to hold may go without a test"
    missing = sorted({test for tests in named for test in tests} - existing)
    assert not missing, f"the README names tests that are not there: {missing}"
