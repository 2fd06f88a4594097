"""No test depends on luck, unless new examples are asked for: see `tests/conftest.py`."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def test_examples_are_the_same_in_every_run_unless_new_ones_are_asked_for() -> None:
    asks_for_new = os.environ.get("HYPOTHESIS_PROFILE", "default") in ("soak", "nightly")

    @settings(max_examples=7)
    @given(st.integers())
    def somewhere(number: int) -> None:
        """As tests are that set something of their own."""

    for chosen in (settings(), somewhere._hypothesis_internal_use_settings):  # type: ignore[attr-defined]
        assert chosen.derandomize is not asks_for_new
        assert chosen.database is None, "what an earlier run found must not decide whether this one passes"


@pytest.mark.parametrize("time", [1, 2])
def test_every_test_begins_with_the_same_random_states(time: int) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.rand() == np.random.RandomState(0).rand()
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
