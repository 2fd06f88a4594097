"""Tables for the tests of ``lakeckpt.data``: written once per session, read by all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakeckpt.testing import LakeSpec

UNEVEN = LakeSpec(files=((7, 0, 5), (), (9, 4, 1), (11,)), columns=("string",))
"""37 rows in uneven row groups, with empty ones and an empty file."""


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`UNEVEN`, written."""
    return UNEVEN.write(tmp_path_factory.mktemp("uneven"))
