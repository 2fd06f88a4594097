"""Ray Train on a local cluster: the page's script, whose workers and driver are killed, on one worker and on two."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray
import ray.train.torch
import torch
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    ResourceRequestPriority,
    get_or_create_autoscaling_coordinator,
)
from ray.train.torch.train_loop_utils import _WrappedDataLoader
from ray.train.v2.api.context import LocalTrainContext

import lakeckpt
import lakeckpt.integrations.ray
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import ConfigError, SaveFailed
from lakeckpt.integrations.ray import CheckpointManager
from lakeckpt.lake.storage.open import open_storage
from tests.checkpoint.reading_ahead import FILES, Run
from tests.checkpoint.scripts import write_table as write_ids
from tests.frameworks.harness import ROOT, Job, write_table

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # ray's imports warn

ROWS, EPOCHS = 300, 2
QUIET = {
    "RAY_AUTH_MODE": "disabled",  # it writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
}

# --- the page's script


def page_script() -> str:
    text = (ROOT / "docs" / "how-to" / "ray.md").read_text("utf-8")
    found = re.search(r"^```python no-run\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


WITHOUT = """
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig

def train(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = YourDataset(config["table"])
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(dataset, batch_size=8))
    for epoch in range(3):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

trainer = ray.train.torch.TorchTrainer(
    train,
    train_loop_config={"table": "/mnt/shared/events"},
    scaling_config=ScalingConfig(num_workers=(1, 2)),
    run_config=RunConfig(name="run-7", storage_path="/mnt/shared/runs", failure_config=FailureConfig(max_failures=3)),
)
result = trainer.fit()
print(result.checkpoint, result.metrics)
"""


def test_the_pages_script_is_five_lines_longer_than_without_lakeckpt() -> None:
    with_us, without = (
        [line.strip() for line in text.splitlines() if line.strip()] for text in (page_script(), WITHOUT)
    )
    assert len(with_us) - len(without) <= 5
    changed = [line for line in without if line not in with_us]
    assert [line.split()[0] for line in changed] == ["dataset", "loader", "for", "loss.backward()"]


# --- on a cluster

HOOK = """
import os, pathlib, signal, time
from tests.frameworks.notes import note

FOLDER = pathlib.Path({folder!r})

def hook(manager, model, batch, driver):
    os.environ["NOTES"], os.environ["ATTEMPT"] = str(FOLDER / "notes"), "0"
    step, size = manager.steps_done + 1, ray.train.get_context().get_world_size()
    weights = [one.tolist() for one in model.state_dict().values()]
    note(step, batch["id"].tolist(), attempt=manager.restore_report.attempt, size=size, weights=weights)
    if driver == 0 and step == 17:
        time.sleep(600)
    for at, kill in ((5, "first"), (11, "second")):
        if step == at and int(os.environ["RANK"]) == size - 1 and not (FOLDER / kill).exists():
            coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
            ray.get(coordinator.cancel_request.remote("others"))
            (FOLDER / kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)

"""


class RayJob(Job):
    """A job whose attempts are those of lakeckpt: Ray begins several while one driver runs."""

    def _steps_of(self, attempt: int) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def attempts_of(self, what: str) -> dict[int, Any]:
        """Return attempt → ``what`` it noted at each step, by step; of rank 0."""
        found: dict[int, dict[int, Any]] = {}
        for line in self.lines():
            found.setdefault(line["attempt"], {}).setdefault(line["step"], line[what])
        return dict(sorted(found.items()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster with two CPUs, and its address."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="ray-") as folder:
        for name, value in {**QUIET, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27, _temp_dir=folder)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


def reserve_a_cpu() -> None:
    """Let an elastic group of workers have one CPU only, until "others" cancel their request."""
    request = get_or_create_autoscaling_coordinator().request_resources
    bundle, priority = [{"CPU": 1}], ResourceRequestPriority.HIGH
    ray.get(request.remote(requester_id="others", resources=bundle, expire_after_s=600, priority=priority))


def written(folder: Path) -> Path:
    """Write the page's script with a hook that notes and kills, and with fewer rows, epochs and steps between saves."""
    text, table = page_script(), str(folder / "table")
    for old, new in {
        '{"table": "/mnt/shared/events"}': f'{{"table": {table!r}, "driver": int(os.environ["ATTEMPT"])}}',
        '"/mnt/shared/runs"': f"{str(folder / 'runs')!r}, checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2)",
        "persist_every=100": "persist_every=2",
        # For minutes Ray keeps the CPUs of an elastic job whose driver was killed, and another such job waits for them.
        "num_workers=(1, 2)": 'num_workers=(1, 2) if os.environ["ATTEMPT"] == "0" else 1',
        "range(loader.epoch, 3)": f"range(loader.epoch, {EPOCHS})",
        "manager.step(batch": 'hook(manager, model, batch, config["driver"]); manager.step(batch',
        "\n\ndef train": HOOK.format(folder=str(folder / "job")) + "\n\ndef train",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.timeout(900)
def test_the_page_goes_on_by_itself_on_more_and_on_fewer_workers_and_after_the_driver_is_killed(
    cluster: str, tmp_path: Path
) -> None:
    write_table(tmp_path / "table", rows=ROWS)
    job = RayJob(tmp_path / "job", written(tmp_path))
    attempt = {"launcher": [sys.executable], "environment": {"RAY_ADDRESS": cluster, **QUIET}}
    reserve_a_cpu()
    job.run(kill_after=17, **attempt)
    printed = job.run(**attempt)

    sizes = job.attempts_of("size").values()
    assert [set(one.values()) for one in sizes] == [{1}, {2}, {2}, {1}]
    assert [min(one) for one in sizes] == [1, 5, 11, 17]
    assert job.counts() == Counter(dict.fromkeys(range(ROWS), EPOCHS))
    weights = list(job.attempts_of("weights").values())
    assert weights[1][11] == weights[2][11]  # the same step of the same number of workers, made twice
    run = tmp_path / "runs" / "run-7"
    assert audit(open_storage(run / "lakeckpt")).verdict == "proved"

    result = ray.train.Result.from_path(run)
    last = max(weights[3])
    assert result.metrics is not None and result.metrics["step"] == last and result.metrics["loss"] >= 0
    assert f"'step': {last}" in printed
    assert [metrics["step"] for _, metrics in result.best_checkpoints or []] == [last - 2 + last % 2, last]
    for checkpoint, metrics in result.best_checkpoints or []:
        model = torch.nn.Linear(1, 1)
        assert lakeckpt.integrations.ray.load(checkpoint, {"model": model}).step == metrics["step"]
        assert [one.tolist() for one in model.state_dict().values()] == weights[3][metrics["step"]]


# --- without a cluster


class RayStub:
    """Stands for Ray in a training function, and keeps what was reported."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.reports: list[dict[str, Any]] = []
        self.known: list[ray.train.Checkpoint] = []
        self.folder = folder
        storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem(), experiment_fs_path=str(folder))
        patch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage))
        patch.setattr(ray.train, "get_checkpoint", lambda: self.known[-1] if self.known else None)
        patch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
        patch.setattr(ray.train, "report", self.report)

    def report(self, metrics: dict[str, Any], checkpoint: ray.train.Checkpoint | None = None) -> None:
        self.reports.append(metrics)
        if checkpoint is not None:
            kept = ray.train.Checkpoint.from_directory(checkpoint.to_directory(self.folder / f"c{len(self.reports)}"))
            self.known.append(kept)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayStub:
    return RayStub(tmp_path / "experiment", monkeypatch)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(write_ids(tmp_path_factory.mktemp("table"), files=FILES))


def loader_of(table: lakeckpt.Table, **options: Any) -> lakeckpt.LakeLoader:
    return lakeckpt.LakeLoader(lakeckpt.LakeDataset(table, batch_size=40), **options)


@pytest.mark.parametrize("options", [{}, {"capture_every": 1}], ids=["waiting", "beside training"])
def test_every_save_is_reported_once_with_the_metrics_of_its_step(
    options: dict[str, Any], stub: RayStub, table: lakeckpt.Table, tmp_path: Path
) -> None:
    loader = lakeckpt.integrations.ray.prepare_data_loader(loader_of(table))
    arenas = {"arenas": tmp_path / "arenas"} if options else {}
    with CheckpointManager({"reader": loader}, persist_every=2, **options, **arenas) as manager:
        manager.restore()
        for step, batch in enumerate(loader, 1):
            manager.step(batch, metrics={"loss": torch.tensor(step / 2), "name": "x"})
            if step == 3:
                manager.wait()  # so that a save beside training, of step 2, is reported with the next one
    reported = [one for one in stub.reports if one]
    assert all(one == {"loss": one["step"] / 2, "name": "x", "step": one["step"]} for one in reported)
    steps = [one["step"] for one in reported]
    assert steps == [2, 4, 5] or (options and steps[0] < steps[-1] == 5)
    assert len(stub.reports) == 4  # of two saves by policy, of the last save, and of the end, on any rank


def test_a_run_that_is_over_is_not_reported_again_and_a_commit_that_ray_missed_is(
    stub: RayStub, table: lakeckpt.Table
) -> None:
    def run() -> None:
        loader = loader_of(table)
        with CheckpointManager({"reader": loader}) as manager:
            if manager.restore() == 0:
                for batch in loader:
                    manager.step(batch, metrics={"loss": 1.0})

    run()
    run()
    assert stub.reports == [{"loss": 1.0, "step": 5}, {}, {}]
    stub.known.clear()
    run()
    assert stub.reports[3:] == [{"step": 5}] and len(stub.known) == 1


def test_a_save_that_fails_is_reported_as_none_so_that_no_worker_waits_for_another(
    stub: RayStub, table: lakeckpt.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(table)

    def fail(*_: object, **__: object) -> None:
        raise SaveFailed("the store is away")

    with CheckpointManager({"reader": loader}, persist_every=2) as manager:
        manager.restore()
        manager._reporter._outage.committed()  # the first save of an attempt raises
        batches = iter(loader)
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(manager._saves, "save", fail)
                manager.step(next(batches))
        assert stub.reports == [{}]


def test_a_step_without_a_batch_is_refused_also_behind_rays_wrapper(stub: RayStub, table: lakeckpt.Table) -> None:
    loader = loader_of(table)
    with CheckpointManager({"reader": loader}) as manager:
        manager.restore()
        batches = iter(_WrappedDataLoader(loader, torch.device("cpu"), True))
        with pytest.raises(ConfigError, match=r"step\(batch\).*integrations\.ray\.prepare_data_loader"):
            manager.step()
        with pytest.raises(ConfigError, match="receipt"):
            manager.step(next(batches))
    with CheckpointManager({"model": torch.nn.Linear(1, 1)}, uri=stub.folder / "other") as manager:
        manager.restore()
        manager.step()  # nothing is read


def test_a_checkpoint_of_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no lakeckpt\.json"):
        lakeckpt.integrations.ray.load(ray.train.Checkpoint.from_directory(tmp_path), {})


@pytest.mark.parametrize(
    ("filesystem", "folder", "expected"),
    [
        (pyarrow.fs.LocalFileSystem(), "/mnt/runs/run-7", "/mnt/runs/run-7/lakeckpt"),
        (pyarrow.fs.S3FileSystem(anonymous=True, region="eu-west-1"), "bucket/run-7", "s3://bucket/run-7/lakeckpt"),
        (pyarrow.fs.GcsFileSystem(anonymous=True), "bucket/run-7", "gs://bucket/run-7/lakeckpt"),
    ],
)
def test_the_run_lies_in_the_folder_of_the_experiment(
    filesystem: pyarrow.fs.FileSystem, folder: str, expected: str
) -> None:
    storage = SimpleNamespace(storage_filesystem=filesystem, experiment_fs_path=folder)
    assert lakeckpt.integrations.ray._uri_in(storage) == expected


def test_wrong_places_are_refused(stub: RayStub, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(storage_filesystem=pyarrow.fs._MockFileSystem(), experiment_fs_path="x")
    with pytest.raises(ConfigError, match=r"of type 'mock'.*uri="):
        lakeckpt.integrations.ray._uri_in(memory)
    monkeypatch.setattr(ray.train, "get_context", lambda: LocalTrainContext("run"))
    with pytest.raises(ConfigError, match="num_workers=1"):
        CheckpointManager({})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="training function"):
        CheckpointManager({})
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"takes a lakeckpt\.LakeLoader"):
        lakeckpt.integrations.ray.prepare_data_loader(torch.utils.data.DataLoader([1]))


# --- Ray's own wrapper, with lakeckpt's own manager


def wrapped(loader: lakeckpt.LakeLoader) -> Iterator[Any]:
    """What ``ray.train.torch.prepare_data_loader(loader)`` gives, which needs a cluster to be asked for."""
    return _WrappedDataLoader(loader, torch.device("cpu"), True)


@pytest.mark.parametrize("killed_after", [1, 2, 3, 8])
def test_a_bare_step_behind_rays_wrapper_is_warned_of_and_proved_of_what_was_delivered(
    killed_after: int, table: lakeckpt.Table
) -> None:
    run = Run(table, world_size=2)
    run.attempt(wrapped, says=False, steps=killed_after)
    run.attempt(wrapped, says=False)
    assert run.lost == 20  # a batch of each rank
    assert run.warned and run.verdict == "delivered"


def test_rays_wrapper_leaves_the_receipt_column_in_place(table: lakeckpt.Table) -> None:
    run = Run(table, world_size=2)
    run.attempt(wrapped, says=True, steps=4, column="receipt")
    run.attempt(wrapped, says=True, column="receipt")
    assert run.used_once and not run.warned and run.verdict == "proved"
