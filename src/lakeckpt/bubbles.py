"""This module lets captures move while a rank waits: `Bubbles` watches what a training script waits for."""

from __future__ import annotations

from lakeckpt.checkpoint.bubbles.watch import Bubbles

__all__ = ["Bubbles"]
