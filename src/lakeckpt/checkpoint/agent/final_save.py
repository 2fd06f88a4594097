"""This module chooses the cut of the final save, which the agents of a job make after their trainers have died.

Each agent writes which steps lie complete in its rank's arena, and up to which step it knows commits. All read the same
answer: the newest step that every rank has. Ranks may be a step apart when they die. Imports without torch, and starts
no threads but those of `RecordTalk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lakeckpt.checkpoint.format.fields import fields_of, number, taken
from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.waiting import Waiter
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["FINAL", "agree_on_final_save", "final_folder"]

FINAL = 999_999
"""The number of the final save: higher than that of any order of a trainer."""
_KIND, _VERSION = "final_save", (1, 0)
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
    still: Callable[[], None],
) -> int | None:
    """Return the step to persist: the newest of ``steps`` that all ranks have, if it is newer than what any rank has
    ``recorded``; else None.

    Trainers need not die at once: a trainer that waits for another's message notices the death when its own timeout is
    over. So ``linger_s`` are added to the time that a save has, ``timeout_s``. ``still`` raises where waiting has
    become pointless. Raises `MissingRanksError` naming the ranks whose agents wrote nothing in time, and
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
        timeout_s=timeout_s,
        linger_s=linger_s,
        still=still,
        pause_s=min(_PAUSE_S, timeout_s / 4),  # so that all begin to persist at about the same time
    )
    if max(steps, default=recorded) <= recorded:  # no step can be newer on all ranks
        talk.settle(_to_bytes([], recorded))
        return None
    common, newest = _from_bytes(talk.combine(_to_bytes(steps, recorded), _merge))
    step = max(common, default=None)
    return step if step is not None and step > newest else None


def _talk_of(attempt: int) -> SaveId:
    return SaveId(attempt=attempt, step=0, number=FINAL)


def _merge(messages: Sequence[bytes]) -> bytes:
    every = [_from_bytes(message) for message in messages]
    common = set.intersection(*(set(steps) for steps, _ in every))
    return _to_bytes(sorted(common), max(recorded for _, recorded in every))


def _to_bytes(steps: Sequence[int], recorded: int) -> bytes:
    return dumps({"steps": list(steps), "recorded": recorded}, kind=_KIND, version=_VERSION)


def _from_bytes(data: bytes) -> tuple[list[int], int]:
    plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "a record of the final save")
    return taken(plain, "steps", list), number(plain, "recorded")
