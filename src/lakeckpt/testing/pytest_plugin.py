"""This module gives a test suite that installs lakeckpt a fixture that makes tables, a marker and an option.

* ``lakeckpt_table`` is a factory: ``lakeckpt_table(files=((5, 3), (4,)), columns=("string",))`` writes the files of a
  `lakeckpt.testing.LakeSpec` into the test's ``tmp_path`` and opens them as a `lakeckpt.Table`.
* ``@pytest.mark.lakeckpt_offsets(n)`` (or ``"all"``) sets at how many offsets `lakeckpt.testing.assert_exactly_once`
  restores in this test, where its call does not set it.
* ``--lakeckpt-offsets=n|all`` sets the same for the whole run (a nightly job passes ``all``).

The entry point ``pytest11`` registers it. It imports nothing but pytest and a few small modules until a test uses
it, changes no other test, and collects nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lakeckpt.testing.offsets import VARIABLE, told

if TYPE_CHECKING:
    from lakeckpt.lake.table.table import Table

__all__ = ["lakeckpt_table", "pytest_addoption", "pytest_configure", "pytest_runtest_call"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--lakeckpt-offsets``."""
    group = parser.getgroup("lakeckpt", "exactly-once data loading")
    group.addoption(
        "--lakeckpt-offsets",
        metavar="N",
        default=None,
        type=_offsets,
        help="at how many offsets of an epoch lakeckpt.testing restores (a number, or 'all'; default 12)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "lakeckpt_offsets(n): at how many offsets lakeckpt.testing.assert_exactly_once restores ('all': each)",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Tell `assert_exactly_once` what this test, or this run, wants."""
    marker = item.get_closest_marker("lakeckpt_offsets")
    wanted = item.config.getoption("--lakeckpt-offsets", default=None) if marker is None else str(marker.args[0])
    if wanted is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = wanted
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


@pytest.fixture
def lakeckpt_table(tmp_path: Path) -> Callable[..., Table]:
    """A factory of tables: arguments are those of `lakeckpt.testing.LakeSpec`; each call makes another table."""
    made: list[Path] = []

    def make(**spec: Any) -> Table:
        from lakeckpt.lake.formats.dispatch import open_table
        from lakeckpt.testing.lakes import LakeSpec

        folder = tmp_path / f"lakeckpt-table-{len(made)}"
        made.append(folder)
        return open_table(LakeSpec(**spec).write(folder))

    return make


def _offsets(text: str) -> str:
    return str(told(text, "--lakeckpt-offsets"))
