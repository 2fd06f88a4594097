"""This module reads and saves in the replica groups of a torchft job, which die and heal while the others go on.

The rows of a step depend on who takes part in it. So a `LakeReplica` is asked for a batch when torchft's quorum is
known, and deals the rows to the replicas of this quorum. If the quorum changes, the rest of the epoch is dealt anew.
torchft decides whether a step is committed, and `LakeReplica.step` looks at torchft's step number. The rows of a step
that was not committed are read again, by the replicas of the next quorum.

A replica that heals gets the objects of the state from a live one, the reader's place among them, by torchft's own
transport. One replica group saves, as a `CheckpointManager` does. If it heals, the ledger records what the others
consumed meanwhile.

torchft takes two replicas at the same step number for equal. The module starts no threads; torchft calls `_shared` on a
thread of its own while the training thread waits for the quorum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Self

from lakeckpt.checkpoint.load import load
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.data.streams.mix import MixedDataset
from lakeckpt.errors import CheckpointNotFound, ConfigError
from lakeckpt.integrations.common import Framework
from lakeckpt.lake.storage.base import Storage

_TORCHFT = Framework(distribution="torchft-nightly", oldest="2026.10.26", newest="2026.10.26")
with _TORCHFT.imports():
    from torchft import Manager

__all__ = ["LakeReplica"]

_SEAMS = (
    "_use_async_quorum",
    "_quorum_future",
    "register_state_dict_fn()",
    "participating_rank()",
    "num_participants()",
    "current_step()",
    "state_dict()",
    "load_state_dict()",
)

_KEY = "torchft"
"""The name under which the step number of torchft's Manager is saved."""


class LakeReplica:
    """The rows and the checkpoints of one replica group of a torchft job. An iterator of batches, and a context.

    Args:
        manager: the ``torchft.Manager`` of this replica group, made with ``use_async_quorum=False``. The rows of a
            step depend on the quorum, so that nothing is won by an asynchronous one; and a replica that heals by one
            would throw away the rows of its first step.
        uri: the run: a folder or URL that all replica groups can read.
        state: name → object, as for `CheckpointManager`, with one `LakeLoader`. These objects are saved, and a replica
            that heals loads them from a live one: the Manager needs no ``state_dict`` and ``load_state_dict`` for them.
        saves: True in the one replica group that saves the run. The others read the newest checkpoint at the start.
        options: further arguments of the `CheckpointManager`, such as ``persist_every``.

    The loader's own rank and number of ranks are those within the replica group. `ConfigError` for what cannot be dealt
    to replicas that change: a mixture, a transform with ``rows="many"``, single rows (``batch_size=None``),
    ``drop_last=True``, and a table that is followed or that changes its version between epochs.

    A step is: ``start_quorum()`` (torchft's Optimizer calls it in ``zero_grad``), ``next(replica)`` once or several
    times, forward and backward, ``should_commit()`` (the Optimizer calls it in ``step``), and `step`.
    """

    def __init__(
        self,
        manager: Manager,
        uri: str | PathLike[str] | Storage,
        state: Mapping[str, Any],
        *,
        saves: bool,
        **options: Any,
    ) -> None:
        _TORCHFT.check(manager, *_SEAMS)
        if manager._use_async_quorum:
            raise ConfigError(
                "what a step reads depends on the quorum: make the torchft.Manager with use_async_quorum=False"
            )
        self._manager, self._uri, self._state = manager, uri, dict(state)
        self._loader = _loader_of(state)
        self._reader = self._loader._reader
        self._group = self._loader.topology
        self._share: tuple[int, int] | None = None
        self._batches: Iterator[Any] | None = None
        self._quorum: Any = None
        self._take_back: Callable[[], None] | None = None
        self._expected: int | None = None
        self._checkpoints = CheckpointManager(uri, self._saved, **options) if saves else None
        manager.register_state_dict_fn("lakeckpt", self._heal, self._shared)

    # --- what is asked

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._reader.epoch_of_next

    @property
    def checkpoints(self) -> CheckpointManager | None:
        """The manager of the run's checkpoints, in the replica group that saves."""
        return self._checkpoints

    # --- what a training loop calls

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch of this step, which depends on the quorum of the step. It never ends: when an epoch
        ends, the next one begins.

        Raises `ConfigError` if no quorum was started since the last step, or `step` was not called after it.
        """
        if self._take_back is None or self._manager._quorum_future is not self._quorum:
            self._begin_step()
        for _ in range(3):  # a state of the end of an epoch shows this end once
            self._batches = iter(self._loader) if self._batches is None else self._batches
            for batch in self._batches:
                return batch
            self._batches = None
        raise ConfigError(f"the table {self._loader.table.uri!r} has no row to train on")

    def step(self, *, metric: float | None = None) -> bool:
        """Return whether torchft committed the step; save if ``persist_every`` says so. Call it in every replica,
        right after torchft's ``optimizer.step()`` or ``should_commit()``, and after what belongs to the step.

        The rows of a step that was not committed are read again. ``metric`` and errors as in `CheckpointManager.step`.
        """
        if self._take_back is None:
            raise ConfigError("step() follows a batch, next(replica), and torchft's optimizer.step()")
        take_back, self._take_back = self._take_back, None
        done = self._manager.current_step()
        if done == self._expected:
            take_back()
            self._batches = None
            return False
        self._expected = done
        if self._checkpoints is None:
            self._reader.mark()
        else:
            self._checkpoints.step(self._loader.last_receipt, metric=metric)
        return True

    def __enter__(self) -> Self:
        """Restore the newest checkpoint, if there is one."""
        if self._checkpoints is not None:
            self._checkpoints.restore()
        else:
            try:
                load(self._uri, self._saved)
            except CheckpointNotFound:
                pass  # the first start
        self._expected = self._manager.current_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End as a `CheckpointManager` does: the last committed step is saved if the body ended well."""
        if self._checkpoints is not None:
            self._checkpoints.__exit__(kind, error, trace)

    # --- inside

    @property
    def _saved(self) -> dict[str, Any]:
        return {**self._state, _KEY: self._manager}

    def _begin_step(self) -> None:
        """Check that the step is a new one, and deal the rows to the replicas of its quorum."""
        quorum = self._manager._quorum_future
        if self._expected is None:
            raise ConfigError("LakeReplica restores when its context begins: with LakeReplica(…) as replica:")
        if quorum is None or quorum is self._quorum:
            raise ConfigError(
                "the rows of a step depend on its quorum: call torchft's optimizer.zero_grad(), or "
                "manager.start_quorum(), before next(replica)"
            )
        if self._take_back is not None or self._manager.current_step() != self._expected:
            raise ConfigError("a step was taken without replica.step(): call it after each optimizer.step()")
        self._quorum = quorum
        self._take_back = self._reader.remember()
        rank, world_size = self._group
        replica = self._manager.participating_rank() or 0  # a spare reads along, and its gradients count for nothing
        share = replica * world_size + rank, self._manager.num_participants() * world_size
        if share != self._share:
            self._share, self._batches = share, None
            self._reader.deal_to(*share)

    def _shared(self) -> dict[str, Any]:
        """Return what a replica that heals loads."""
        if self._take_back is not None:
            raise ConfigError("a step was taken without replica.step(): call it after each optimizer.step()")
        return {name: one.state_dict() for name, one in self._state.items()}

    def _heal(self, found: Mapping[str, Any]) -> None:
        """Load what a live replica shared: torchft calls this in ``start_quorum``, its step number loaded already."""
        if self._checkpoints is not None:
            self._checkpoints.fence()
        for name, one in self._state.items():
            if one is self._loader:
                self._reader.go_on(found[name])
            else:
                one.load_state_dict(found[name])
        self._batches, self._expected = None, self._manager.current_step()
        if self._checkpoints is not None:
            _go_on_after(self._checkpoints, self._expected)


def _loader_of(state: Mapping[str, Any]) -> LakeLoader:
    """Return the one loader of the state, whose rows can be dealt to replicas that change."""
    loaders = [one for one in state.values() if isinstance(one, LakeLoader)]
    if len(loaders) != 1:
        raise ConfigError(f"the state= of a LakeReplica has one lakeckpt.LakeLoader, got {len(loaders)}")
    dataset = loaders[0].dataset
    is_mixed = isinstance(dataset, MixedDataset)
    refused = {
        "lakeckpt.mix": is_mixed,
        'rows="many"': dataset.yields_many,
        "batch_size=None": dataset.row_wise,
        "drop_last=True": not is_mixed and dataset._versions.at_hand.tail == "drop",
        "follow=": dataset.follow is not None,
        'on_new_version="next_epoch"': not is_mixed and dataset.options.on_new_version == "next_epoch",
    }
    for what, found in refused.items():
        if found:
            raise ConfigError(
                f"the rows of {what} cannot be dealt to replicas that die and heal: read one table as it is"
            )
    return loaders[0]


def _go_on_after(checkpoints: CheckpointManager, step: int) -> None:
    """Let the manager go on after ``step``: other processes did the steps up to it, and the objects have loaded their
    state. There is nothing to save before the next step."""
    if step == checkpoints.steps_done:
        return
    checkpoints._step = checkpoints._reporter.saved_step = step
    for track in checkpoints._tracks.values():
        track.jump(step)
    checkpoints._schedule.start(step)
