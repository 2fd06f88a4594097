"""Where the tests of this folder compute: LAKECKPT_TEST_DEVICE=cpu runs what needs no GPU of them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator

import pytest
import torch

__all__ = ["DEVICE", "MARKS", "arenas"]

DEVICE = os.environ.get("LAKECKPT_TEST_DEVICE", "cuda")
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def arenas() -> Iterator[str]:
    """A folder in host memory: files on a disk cannot be pinned everywhere."""
    path = f"/dev/shm/lakeckpt-test-{secrets.token_hex(8)}"
    yield path
    shutil.rmtree(path, ignore_errors=True)
