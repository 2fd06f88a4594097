"""This module defines `CheckpointManager`, which a training loop calls: restore, step, save, wait, latest, close.

All ranks make one and call it alike. Only saves and restores communicate with other ranks, and the few notes by which
rank 0 announces saves. Without ``capture_every``, saves are synchronous: when `step` or `save` returns, the checkpoint
is committed, and no thread outlives a call (`lakeckpt.checkpoint.sync_save`). With ``capture_every``, cuts are captured
beside training and persisted by an agent, and `step` only begins them (`lakeckpt.checkpoint.async_save`). The results
of such saves are read by the next call of `step`, `save` or `wait`, on the thread that calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import Any, Literal, overload

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arguments import (
    check_capturing,
    check_settings,
    checked_backups,
    checked_crash_loop,
    checked_names,
    checked_peers,
    checked_state,
    checked_steps,
    shared_settings,
)
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.bubbles.watch import Bubbles
from lakeckpt.checkpoint.closing import Closing
from lakeckpt.checkpoint.consumed.accumulation import accumulation_of
from lakeckpt.checkpoint.consumed.sharing import note_sharing, sharing_facts
from lakeckpt.checkpoint.consumed.tracks import ReaderTrack, by_reader, cut_all, skip, tracks_of
from lakeckpt.checkpoint.consumed.watch import Watch
from lakeckpt.checkpoint.copying.backups import Backup
from lakeckpt.checkpoint.copying.by_ranks import copy_by_ranks
from lakeckpt.checkpoint.faults.aftermath import Aftermath
from lakeckpt.checkpoint.format.keep import Keep, held_metric
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.opening import open_saves, opened, place_of, replica_facts, settle
from lakeckpt.checkpoint.outage import Outage
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.checkpoint.preemption.preemption import Preemption
from lakeckpt.checkpoint.presence.presence import Presence
from lakeckpt.checkpoint.ranks import check_shared, check_topology, exchange_of, note_begun
from lakeckpt.checkpoint.report import Reporter, SaveHandle
from lakeckpt.checkpoint.restore.report import RestoreReport
from lakeckpt.checkpoint.restore.restorer import Restorer
from lakeckpt.checkpoint.restore.run_log import newest_checkpoint
from lakeckpt.checkpoint.schedule import Schedule, interval_of
from lakeckpt.checkpoint.sync_save import Saver
from lakeckpt.counters import RUNS, RunCounters
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.votes import Together
from lakeckpt.tracking.waiting import SystemWaiter, Waiter

__all__ = ["CheckpointManager"]


class CheckpointManager(Closing):
    """Checkpoints of a run at ``uri``: a local folder, the URL of an object store, or a `Storage`.

    Args:
        uri: where the run lies. One run, one place; every attempt at it uses the same.
        state: name → object with ``state_dict`` and ``load_state_dict``. Readers such as `lakeckpt.LakeLoader` are
            recognised: their states are taken as of what was consumed. Random states are always saved.
        persist_every: save after so many optimizer steps (int), or so much time (timedelta). Default: every 10 minutes.
        capture_every: copy the state into host memory every so many optimizer steps, beside training; saves are then
            made from there by a process of this node, while training goes on, and a process that is restarted loses no
            more than that. It takes the state's size three times (four times with several ranks) of memory. ``uri`` is
            then a path or URL, not a `Storage`, and ``storage_options`` are plain values: the process opens both again.
            None: saves are synchronous.
        arenas: the folder where captures lie; default: this user's own in ``/dev/shm``. On a disk, it takes no memory.
        peers: None: while a job of several nodes restores, its nodes read from each other's memory what they lack
            (docs/how-to/several-nodes.md); later agents ask other nodes whether they are there. ``"copy"``: agents also
            copy what only one node holds to another one. ``"3+1"``: four nodes keep parity of it, which takes a third
            of that memory (docs/how-to/recovery.md). False: no sockets.
        peers_every_s: with ``peers="copy"`` or ``"3+1"``, shares are copied about every so many seconds.
        perceive: with ``capture_every``, a rank that is stuck after another rank of its node has died, or another
            node was lost, is killed, so that the launcher acts (docs/how-to/faults.md). False: it is left alone.
        watch: with ``capture_every`` and several ranks, what agents do if all ranks stand still (docs/how-to/hangs.md):
            ``"report"``: they say which rank holds up the others, and why; ``"restart"``: if it cannot heal, they also
            kill the ranks, so that the launcher starts them again; None: nothing.
        bubbles: where this rank is idle (`lakeckpt.bubbles.Bubbles`): captures then move while it waits. Each
            checkpoint records how long ranks waited, and which share of the bytes moved meanwhile.
        backups: copies of the run that its agent keeps at other places, as `lakeckpt copy` does (`lakeckpt.Backup`).
        keep: which checkpoints keep their data: so many of the newest (int), or a `lakeckpt.Keep` rule. The record of
            all checkpoints stays.
        group: the torch process group (or one-dimensional DeviceMesh) whose ranks hold replicas; default: all ranks.
        rank, world_size: checked against the group's, if given.
        storage_options: options of the object store, such as credentials.
        timeout_s: how long a rank waits for another one in a save or restore, in seconds.
        save_on: signals, such as ``("SIGTERM", "SIGUSR1")``. When one reaches some rank, all ranks save the next cut,
            and `step` raises SystemExit with 128 + its number (143 for SIGTERM). If a rank has come to no cut
            ``grace_s`` seconds later (default: three usual steps, at least 15 s), or is gone, all end at once and save
            nothing; agents persist what was captured.
        requeue: ``"slurm"``: rank 0 then runs ``scontrol requeue``, but not if a rank is gone.
        on_save: called with the `CheckpointInfo` of each checkpoint that this manager commits, on the training thread.
        fail_after: for how long failed saves by policy are warnings, from the first of them on: seconds, or a
            timedelta. Saves are then tried ever later (after 20 s, then 40 s, up to 5 minutes). Raised at once: a
            failure of the first save, of `save` and of the last save, and what no retry mends (`SaveRefused`, a state
            that cannot be written, a superseded attempt). A save that is skipped for a newer one is no failure.
        exclusive: `restore` raises `RunInUse` if another job that trains this run is alive, instead of taking the
            run over (docs/how-to/one-job.md). A job that its launcher starts again is never refused.
        on_crash_loop: what a restart does if one micro-batch has ended the job three times in a row by one cause:
            ``"stop"``: `restore` raises `CrashLoop`, which names the rows; ``"exclude"``: the micro-batch leaves the
            deal, on record, and training goes on (docs/how-to/faults.md).
        max_excluded: so many micro-batches of the run are excluded at most.
        watch_faults: a TOML file with rows of your own, which explain faults by their codes and texts before the
            library's table does (docs/how-to/faults.md).

    Collective over the ranks: construction, `restore`, `save`, leaving the ``with``, and those `step` at which a save
    falls.
    """

    def __init__(
        self,
        uri: str | PathLike[str] | Storage,
        state: Mapping[str, Any],
        *,
        persist_every: int | timedelta | None = None,
        capture_every: int | None = None,
        arenas: str | PathLike[str] | None = None,
        peers: Literal["copy", "3+1", False] | None = None,
        peers_every_s: float = 10.0,
        perceive: bool = True,
        watch: Literal["report", "restart"] | None = "report",
        bubbles: Bubbles | None = None,
        backups: Collection[Backup] = (),
        keep: int | Keep = 3,
        group: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        save_on: Collection[str] = (),
        grace_s: float | None = None,
        requeue: Literal["slurm"] | None = None,
        on_save: Callable[[CheckpointInfo], object] | None = None,
        fail_after: float | timedelta = 3600.0,
        exclusive: bool = False,
        on_crash_loop: Literal["stop", "exclude"] = "stop",
        max_excluded: int = 3,
        watch_faults: str | PathLike[str] | None = None,
    ) -> None:
        self._objects = checked_state(state)
        fail_after_s = check_settings(fail_after, timeout_s)
        check_capturing(capture_every, arenas, bubbles, perceive, watch)
        copied = checked_peers(peers, peers_every_s, capture_every)
        every = interval_of(persist_every)
        self._storage = opened(uri, storage_options)
        self._exchange, self._waiter = self._talk(
            group, timeout_s, alone=world_size == 1, node=ArenaFolder(arenas).path
        )
        check_topology(self._exchange, rank, world_size)
        self._capture_every, captures = capture_every, capture_every is not None
        copies = checked_backups(backups, capture_every)
        given = (self._storage, uri, storage_options or {}, arenas, copies, perceive, peers is not False)
        self._place = place_of(*given, copied, watch) if captures else None
        self._presence = Presence(self._storage, self._exchange, arenas, self._waiter, timeout_s, exclusive)
        most = checked_crash_loop(on_crash_loop, max_excluded)
        self._aftermath = Aftermath(self._storage, self._exchange, arenas, captures, most, watch_faults, watch)
        self._bubbles = bubbles
        self._saves: Saver | Background | None = None
        self._settings = Settings(keep=keep if isinstance(keep, Keep) else Keep(last=keep), timeout_s=timeout_s)
        self._counters = RunCounters(describe(self._storage), self._exchange.rank)
        self._uncount: Callable[[], object] = lambda: None
        outage = Outage(fail_after_s, self._waiter)
        self._reporter = reporter = Reporter(on_save, outage=outage, counters=self._counters)
        self._preemption = Preemption(
            save_on, self._exchange, lambda: reporter.saved_step, grace_s=grace_s, requeue=requeue
        )
        self._serves = peers is not False
        shared = {
            "keep": self._settings.keep,
            "fail_after": fail_after_s,
            "exclusive": exclusive,
            "max_excluded": most,
            "peers": (peers, peers_every_s),
        }
        self._shared = shared_settings(
            persist_every=str(every), capture_every=capture_every, save_on=self._preemption.names, **shared
        )
        self._schedule = Schedule(every, self._exchange, self._waiter, outage)
        self._tracks: dict[str, ReaderTrack] = {}
        self._step = 0
        self._metric: Any = None
        self._report: RestoreReport | None = None
        self._closed = False
        self._watch = Watch({}, {})

    @staticmethod
    def _talk(group: Any, timeout_s: float, *, alone: bool, node: str) -> tuple[Exchange, Waiter]:
        """Return the exchange with the other ranks, and the clock."""
        return exchange_of(group, timeout_s, alone=alone, node=node), SystemWaiter()

    @property
    def steps_done(self) -> int:
        """Optimizer steps done so far, over all attempts in this history."""
        return self._step

    @property
    def restore_report(self) -> RestoreReport | None:
        """The result of `restore`; None before it."""
        return self._report

    def latest(self) -> CheckpointInfo | None:
        """The newest commit of the history that can be read, or None. It does not verify the data. Raises `NewerFormat`
        if a newer lakeckpt wrote into the log."""
        newest = newest_checkpoint(self._storage)
        return None if newest is None else CheckpointInfo.of(newest)

    # --- what a training loop calls

    def restore(
        self,
        step: int | None = None,
        *,
        exclude_steps: tuple[int, int] | None = None,
        allow_missing: Collection[str] = (),
        source: str | PathLike[str] | Storage | None = None,
        source_options: Mapping[str, Any] | None = None,
    ) -> int:
        """Restore the newest checkpoint that is whole (with ``capture_every``: or the newest cut that the ranks
        can read from the memory of nodes), and begin an attempt; call it once, before the first step. ``allow_missing``
        names objects that joined the state after it was saved: if it does not hold them, they keep the state that they
        have.

        ``step`` rolls the run back to its newest checkpoint of that step: later work is abandoned. This is an order
        given once. A script that is started again with the same ``step`` goes on from the newest checkpoint if the
        history descends from this roll-back already. To go back to the same step again: ``lakeckpt rollback``. With
        ``exclude_steps=(A, B)``, half-open, ``step`` < A < B, training goes on without the batches that these steps had
        used, after a loss spike: they leave the deal, on record (docs/how-to/go-back.md). Rank 0's arguments count.

        ``source``: the place of another run, such as what ``lakeckpt copy`` has made. If this run's place is empty, the
        newest checkpoint of that run and its history are copied here first, and verified; else it is not looked at.
        ``source_options``: of its store.

        Returns the optimizer steps done so far: 0 in an empty place. Damaged checkpoints are skipped with a
        `DamageWarning` and listed in `restore_report`. A job that still trains this run is superseded: its next save
        raises `AttemptSuperseded`, which names this process.

        Raises, on every rank: `TrackingError` if the ranks have different settings, such as ``persist_every``;
        `CheckpointMismatch` listing all differences, and `StateError` if a reader refuses its state. In these cases
        nothing is changed on any rank and nothing is written, so that a job that is alive goes on. `CheckpointDamaged`
        if there are checkpoints and none is whole; `CheckpointNotFound` naming the steps that can be restored, if
        ``step`` is none of them, and if the history has not all of ``exclude_steps``; `StorageError` naming the cut if
        the run is away (docs/how-to/one-job.md) and does not come back within ``timeout_s``; `RunInUse` with
        ``exclusive=True``. Tensors are read in place. If an object fails to load its state after that, they hold a
        mixture of states, and the error says so.
        """
        self._refuse_closed()
        if self._saves is not None:
            raise ConfigError("this manager has restored already: make another one to restore again")
        missing = checked_names(allow_missing, self._objects, step)
        steps = checked_steps(step, exclude_steps)
        check_shared(self._exchange, self._shared)
        arenas = None if self._place is None else self._place.arenas
        own = (self._storage, self._exchange)
        done, attempt, self._report = Restorer(
            *own,
            self._objects,
            step=step,
            exclude_steps=steps,
            arenas=arenas,
            allow_missing=missing,
            serves=self._serves,
            aftermath=self._aftermath,
            copies=None if source is None else partial(copy_by_ranks, opened(source, source_options), *own),
        ).restore(self._presence)
        # If one rank cannot begin, none does: the others would wait for it at the first save.
        tally = Together(self._exchange).do(lambda: self._begin(done, attempt))
        note_sharing(tally, self._tracks)
        settle(self._saves, tally, self._place, attempt, self._exchange, self._counters)
        self._preemption.start(done, has_agent=self._place is not None)
        note_begun(done)
        return done

    def _begin(self, done: int, attempt: Attempt) -> Mapping[str, str]:
        """Begin to count steps, and to capture, after a restore. Returns facts for `note_sharing`."""
        self._step, self._reporter.saved_step = done, attempt.recorded
        self._tracks.update(tracks_of(self._objects, attempt.number, attempt.openings))
        objects = {name: one for name, one in self._objects.items() if name not in self._tracks}
        self._watch = Watch(self._tracks, objects)
        self._saves = open_saves(
            objects,
            self._storage,
            self._exchange,
            attempt,
            place=self._place,
            step=done,
            tracks=self._tracks,
            settings=self._settings,
            waiter=self._waiter,
            gate=None if self._bubbles is None else self._bubbles.gate,
            counters=self._counters,
        )
        self._schedule.start(done)
        self._counters.begin(done, attempt.recorded, self._report.restored if self._report else None)
        self._uncount = RUNS.follow(self, self._counters)
        self._aftermath.trains(done, self._tracks, objects.values())
        self._counters.faults, self._counters.spent = self._aftermath.causes, self._aftermath.spent
        own = replica_facts(self._saves, self._exchange, self._place)
        return own | sharing_facts(objects, self._tracks, self._exchange.world_size)

    def step(self, batch: Any = None, *, metric: float | None = None) -> None:
        """Count an optimizer step, and save if the policy says so. Call it on every rank after each optimizer step,
        when schedulers, scaler and averages are updated, too: the state is saved as it is then, which is a cut.

        ``batch`` is the last batch that the step used: all up to it counts as consumed, and what a queue or a wrapper
        holds beyond it does not. Instead of the batch, give its receipt; or the number that the loader's
        ``receipt_column`` put into it, if a wrapper makes batches anew; with several readers a dict of reader →
        batch. Without it, all that the readers have delivered is taken for consumed. That is wrong behind anything
        that reads ahead: a `ReadAheadWarning` says so if it shows. ``lakeckpt audit`` proves what was delivered.

        ``metric`` says how good this state is, for ``keep=Keep(best=…)``, whenever this cut is saved; rank 0's counts.
        With ``capture_every`` a save only begins here; ``on_save`` and later calls report its result.

        Errors as for `save`, and `AgentError` if the agent cannot serve this process. `ConfigError` if ``batch`` names
        no batch, or one from before what an earlier step has used, or the metric is no number; `StateUnavailable` if
        the reader has not delivered it since the last save: both come before the cut, on this rank alone, which may
        call again. If a save falls, the others wait for it.
        """
        saves = self._ready()
        receipts = by_reader(batch, self._tracks)
        self._metric = held_metric(metric)
        self._step += 1
        self._counters.step = self._step
        self._aftermath.stepped(self._step, self._counters.stall_s)
        self._watch.stepped(cut_all(self._tracks, self._step, receipts))
        if self._bubbles is not None:
            self._bubbles.gate.cut(self._step)
        reporter, schedule = self._reporter, self._schedule
        with (
            self._preemption.busy(),
            schedule.passing(self._step),
            reporter.warning_of(self._step),
            reporter.stalling(),
        ):
            if schedule.is_due(self._step):
                self._save(saves, sync=False)
            else:
                if self._capture_every is not None and self._step % self._capture_every == 0:
                    saves.cut(self._step)
                reporter.report(saves.results())
        if self._preemption.stops_at(self._step):
            self._save_last()
            self._preemption.leave()
        self._aftermath.phase("between")

    def accumulation(self, *, global_batch: int, reader: str | None = None, exact: bool = False) -> int:
        """Return how many micro-batches each rank accumulates for one optimizer step, so that a step has
        ``global_batch`` rows (packed: sequences) on all ranks, whatever their number is now.

        If that does not come out even, the number is rounded up, with a `RestartWarning`; with ``exact=True`` it is a
        `ConfigError`. ``reader`` names the loader in the state, if there are several. Call it on every rank, before or
        after `restore`.
        """
        return accumulation_of(self._objects, global_batch, reader=reader, exact=exact)

    def skip(self, batch: Any) -> None:
        """Record that this rank took ``batch`` (as `step` takes it) and trains nothing on it; call it before the next
        `step`, with which its rows count as consumed. ``lakeckpt audit`` lists them: PROVED EXCEPT n rows."""
        self._ready()
        skip(by_reader(batch, self._tracks), self._tracks)

    @overload
    def save(self, *, metric: float | None = None, sync: Literal[True] = True) -> CheckpointInfo: ...
    @overload
    def save(self, *, metric: float | None = None, sync: Literal[False]) -> SaveHandle: ...
    def save(self, *, metric: float | None = None, sync: bool = True) -> CheckpointInfo | SaveHandle | None:
        """Save the last cut now, whatever the policy says; call it on every rank, right after `step`. ``metric`` as
        for `step`; default: the one that was given there. Returns what was committed. With ``sync=False`` and
        ``capture_every`` the save only begins: the handle that is returned waits for it; `wait` and ``on_save``
        report it, too.

        What fails on one rank fails on all, within seconds, and the error says which rank it was and why. Raises
        `SaveFailed` (nothing was committed, or ranks are gone; training may go on),
        `AttemptSuperseded` (stop), `TrackingError` (the ranks are not at one cut), `UnsupportedValue` (a state that
        cannot be written, with its path), `CheckpointError` if your own code raised something else on another rank,
        as a ``state_dict`` may, and `ConfigError` for a metric that is no number, as `step` does.
        """
        saves = self._ready()
        self._watch.check_stepped()
        if metric is not None:
            self._metric = held_metric(metric)
        self._schedule.begins()
        handle = None if sync else self._reporter.handle(self._step, self.wait)
        with self._preemption.busy(), self._aftermath.saving(), self._reporter.stalling():
            self._save(saves, sync=sync)
        return self._reporter.newest if handle is None else handle

    def fence(self) -> None:
        """Return when the state may change.

        With ``capture_every``, captures read the state beside training until the next ``optimizer.step()``, which calls
        this by itself. Call it before the state changes in any other place between `step` and the next optimizer step:
        weights swapped for an evaluation, ``load_state_dict``, an average of weights after a step that a `GradScaler`
        skipped, the replay of a CUDA graph that holds an optimizer step. Any thread may call it. It does nothing
        without ``capture_every``.
        """
        if self._saves is not None:
            self._saves.fence()

    def __repr__(self) -> str:
        return f"CheckpointManager({describe(self._storage)!r}, {sorted(self._objects)}, step={self._step})"
