"""What all tests share: one thread per process, and hypothesis profiles.

HYPOTHESIS_PROFILE chooses the profile (default, ci, nightly); without it, CI=true means ci.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores; before torch and numpy load

from hypothesis import HealthCheck, settings

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
