"""This module makes what saves the cuts of a trainer, for one attempt: a `Saver`, or a capture engine and an agent.

The agent is a process, which opens storage by its URL. So a run that lies in a `Storage` of the user's own cannot be
captured: `place_of` refuses it.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from lakeckpt.checkpoint.agent.generations import Generations, digest_of_run, identity_of
from lakeckpt.checkpoint.agent.link import LINGER_S, AgentLink
from lakeckpt.checkpoint.agent.orders import Hello
from lakeckpt.checkpoint.arena.dividing import division_of, facts_of_node, nodes_of_replicas
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.fence import owners
from lakeckpt.checkpoint.capture.state_watch import estimated_bytes
from lakeckpt.checkpoint.consumed.tracks import Journal, ReaderTrack
from lakeckpt.checkpoint.copying.backups import Backup
from lakeckpt.checkpoint.peers.grouping import Copying, keeping_of, node_facts
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.publish import Publisher, Settings
from lakeckpt.checkpoint.sync_save import Saver
from lakeckpt.counters import RunCounters
from lakeckpt.errors import CaptureWarning, ConfigError, UnsupportedValue
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of
from lakeckpt.tracking.waiting import Waiter
from lakeckpt.wire.envelope import dumps

__all__ = ["Place", "open_saves", "opened", "place_of", "replica_facts", "settle"]


_LOG = logging.getLogger("lakeckpt")
_WITH_COPIES, _COPIES, _PARITY = 6, 2, 2 / 3
"""How many generations an arena has if other nodes keep copies; how many copies a node keeps of a share; and as how
many generations two slots of parity of four nodes count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run lies: ``storage``, and how another process opens it; where its captures lie, ``arenas``; and which
    ``backups`` are made of it. ``perceives``: agents end trainers that are stuck after a death; and after the loss of a
    node, if ``serves``: agents of several nodes may talk to each other. ``copies``: what nodes keep of each
    other's shares; None: nothing. ``watch``: what agents do about ranks that stand still."""

    storage: Storage
    uri: str
    storage_options: Mapping[str, Any]
    arenas: ArenaFolder
    backups: tuple[Backup, ...] = ()
    perceives: bool = True
    serves: bool = True
    copies: Copying | None = None
    watch: str | None = None


def opened(uri: object, storage_options: Mapping[str, Any] | None) -> Storage:
    """Return the storage of a run at ``uri``. `ConfigError` if that names no place."""
    if isinstance(uri, Storage):
        return uri
    if not isinstance(uri, (str, os.PathLike)):
        raise ConfigError(f"a run lies at a folder, a URL or in a Storage, got {uri!r}")
    return open_storage(uri, storage_options=storage_options)


def place_of(
    storage: Storage,
    uri: str | os.PathLike[str] | Storage,
    storage_options: Mapping[str, Any],
    arenas: str | os.PathLike[str] | None,
    backups: Collection[Backup] = (),
    perceives: bool = True,
    serves: bool = True,
    copies: Copying | None = None,
    watch: str | None = None,
) -> Place:
    """Return where a run lies that the user has named by ``uri``. `ConfigError` if another process cannot open it."""
    place = Place(
        storage=storage,
        uri="",
        storage_options={},
        arenas=ArenaFolder(arenas),
        backups=tuple(backups),
        perceives=perceives,
        serves=serves,
        copies=copies,
        watch=watch,
    )
    if isinstance(storage, LocalStorage):
        return replace(place, uri=storage.name)
    if isinstance(uri, Storage):
        raise ConfigError(
            f"capture_every needs the URL of the run, and got {uri!r}: the agent, a process of its own, opens the "
            "storage once more. Give the URL and storage_options=, or save synchronously, without capture_every"
        )
    options = dict(storage_options)
    try:
        dumps(options, kind="value", version=(1, 0))
    except UnsupportedValue as error:
        raise ConfigError(
            f"with capture_every, storage_options go to the agent, a process of its own, and must be plain values: "
            f"{error}. Give credentials by the environment or a file, or save synchronously, without capture_every"
        ) from error
    return replace(place, uri=os.fspath(uri), storage_options=options)


def open_saves(
    objects: Mapping[str, Any],
    storage: Storage,
    exchange: Exchange,
    attempt: Attempt,
    *,
    place: Place | None,
    step: int,
    tracks: Mapping[str, ReaderTrack],
    settings: Settings,
    waiter: Waiter,
    counters: RunCounters | None = None,
    gate: Gate | None = None,
) -> Saver | Background:
    """Return what saves ``objects`` and ``tracks``, for a history that goes on after ``step``: while training waits, or
    beside training if there is a ``place``.

    ``gate`` says when slices may move; None: at once. ``counters`` count captures.

    Raises `AgentError` if no agent can be started, `ArenaError` if the folder cannot hold arenas.
    """
    if gate is not None and counters is not None:
        counters.waits = gate.waits
    journal = Journal(tracks, step, pending=attempt.pending, recorded=attempt.recorded)
    if place is not None:
        engine, agent, generations = _open_agent(objects, place, exchange, attempt, step, settings, gate, counters)
        return Background(
            engine,
            agent,
            generations,
            exchange,
            attempt,
            tracks=tracks,
            journal=journal,
            waiter=waiter,
            timeout_s=settings.timeout_s,
        )
    publisher = Publisher(
        storage,
        attempt,
        rank=exchange.rank,
        world_size=exchange.world_size,
        settings=settings,
        waiter=waiter,
        refuse=lambda save: exchange.obstacles.refuse(save.number),
        tell=lambda save, error: exchange.obstacles.fail(save.number, error),
    )
    return Saver(publisher, storage, exchange, objects=objects, tracks=tracks, journal=journal)


def _open_agent(
    objects: Mapping[str, Any],
    place: Place,
    exchange: Exchange,
    attempt: Attempt,
    step: int,
    settings: Settings,
    gate: Gate | None,
    counters: RunCounters | None,
) -> tuple[CaptureEngine, AgentLink, Generations]:
    """Start what captures ``objects``, and the agent that persists captures."""
    _warn_of_others(objects)
    place.arenas.make()
    digest = digest_of_run(attempt.run, place.storage)
    identity = identity_of(digest, rank=exchange.rank, world_size=exchange.world_size)
    agent = AgentLink(
        Hello(
            uri=place.uri,
            storage_options=place.storage_options,
            attempt=attempt,
            settings=replace(settings, timeout_s=float(settings.timeout_s)),
            digest=digest,
            rank=exchange.rank,
            world_size=exchange.world_size,
            arenas=place.arenas.path,
            linger_s=LINGER_S,
            backups=tuple(map(asdict, place.backups)) if exchange.rank == 0 else (),
            perceives=place.perceives,
            next_rank=_next_node(exchange) if place.serves else -1,
            copies=place.copies is not None,
            watch=place.watch or "" if exchange.world_size > 1 else "",
            here=tuple(exchange.neighbours),
        )
    )
    engine = CaptureEngine(
        objects,
        identity,
        folder=place.arenas,
        step=step,
        gate=gate,
        generations=_generations(exchange, place.copies is not None),
        counters=counters,
        ranks_here=len(exchange.neighbours),
    )
    return engine, agent, Generations(place.arenas, identity)


def _next_node(exchange: Exchange) -> int:
    """Return the first rank of the node that follows this rank's node; -1 if this rank is not the first of its node, or
    its node is the only one, or has ranks that do not follow each other."""
    ranks = exchange.neighbours
    first, last = ranks[0], ranks[-1]
    if exchange.rank != first or len(ranks) == exchange.world_size or len(ranks) != last - first + 1:
        return -1
    return (last + 1) % exchange.world_size


def _warn_of_others(objects: Mapping[str, Any]) -> None:
    """Warn if another engine captures some of the ``objects``, too."""

    def shared() -> list[str]:
        theirs = {id(one) for each in owners() if isinstance(each, CaptureEngine) for one in each.objects.values()}
        return sorted(name for name, one in objects.items() if id(one) in theirs)

    if shared():
        gc.collect()  # nobody may hold the other one any more
    if names := shared():
        text = f"another CheckpointManager, which was not closed, captures {', '.join(map(repr, names))}, too: each "
        text += "optimizer step waits for both, and both take memory. Close the other one first, or use it in a `with`"
        warnings.warn(text, CaptureWarning, stacklevel=2)


def replica_facts(saves: Saver | Background | None, exchange: Exchange, place: Place | None) -> dict[str, str]:
    """Return this rank's facts for `settle`: the ranks of its node, what ranks that are alike have in common, and where
    the node lies, if nodes keep copies."""
    facts: dict[str, str] = {}
    if place is not None and place.copies is not None and _next_node(exchange) >= 0:
        facts = node_facts(exchange.neighbours)
    if isinstance(saves, Background) and len(exchange.neighbours) > 1:
        with suppress(Exception):  # what cannot be captured is refused at the first cut
            return facts | facts_of_node(exchange.neighbours, saves.engine.planner.replica())
    return facts


def settle(
    saves: Saver | Background | None,
    tally: Tally,
    place: Place | None,
    attempt: Attempt,
    exchange: Exchange,
    counters: RunCounters,
) -> None:
    """Let replicas divide what they capture, if all ranks are alike by the `replica_facts` of all, say how much memory
    it takes, and let agents copy it to other nodes."""
    if not isinstance(saves, Background) or place is None:
        return
    nodes = nodes_of_replicas(tally)
    division = division_of(nodes, exchange.rank) if len(nodes) == exchange.world_size else None
    saves.engine.divide(division)
    digest = digest_of_run(attempt.run, place.storage)
    identity = identity_of(digest, rank=exchange.rank, world_size=exchange.world_size)
    state_bytes = estimated_bytes(saves.engine.objects.values()) // (1 if division is None else division.count)
    _say_memory(state_bytes, place.arenas, identity, exchange, place.copies)
    if place.copies is not None:
        counters.copies = True
        keeping, warning = keeping_of(tally, exchange.neighbours, exchange.rank, place.copies)
        if warning:
            _LOG.warning('peers="%s": %s', place.copies.mode, warning)
        if keeping is not None:
            saves.agent.copy(keeping, counters.protected)


def _say_memory(
    state_bytes: int, folder: ArenaFolder, identity: ArenaIdentity, exchange: Exchange, copies: Copying | None = None
) -> None:
    """Say on one rank of each node how much memory captures take there: a warning if it is not there. ``state_bytes``:
    what a rank is expected to capture. ``copies``: the node keeps two of as many ranks of another node, or parity."""
    ranks, generations = exchange.neighbours, _generations(exchange, copies is not None)
    if exchange.rank != ranks[0]:
        return
    every = (one.size_bytes for one in folder.found() if one.identity is not None and _is_like(one.identity, identity))
    state_bytes = max(every, default=0) // generations or state_bytes
    is_kept = copies is not None and generations == _WITH_COPIES
    count = generations + (0 if not is_kept else _PARITY if copies is not None and copies.mode == "3+1" else _COPIES)
    size_bytes = int(count * state_bytes)
    room_bytes = folder.room_bytes(identity.run)
    _LOG.log(
        logging.INFO if len(ranks) * size_bytes <= room_bytes else logging.WARNING,
        "captures of %s take about %.2f GiB of this node's memory, %.3g generations of %.2f GiB for each rank%s; "
        "%.2f GiB are there in %s",
        name_ranks(ranks_of(ranks)),
        len(ranks) * size_bytes / 2**30,
        count,
        state_bytes / 2**30,
        " with what this node keeps of other nodes" if count > generations else "",
        room_bytes / 2**30,
        folder.path,
    )


def _is_like(one: ArenaIdentity, other: ArenaIdentity) -> bool:
    return (one.run, one.world, one.kind) == (other.run, other.world, other.kind)


def _generations(exchange: Exchange, copies: bool) -> int:
    """How many generations an arena has: the one being persisted, the newest, and the one being filled; with several
    ranks also that before the newest, which another rank may have to go back to; and with copies on other nodes the two
    that were copied last, since a lost node's share is of use only with the same cut of the others."""
    if exchange.world_size == 1:
        return 3
    return _WITH_COPIES if copies and len(exchange.neighbours) < exchange.world_size else 4
