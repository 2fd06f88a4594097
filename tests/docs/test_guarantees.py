"""The table of guarantees names tests: each exists and is run by ``make test``, and each guarantee names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_IN_MAKE_TEST = re.compile(r"pytest\.mark\.(soak|system|gpu|frameworks)\b")


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith(("| **always**", "| **if**", "| **never**"))
    ]


def names_run_of(path: Path) -> Iterator[str]:
    """Yield the names of the tests in ``path`` that ``make test`` runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    if any(mark.startswith("pytestmark") and NOT_IN_MAKE_TEST.search(mark) for mark in marks):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        if not any(NOT_IN_MAKE_TEST.match(ast.unparse(one)) for one in node.decorator_list):
            yield node.name


def test_every_guarantee_names_tests_that_make_test_runs() -> None:
    laws = (ROOT / "tests" / "faults").glob("*_law.py")  # laws are tests by inheritance
    run = {name for path in (*(ROOT / "tests").rglob("test_*.py"), *laws) for name in names_run_of(path)}
    named = [re.findall(r"`(test_\w+)`", row[-1]) for row in rows()]
    assert len(named) > 20
    unproved = [row for row, tests in zip(rows(), named, strict=True) if not tests]
    assert all(row[-1] in ("–", "`make test-system`", "`make test-frameworks`") for row in unproved), unproved
    missing = sorted({test for tests in named for test in tests} - run)
    assert not missing, f"docs/guarantees.md names tests that make test does not run: {missing}"
