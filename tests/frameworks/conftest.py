"""The tests of this folder are collected by ``make test-frameworks`` alone: no other environment has the frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the folder unless ``-m frameworks`` was given."""
    return None if config.getoption("markexpr") == "frameworks" else True
