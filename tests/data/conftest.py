"""Tables for the tests of ``lakeckpt.data``: written once per session, read by all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lakes import LakeSpec

UNEVEN = LakeSpec(files=((7, 0, 5), (), (9, 4, 1), (11,)), columns=("string",))
"""37 rows in uneven row groups, with empty ones and an empty file."""


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`UNEVEN`, written."""
    return UNEVEN.write(tmp_path_factory.mktemp("uneven"))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that pins by copying."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr("lakeckpt.data.workers.groups.pinned_copy", lambda slab: torch.from_numpy(slab).clone())
