"""Which cut do the agents of a job persist when its trainers have died?  The newest one that every rank has complete.

Each agent says which steps lie complete in its rank's arena, and up to which step it knows commits; all hear the same
answer. Ranks may be a step apart when they die: what one of them has alone is of no use. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lakeckpt.checkpoint.fields import fields_of, number, taken
from lakeckpt.checkpoint.parts import PARTS, SaveId
from lakeckpt.checkpoint.records import RecordTalk
from lakeckpt.checkpoint.waiting import Waiter
from lakeckpt.lake.storage import Storage
from lakeckpt.wire.codec import dumps, loads

__all__ = ["WILL", "agree_on_will", "will_folder"]

WILL = 999_999
"""The number of the save that is a last will: behind all that a trainer ordered."""
_KIND, _VERSION = "will", (1, 0)
_PAUSE_S = 5.0


def will_folder(attempt: int) -> str:
    """Where the agents of an attempt say which cuts they have."""
    return f"{PARTS}/{_talk_of(attempt).folder}"


def agree_on_will(
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
    """The step to persist: the newest of ``steps`` that all ranks have, if it is behind what anyone has ``recorded``.

    Trainers need not die at once: one that waits for another's message may notice much later that there will be none,
    so that ``linger_s`` are added to the time that a save has, ``timeout_s``.
    ``still`` raises where it is not worth waiting for them any more. Raises `MissingRanksError` naming the ranks whose
    agents said nothing in time, and `StorageError`.
    """
    if rank == 0 and world_size > 1:  # those who wait for an order of a trainer that died see that it is over
        storage.put(f"{will_folder(attempt)}/{rank:05d}.dies", [b""])
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
    if max(steps, default=recorded) <= recorded:  # whatever the others have, there is nothing for all
        talk.settle(_to_bytes([], recorded))
        return None
    common, newest = _from_bytes(talk.combine(_to_bytes(steps, recorded), _merge))
    step = max(common, default=None)
    return step if step is not None and step > newest else None


def _talk_of(attempt: int) -> SaveId:
    return SaveId(attempt=attempt, step=0, number=WILL)


def _merge(messages: Sequence[bytes]) -> bytes:
    every = [_from_bytes(message) for message in messages]
    common = set.intersection(*(set(steps) for steps, _ in every))
    return _to_bytes(sorted(common), max(recorded for _, recorded in every))


def _to_bytes(steps: Sequence[int], recorded: int) -> bytes:
    return dumps({"steps": list(steps), "recorded": recorded}, kind=_KIND, version=_VERSION)


def _from_bytes(data: bytes) -> tuple[list[int], int]:
    plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "a last will")
    return taken(plain, "steps", list), number(plain, "recorded")
