"""This module sets what all tests share: one thread per process, chance, and tables that properties ask for.

No test depends on luck: Hypothesis thinks of the same examples in every run, and each test begins with the same random
states. HYPOTHESIS_PROFILE=soak (`make test-soak`) and HYPOTHESIS_PROFILE=nightly think of new examples in every run.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores; before torch and numpy load

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.examples import SOAK

if TYPE_CHECKING:
    from tests.lakes import LakeSpec

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]  # both measure the machine, not the code

pytest.register_assert_rewrite("tests.faults.storage_law")

settings.register_profile(
    "default",
    deadline=None,
    max_examples=10,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_CHECKS,
)
settings.register_profile("soak", settings.get_profile("default"), derandomize=False, max_examples=SOAK)
settings.register_profile("mutants", settings.get_profile("default"), max_examples=60)
settings.register_profile("nightly", settings.get_profile("soak"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "default")


def pytest_runtest_setup() -> None:
    """Every test begins with the same random states and no footers, whichever tests ran before it in this process."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "lakeckpt.lake.parquet.kept_footers" in sys.modules:
        sys.modules["lakeckpt.lake.parquet.kept_footers"].kept_footers.forget()


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
