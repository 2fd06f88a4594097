"""This module chooses the cut of the final save, which the agents of a job make after their trainers have died.

Each agent writes which cuts lie complete in its rank's arena, and up to which step it knows commits. All read the same
answer, and decide alike (`lakeckpt.recovery.decide`): the newest cut that every rank has. Ranks may be a step apart
when they die. Imports without torch, and starts no threads but those of `RecordTalk`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.lake.storage.base import Storage
from lakeckpt.recovery.decide import decide
from lakeckpt.recovery.facts import CutId, Holding, NodeFacts
from lakeckpt.tracking.waiting import Waiter

__all__ = ["FINAL", "agree_on_final_save", "final_folder"]

FINAL = 999_999
"""The number of the final save: behind all that a trainer ordered."""
_PAUSE_S = 5.0
_HELD, _RECORDED = "held", "recorded"


def final_folder(attempt: int) -> str:
    """Return the folder in which the agents of an attempt write which cuts they have."""
    return f"{PARTS}/{_talk_of(attempt).folder}"


def agree_on_final_save(
    storage: Storage,
    attempt: int,
    cuts: Mapping[CutId, bytes],
    recorded: int,
    *,
    rank: int,
    world_size: int,
    waiter: Waiter,
    timeout_s: float,
    linger_s: float,
    obstacles: Callable[[], None],
) -> int | None:
    """Return the step to persist: the newest of ``cuts`` (with their digests) that all ranks have, if it is newer than
    what any rank has ``recorded``; else None.

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
    held = (Holding(cut=cut, digest=digest, world=world_size, ranks=(rank,)) for cut, digest in cuts.items())
    facts = {_HELD: NodeFacts(node="", ranks=(rank,), holdings=tuple(held)).to_text(), _RECORDED: str(recorded)}
    if max((cut.step for cut in cuts), default=recorded) <= recorded:  # there is nothing for all
        talk.state_alone(facts)
        return None
    tally = talk.everyone(facts)
    newest = max(map(int, tally.facts[_RECORDED]))
    nodes = [NodeFacts.from_text(text) for text in tally.facts[_HELD]]
    found = decide(nodes, world_size=world_size, takes=lambda cut: cut.step > newest)
    return None if found.cut is None else found.cut.step


def _talk_of(attempt: int) -> SaveId:
    return SaveId(attempt=attempt, step=0, number=FINAL)
