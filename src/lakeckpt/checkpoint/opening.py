"""This module makes the capture engine and the agent of a trainer, for one attempt.

The agent is a process, which opens storage by its URL. Where storage is an object, or has options that no message can
hold, a thread of the trainer persists instead, and ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lakeckpt import __version__
from lakeckpt.checkpoint.agent.generations import Generations, digest_of_run, identity_of
from lakeckpt.checkpoint.agent.link import LINGER_S, AgentLike, AgentLink, InnerAgent
from lakeckpt.checkpoint.agent.orders import Begin
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.gate import Gate
from lakeckpt.checkpoint.consumed.tracks import Journal, ReaderTrack
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.errors import UnsupportedValue
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import Waiter
from lakeckpt.wire.envelope import dumps

__all__ = ["Place", "open_background"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run lies: ``storage``, and how another process opens it. ``uri`` is None where none can."""

    storage: Storage
    uri: str | None
    storage_options: Mapping[str, Any]


def open_background(
    objects: Mapping[str, Any],
    place: Place,
    exchange: Exchange,
    attempt: Attempt,
    *,
    arenas: ArenaFolder,
    step: int,
    tracks: Mapping[str, ReaderTrack],
    journal: Journal,
    settings: Settings,
    waiter: Waiter,
    gate: Gate | None = None,
) -> Background:
    """What captures ``objects`` into ``arenas`` and persists them, for a history that goes on after ``step``.

    ``gate`` says when slices may move; None: at once.

    Raises `AgentError` where no agent can be started, `ArenaError` where the folder cannot hold arenas.
    """
    arenas.make()
    digest = digest_of_run(attempt.run, place.storage)
    identity = identity_of(digest, rank=exchange.rank, world_size=exchange.world_size)
    agent = _agent(place, attempt, exchange, identity=identity, arenas=arenas, settings=settings, waiter=waiter)
    return Background(
        CaptureEngine(
            objects,
            identity,
            folder=arenas,
            step=step,
            gate=gate,
            generations=_generations(exchange.world_size),
            checksummer=lambda: agent.checksummer,
        ),
        agent,
        Generations(arenas, identity),
        exchange,
        attempt,
        tracks=tracks,
        journal=journal,
        waiter=waiter,
        timeout_s=settings.timeout_s,
    )


def _generations(world_size: int) -> int:
    """How many generations an arena has: the one being persisted, the newest, and the one being filled; with several
    ranks also that before the newest, which another rank may have to go back to."""
    return 3 if world_size == 1 else 4


def _agent(
    place: Place,
    attempt: Attempt,
    exchange: Exchange,
    *,
    identity: ArenaIdentity,
    arenas: ArenaFolder,
    settings: Settings,
    waiter: Waiter,
) -> AgentLike:
    if place.uri is not None and _fits_a_document(place.storage_options):
        return AgentLink(
            Begin(
                library=__version__,
                uri=place.uri,
                storage_options=place.storage_options,
                run=attempt.run,
                digest=identity.run,
                attempt=attempt.number,
                last=attempt.last,
                parent=attempt.parent,
                recorded=attempt.recorded,
                seed=attempt.seed,
                rank=exchange.rank,
                world_size=exchange.world_size,
                arenas=arenas.path,
                keep=settings.keep,
                verify=settings.verify,
                timeout_s=float(settings.timeout_s),
                linger_s=LINGER_S,
            )
        )
    return InnerAgent(
        place.storage,
        replace(attempt),
        generations=Generations(arenas, identity),
        rank=exchange.rank,
        world_size=exchange.world_size,
        settings=settings,
        waiter=waiter,
    )


def _fits_a_document(options: Mapping[str, Any]) -> bool:
    try:
        dumps(dict(options), kind="value", version=(1, 0))
    except UnsupportedValue:
        return False
    return True
