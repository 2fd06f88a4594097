"""This module tells a run that is away from a run that is new, where a restore finds an empty place.

An unmounted share, a renamed folder and a prefix that lists nothing look as a place where no run ever began. If a node
of the job knows a run there, the run is away. A node knows it by a cut in its memory (`Arena`), or by the marker that
an earlier attempt of this job left (`lakeckpt.checkpoint.arena.markers`). All ranks state what their nodes know, in
rounds; rank 0 looks at the place; all ranks take the same decision from the same answer:

    no node knows a run                     begin a new run at once
    the place lists a run again             restore it, once its listing stands still
    a marker of this job                    wait for the run up to ``timeout_s``, then `StorageError`
    a cut in memory, and no such marker     wait up to 10 s, then `StorageError`: a person may have removed the run

``lakeckpt doctor --forget`` ends the wait, because each round asks the nodes anew. The module writes nothing, and
starts no threads.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.agent.generations import digest_of_place
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.holdings import holdings_in
from lakeckpt.checkpoint.arena.markers import marker_at
from lakeckpt.checkpoint.persist.log import list_slots
from lakeckpt.errors import ArenaError, StorageError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Known", "await_run", "known_here"]

_LOG = logging.getLogger("lakeckpt")
_PAUSE_S = 1.0
_BY_HAND_S = 10.0
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What one node knows of a run at an empty place."""

    host: str
    captured: int | None
    """The optimizer step of the newest cut in the node's memory."""
    committed: int | None
    """The step of the newest checkpoint by the marker of this job; None: it has no marker."""

    @property
    def order(self) -> tuple[int, bool]:
        """The newest cut is named first."""
        return max(self.captured or 0, self.committed or 0), self.captured is not None

    def to_text(self) -> str:
        """Return a text for the other ranks."""
        return f"{self.captured} {self.committed} {self.host}"

    @classmethod
    def from_text(cls, text: str) -> Known:
        """Return what `to_text` was given."""
        captured, committed, host = text.split(" ", 2)
        step = {one: None if one == "None" else int(one) for one in (captured, committed)}
        return cls(host=host, captured=step[captured], committed=step[committed])


def known_here(storage: Storage, folder: ArenaFolder, launchers: Collection[str]) -> Known | None:
    """Return what this node knows of a run at the place of ``storage``; ``launchers`` restart this job."""
    place = digest_of_place(storage)
    marker = marker_at(folder, place)
    if marker is not None and set(marker.launchers).isdisjoint(launchers):
        marker = None
    try:
        captured = max((one.cut.step for one in holdings_in(folder, place)), default=None)
    except (ArenaError, OSError):
        captured = None
    if marker is None and captured is None:
        return None
    return Known(host=socket.gethostname(), captured=captured, committed=None if marker is None else marker.step)


def await_run(
    storage: Storage,
    exchange: Exchange,
    folder: ArenaFolder,
    launchers: Collection[str],
    *,
    waiter: Waiter,
    timeout_s: float,
) -> bool:
    """Wait for a run that is away; rank 0 has found none. Return whether the run may be there now: look again.

    Collective. Raises `StorageError`, on all ranks, if the run does not come back.
    """
    begun_s, before, last = waiter.now(), None, ""
    while True:
        known = known_here(storage, folder, launchers)
        facts = {} if known is None else {"known": known.to_text()}
        if exchange.rank == 0:
            found = _listing(storage)
            facts |= {"is_back": "yes" if found and found == before else "", "waited": f"{waiter.now() - begun_s:.3f}"}
            before = found
        tally = exchange.everyone(facts)
        every = [Known.from_text(one) for one in tally.facts.get("known", ())]
        is_back, waited_s = bool(tally.value("is_back")), float(tally.value("waited"))
        if is_back or not every:
            if exchange.rank == 0:
                _say_end(storage, is_back=is_back, was_told=bool(last), waited_s=waited_s)
            return is_back
        limit_s = timeout_s if any(one.committed is not None for one in every) else min(_BY_HAND_S, timeout_s)
        text = _away(storage, folder, every)
        if waited_s >= limit_s:
            raise StorageError(f"{text}. It did not come back within {waited_s:.0f} s")
        if exchange.rank == 0 and not last:
            _LOG.warning("%s. Waiting for it up to %g s", text, limit_s)
        last = text
        waiter.wait(_PAUSE_S)


def _listing(storage: Storage) -> list[tuple[str, int]]:
    """Return all objects of a run and their sizes; nothing if there is no run, or the store fails."""
    try:
        return [(one.path, one.size_bytes) for one in storage.list()] if list_slots(storage) else []
    except StorageError:
        return []


def _away(storage: Storage, folder: ArenaFolder, every: Sequence[Known]) -> str:
    place, newest = describe(storage), max(every, key=lambda one: one.order)
    hosts = sorted({one.host for one in every})
    if newest.captured is not None and newest.captured >= (newest.committed or 0):
        what = f"the memory of {newest.host} holds the cut of step {newest.captured} of a run there"
    elif newest.committed:
        what = f"this job has begun a run there before, whose newest checkpoint is of step {newest.committed}"
    else:
        what = "this job has begun a run there before, which has no checkpoint yet (step 0)"
    where = "" if folder.path == ArenaFolder().path else f" --arenas {folder.path}"
    return (
        f"{place} lists no run, but {what}: the run is away and not new. Bring it back (mount or rename "
        f"it). If it was removed on purpose: lakeckpt doctor --forget {place}{where} on "
        f"{', '.join(hosts[:8])}{' …' * (len(hosts) > 8)}, then start again"
    )


def _say_end(storage: Storage, *, is_back: bool, was_told: bool, waited_s: float) -> None:
    if is_back:
        _LOG.warning("%s lists its run again after %.0f s", describe(storage), waited_s)
    elif was_told:
        _LOG.warning("what was known of a run at %s was removed: a new run begins", describe(storage))
    elif restarts := [f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") not in ("", "0")]:
        _LOG.warning(
            "%s lists no run, and this job was started before (%s): a new run begins at step 0. No node of the job "
            "knows a run there; stop the job if one should be there",
            describe(storage),
            restarts[0],
        )
