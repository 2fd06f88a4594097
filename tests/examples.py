"""This module says how many examples a property-based test draws: `make test` takes a quarter of what soak takes."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["SOAK", "examples"]

SOAK = 40
"""How many examples a test draws in `make test-soak` if it names no number."""


def examples(number: int) -> int:
    """Return how many examples to draw under the profile in use, for ``number`` in `make test-soak`; at least 3."""
    return max(3, number * settings.default.max_examples // SOAK)
