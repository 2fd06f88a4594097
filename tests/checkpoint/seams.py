"""This module makes checkpoint managers that talk over a given exchange and wait by a given clock."""

from __future__ import annotations

from typing import Any

from lakeckpt import CheckpointManager
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import Waiter

__all__ = ["manager_with"]


def manager_with(
    uri: Any, state: Any, *, exchange: Exchange | None = None, waiter: Waiter | None = None, **options: Any
) -> CheckpointManager:
    """Return a `CheckpointManager` with ``options``, and with these in place of its own exchange and clock."""

    class Manager(CheckpointManager):
        @staticmethod
        def _talk(group: Any, timeout_s: float, *, alone: bool) -> tuple[Exchange, Waiter]:
            own = CheckpointManager._talk(group, timeout_s, alone=alone) if exchange is None or waiter is None else None
            return exchange or own[0], waiter or own[1]  # type: ignore[index]

    return Manager(uri, state, **options)
