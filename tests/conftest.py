"""What all tests share: one thread per process, hypothesis profiles, and tables that properties ask for.

HYPOTHESIS_PROFILE chooses the profile (default, ci, nightly); without it, CI=true means ci.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores; before torch and numpy load

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from lakeckpt.testing import LakeSpec

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]  # both measure the machine, not the code

settings.register_profile("default", deadline=None, max_examples=60, suppress_health_check=_CHECKS)
settings.register_profile(
    "ci",
    settings.get_profile("default"),
    derandomize=True,
    database=None,
    print_blob=True,
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=3000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_collection_finish() -> None:
    """What was imported never becomes garbage: no collection needs to look through it."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it does become garbage: libraries complain of what is left of them."""
    gc.unfreeze()


@pytest.fixture(scope="module")
def make_lake(tmp_path_factory: pytest.TempPathFactory) -> Callable[[LakeSpec], Path]:
    """Writes a table, each once."""
    made: dict[LakeSpec, Path] = {}

    def make(spec: LakeSpec) -> Path:
        if spec not in made:
            made[spec] = spec.write(tmp_path_factory.mktemp("lake"))
        return made[spec]

    return make
