"""This module chooses the cut of the final save, which the agents of a job make after their trainers have died.

Each agent writes which steps lie complete in its rank's arena, and up to which step it knows commits. All read the same
answer: the newest step that every rank has. Ranks may be a step apart when they die. Imports without torch, and starts
no threads but those of `RecordTalk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.waiting import Waiter

__all__ = ["FINAL", "agree_on_final_save", "final_folder"]

FINAL = 999_999
"""The number of the final save: behind all that a trainer ordered."""
_PAUSE_S = 5.0


def final_folder(attempt: int) -> str:
    """Return the folder in which the agents of an attempt write which cuts they have."""
    return f"{PARTS}/{_talk_of(attempt).folder}"


def agree_on_final_save(
    storage: Storage,
    attempt: int,
    steps: Sequence[int],
    recorded: int,
    *,
    rank: int,
    world_size: int,
    waiter: Waiter,
    timeout_s: float,
    linger_s: float,
    obstacles: Callable[[], None],
) -> int | None:
    """Return the step to persist: the newest of ``steps`` that all ranks have, if it is newer than what any rank has
    ``recorded``; else None.

    Trainers need not die at once: a trainer that waits for another's message notices the death when its own timeout is
    over. So ``linger_s`` are added to the time that a save has, ``timeout_s``. ``obstacles`` raises if waiting is
    in vain. Raises `MissingRanksError` naming the ranks whose agents wrote nothing in time, and
    `StorageError`.
    """
    if rank == 0 and world_size > 1:  # so that agents stop waiting for orders of a dead trainer
        storage.put(f"{final_folder(attempt)}/{rank:05d}.dies", [b""])
    talk = RecordTalk(
        storage,
        _talk_of(attempt),
        rank=rank,
        world_size=world_size,
        waiter=waiter,
        timeout_s=timeout_s + linger_s,
        obstacles=obstacles,
        pause_s=min(_PAUSE_S, timeout_s / 4),  # so that all begin to persist at about the same time
    )
    facts = {"steps": " ".join(map(str, steps)), "recorded": str(recorded)}
    if max(steps, default=recorded) <= recorded:  # whatever the others have, there is nothing for all
        talk.state_alone(facts)
        return None
    tally = talk.everyone(facts)
    step = max(set.intersection(*(set(map(int, text.split())) for text in tally.facts["steps"])), default=None)
    newest = max(map(int, tally.facts["recorded"]))
    return step if step is not None and step > newest else None


def _talk_of(attempt: int) -> SaveId:
    return SaveId(attempt=attempt, step=0, number=FINAL)
