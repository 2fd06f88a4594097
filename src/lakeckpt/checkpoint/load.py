"""This module loads a checkpoint of a run into live objects, beside a trainer that goes on.

`load` begins no attempt and writes nothing to the run, so that no trainer is superseded. Rank 0 chooses the checkpoint
from the log. All ranks compare it with their objects and vote. Then all ranks load it and vote again, as a restore
does. The trainer may remove a checkpoint while it is read. Rank 0 then reads the log once more: if a newer commit
had leave to remove the checkpoint, the checkpoint is not damaged, and the newest (or best) one of that time is taken.
Objects that the caller did not name are not read. Random states stay as they are.

Threads are started and joined inside of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any, Literal

from lakeckpt.checkpoint.arguments import checked_state
from lakeckpt.checkpoint.format.manifest import CheckpointInfo, Manifest
from lakeckpt.checkpoint.ranks import check_topology, exchange_of
from lakeckpt.checkpoint.restore.applying import Applying, Unusable
from lakeckpt.checkpoint.restore.from_storage import committed
from lakeckpt.checkpoint.restore.run_log import BesideRun, Step
from lakeckpt.errors import CheckpointMismatch, ConfigError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.tracking.exchange import Exchange

__all__ = ["load"]

_MIXED = "the modules and optimizers hold a mixture of states now: build them anew, or load another checkpoint"
_ADVICE = "Build these objects as they were when it was saved, or name fewer of them"


def load(
    uri: str | PathLike[str] | Storage,
    state: Mapping[str, Any],
    *,
    step: int | Literal["best"] | None = None,
    group: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    exchange: Exchange | None = None,
) -> CheckpointInfo:
    """Load a checkpoint of the run at ``uri`` into the objects of ``state``, without taking part in the run.

    Nothing is written to the run, and no attempt begins: a trainer that works on the run is not disturbed. Only storage
    is read, never the memory that ``capture_every`` fills.

    Args:
        uri: where the run lies: a local folder or any URL that fsspec knows, or a `Storage`.
        state: name → object with ``state_dict`` and ``load_state_dict``, under the names that the run has for them. All
            of them, or some: what is not named is not read.
        step: the optimizer step whose checkpoint is loaded; ``"best"``: the one with the best ``metric`` of those that
            are kept (the lowest, or the highest if the run's ``Keep(best=…, best_is="highest")`` says so); None: the
            newest. If the newest (or best) checkpoint is damaged, the next one is loaded, with a `DamageWarning`.
        group: the torch process group (or one-dimensional DeviceMesh) whose ranks load together; default: all ranks of
            torch.distributed, if that is initialized. As many as saved, or more, or fewer.
        rank, world_size: checked against the group's, if given. ``world_size=1``: this process loads alone, whatever
            torch.distributed says.
        storage_options: for fsspec.
        timeout_s: how long a rank waits for another one, in seconds.

    Returns which checkpoint was loaded: its ``step``, ``metric``, ``slot`` and more. Random states stay as they are.
    Collective over the ranks; all of them load the same checkpoint.

    Raises, on every rank, `CheckpointMismatch` listing all that does not fit and `StateError` if a reader refuses
    its state, with nothing changed on any; `CheckpointNotFound` if there is no such checkpoint (any more), with the
    steps that can be loaded; `CheckpointDamaged` if none is whole; `NewerFormat`, `ConfigError` and `StorageError`.
    """
    objects = checked_state(state)
    if step != "best" and step is not None and (type(step) is not int or step < 0):
        raise ConfigError(f"step is a number of optimizer steps, 'best', or None for the newest, got {step!r}")
    if not isinstance(uri, (str, PathLike, Storage)):
        raise ConfigError(f"a run lies at a folder, a URL or in a Storage, got {uri!r}")
    storage = uri if isinstance(uri, Storage) else open_storage(uri, storage_options=storage_options)
    if exchange is None:
        alone = world_size == 1 and group is None
        exchange = Exchange() if alone else exchange_of(group, timeout_s, alone=False)
    try:
        check_topology(exchange, rank, world_size)
        return CheckpointInfo.of(_loaded(storage, exchange, objects, step))
    finally:
        exchange.close()


def _loaded(storage: Storage, exchange: Exchange, objects: Mapping[str, Any], step: Step) -> Manifest:
    log = BesideRun(storage, step)
    applying = Applying(storage, exchange, objects, advice=_ADVICE, mixed=_MIXED)
    read = partial(committed, rank=exchange.rank, world_size=exchange.world_size, items=frozenset(objects))
    with applying.undone_if_it_fails():
        while True:
            slot = int(applying.all.ask_rank_0(log.choose)["slot"])
            try:
                chosen = applying.compare(partial(read, storage, slot))
                for name, reason in chosen.pins.skipped.items():
                    raise CheckpointMismatch(
                        f"the state of {name!r} cannot be loaded, and nothing was changed: {reason}"
                    )
                applying.apply(chosen)
            except Unusable as unusable:
                log.failed = slot, unusable.damaged[0]
                continue
            assert chosen.manifest is not None
            return chosen.manifest
