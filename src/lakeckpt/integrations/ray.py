"""This module fits lakeckpt into Ray Train: the run lies in the experiment's folder, and Ray knows its checkpoints.

Workers that Ray starts again find the run, however many they are. Each commit is reported to Ray as a small checkpoint,
which names the run and the step and holds no tensors. Ray's retention removes only such names, and lakeckpt's retention
only data of the run.

``ray.train.report`` waits for all workers. So all workers report at the same places: at a save, which falls at the same
step on each of them, and at the end of the ``with`` block. They report the newest commit that rank 0 knows of. The
module starts no threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from lakeckpt.checkpoint import manager
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.format.manifest import CheckpointInfo
from lakeckpt.checkpoint.load import load as load_run
from lakeckpt.checkpoint.sync_save import Saver
from lakeckpt.data.loader.device_prefetch import Prefetched, prefetch
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.errors import ConfigError, SaveFailed
from lakeckpt.integrations.common import Framework

_RAY = Framework(distribution="ray", oldest="2.60.0", newest="2.60.0")
with _RAY.imports():
    import ray.train
    import ray.train.torch

__all__ = ["CheckpointManager", "load", "prepare_data_loader"]

_FOLDER = "lakeckpt"
"""Where the run lies, in the experiment's folder."""
_FILE = "lakeckpt.json"
"""The file of a checkpoint that Ray knows."""
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""By the names of pyarrow's filesystems."""


def prepare_data_loader(loader: LakeLoader, *, depth: int = 2) -> Prefetched:
    """Return what iterates ``loader`` with batches on this worker's device, each with its receipt.

    It takes the place of ``ray.train.torch.prepare_data_loader``, which takes a batch ahead of the loop and makes
    batches anew, without their receipts. It also stands for the loader in the state of a manager. ``depth`` batches are
    held ready, at least 1. On a GPU, give the loader ``pin_memory=True``. Raises `ConfigError` for another loader.
    """
    return prefetch(loader, depth=depth, device=ray.train.torch.get_device())


class CheckpointManager(manager.CheckpointManager):
    """`lakeckpt.CheckpointManager` for the training function of a ``TorchTrainer``; every worker makes one.

    The run lies at ``storage_path/name/lakeckpt`` of the job's ``RunConfig``. A `restore` after a failure goes on there
    on any number of workers. The trainer's ``result.checkpoint`` and ``result.metrics`` are of the newest commit, and
    `load` reads such a checkpoint.

    Args:
        state: as for `lakeckpt.CheckpointManager`.
        uri: where the run lies instead: a path or URL that all nodes reach.
        options: the other arguments of `lakeckpt.CheckpointManager`.

    Raises `ConfigError` outside of a training function, in Ray's local mode (``num_workers=0``), which keeps nothing,
    and if runs cannot lie in the experiment's filesystem.
    """

    def __init__(self, state: Mapping[str, Any], *, uri: str | PathLike[str] | None = None, **options: Any) -> None:
        _RAY.check(ray.train, "get_context()", "get_checkpoint()", "report(checkpoint)")
        _RAY.check(ray.train.Checkpoint, "from_directory()", "as_directory()")
        storage = _storage_of_job()
        _RAY.check(storage, "storage_filesystem.type_name", "experiment_fs_path")
        self._uri = _uri_in(storage) if uri is None else fspath(uri)
        self._metrics: Mapping[str, Any] = {}
        self._metrics_of: dict[int, dict[str, Any]] = {}
        self._reported: tuple[str, int] | None = None
        super().__init__(self._uri, state, **options)

    def restore(self, step: int | None = None, **options: Any) -> int:
        """Restore as `lakeckpt.CheckpointManager.restore` does. Ray's own newest checkpoint is not asked: a commit that
        Ray does not know yet is restored, too."""
        done = super().restore(step, **options)
        known = ray.train.get_checkpoint()
        self._reported = None if known is None else _named_by(known)
        return done

    def step(self, batch: Any = None, *, metric: float | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Count an optimizer step as `lakeckpt.CheckpointManager.step` does, and save if the policy says so.

        Give it the ``batch``: without one, it is not known what the step used if a wrapper reads ahead, as Ray's
        does, and with a reader in the state that is refused (`ConfigError`). ``metrics`` are Ray's metrics of this step
        if it is saved: numbers, texts, or tensors of one element, which are read at a save only. Rank 0's count.
        """
        if batch is None and self._tracks:
            raise ConfigError(
                f"step() was given no batch, and {sorted(self._tracks)} are read: call step(batch) with the last batch "
                "that the step used. Behind ray.train.torch.prepare_data_loader a batch has no receipt: use "
                "lakeckpt.integrations.ray.prepare_data_loader"
            )
        if not isinstance(metrics, Mapping | None):
            raise ConfigError(f"metrics is a mapping of names to numbers or texts, got {type(metrics).__name__}")
        self._metrics = metrics or {}
        super().step(batch, metric=metric)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the last cut as `lakeckpt.CheckpointManager` does, and report the newest commit to Ray."""
        ends_well = kind is None and not self._closed and self._saves is not None
        super().__exit__(kind, error, trace)
        if ends_well:
            self._report_to_ray(self._reporter.newest or (None if self._exchange.rank else self.latest()))

    def _save(self, saves: Saver | Background, *, sync: bool) -> None:
        if self._exchange.rank == 0:
            self._metrics_of[self._step] = {name: _plain(value) for name, value in self._metrics.items()}
        failure = None
        try:
            super()._save(saves, sync=sync)
        except SaveFailed as error:  # the other workers report, and training may go on
            failure = error
        self._report_to_ray(self._reporter.newest)
        if failure is not None:
            raise failure

    def _report_to_ray(self, newest: CheckpointInfo | None) -> None:
        """Report ``newest``, as rank 0 knows it, if Ray does not know it yet; collective."""
        if self._exchange.rank or newest is None or self._reported == (self._uri, newest.slot):
            ray.train.report({})
            return
        self._reported = self._uri, newest.slot
        metrics = {**self._metrics_of.get(newest.step, {}), "step": newest.step}
        self._metrics_of = {step: one for step, one in self._metrics_of.items() if step > newest.step}
        with TemporaryDirectory() as folder:
            text = json.dumps({"uri": self._uri, "slot": newest.slot, "step": newest.step})
            Path(folder, _FILE).write_text(text, "utf-8")
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def load(checkpoint: ray.train.Checkpoint, state: Mapping[str, Any], **options: Any) -> CheckpointInfo:
    """Load a checkpoint that a `CheckpointManager` reported, such as ``result.checkpoint``, into ``state``'s objects.

    It calls `lakeckpt.load` with the run and the step that ``checkpoint`` names, and with ``options``. Raises what this
    raises, such as `CheckpointNotFound` if the run has not kept the step; `ConfigError` for a checkpoint of others.
    """
    found = _read(checkpoint)
    if found is None:
        raise ConfigError(f"{checkpoint!r} has no {_FILE}: it was not reported by a lakeckpt CheckpointManager")
    return load_run(found["uri"], state, step=found["step"], **options)


def _read(checkpoint: ray.train.Checkpoint) -> Any:
    """Return what a checkpoint that Ray knows names; None if it is one of others."""
    with checkpoint.as_directory() as folder:
        file = Path(folder, _FILE)
        return json.loads(file.read_text("utf-8")) if file.is_file() else None


def _named_by(checkpoint: ray.train.Checkpoint) -> tuple[str, int] | None:
    """Return (URI, slot) of the commit that a checkpoint of Ray names."""
    found = _read(checkpoint)
    return None if found is None else (found["uri"], found["slot"])


def _plain(value: Any) -> Any:
    """Return the number in a tensor or an array of one element; other values as they are."""
    return value.item() if hasattr(value, "item") else value


def _storage_of_job() -> Any:
    """Return where Ray keeps the experiment: its ``storage_filesystem`` and ``experiment_fs_path``."""
    try:
        return ray.train.get_context().get_storage()
    except NotImplementedError as error:
        raise ConfigError(
            "Ray's local mode (ScalingConfig(num_workers=0)) keeps no checkpoints: use num_workers=1, or "
            "lakeckpt.CheckpointManager with the place of the run"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            "this CheckpointManager belongs in the training function of a TorchTrainer, where ray.train.report works: "
            "elsewhere use lakeckpt.CheckpointManager"
        ) from error


def _uri_in(storage: Any) -> str:
    """Return the URI of the run in the experiment's folder."""
    kind = str(storage.storage_filesystem.type_name)
    if kind not in _SCHEMES:
        raise ConfigError(
            f"the experiment lies in a filesystem of type {kind!r}, and runs lie on local or shared disks, in S3 or in "
            "Google's store: give the manager uri="
        )
    return f"{_SCHEMES[kind]}{storage.experiment_fs_path}/{_FOLDER}"
