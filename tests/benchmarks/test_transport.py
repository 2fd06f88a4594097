"""The benchmark of transport reads a share as a restore does."""

from __future__ import annotations

from benchmarks import transport


def test_both_sides_of_each_pair_are_measured() -> None:
    found = transport.measured(mebibytes=1, pairs=1)
    assert len(found["bare"]) == len(found["share"]) == len(found["ratios"]) == 1 and found["ratios"][0] > 0
