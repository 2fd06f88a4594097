"""The script of docs/how-to/deepspeed.md, killed and resumed on other ranks; what is refused; what a state holds."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.cli.main import main
from lakeckpt.errors import CheckpointMismatch, ConfigError
from lakeckpt.integrations.deepspeed import LakeCheckpoint
from tests.frameworks.harness import ROOT, Job, free_port, write_table

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROWS = 96
LARGE = 300_000  # tensors of more than 1 MiB are read into their place
PAGE = ROOT / "docs" / "how-to" / "deepspeed.md"
QUIET = 'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled, and gloo does the same\n'
NOTES = """
import hashlib
from tests.frameworks.notes import note

def digest():
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=STAGE == 3):
        return hashlib.sha1(b"".join(one.detach().numpy().tobytes() for one in engine.module.parameters())).hexdigest()

used = []
"""


def script_of(folder: Path, stage: int) -> Path:
    """Write the page's script, with ``stage``, small batches, and a note of the rows and weights of each step."""
    (text,) = re.findall(r"```python no-run\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = []
    for line in text.splitlines(keepends=True):
        indent = line[: len(line) - len(line.lstrip())]
        if line.startswith("model ="):
            lines.append(f"{QUIET}STAGE = {stage}\n")
        if line.startswith("with "):
            lines.append(NOTES)
        if "manager.step(batch)" in line:
            lines += [
                f'{indent}used += batch["id"].tolist()\n',
                f"{indent}if engine.global_steps > manager.steps_done:\n",
            ]
            lines += [f"{indent}    note(engine.global_steps, used, weights=digest())\n", f"{indent}    used = []\n"]
        lines.append(line)
        if "manager.restore()" in line:
            lines.append(f"{indent}note(0, [], restored=manager.steps_done, weights=digest())\n")
    changed = "".join(lines).replace('"stage": 3', f'"stage": {stage}').replace("persist_every=100", "persist_every=4")
    script = folder / "train.py"
    script.write_text(changed.replace('"lr": 0.01', '"lr": 0.01, "torch_adam": True'))
    return script


@pytest.mark.parametrize(("stage", "ranks"), [(2, (2, 1)), (3, (2, 2, 1))])
def test_the_script_of_the_page_is_killed_and_goes_on_on_the_same_and_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int, ranks: tuple[int, ...]
) -> None:
    job = Job(tmp_path / "job", tmp_path / "train.py")
    script_of(tmp_path, stage)
    write_table(job.folder / "events", rows=ROWS)
    environment = {"DS_ACCELERATOR": "cpu"}
    for at, count in enumerate(ranks):
        last = at == len(ranks) - 1
        job.run(ranks=count, kill_after=None if last else 7, environment=environment)
    assert Counter(job.counts().values()) == {2: ROWS}  # two epochs
    assert_weights_of_the_same_steps(job)
    assert main(["audit", str(job.folder / "run")]) == 0
    assert "PROVED" in capsys.readouterr().out


def assert_weights_of_the_same_steps(job: Job) -> None:
    """A restart has the weights of the step that it goes on from, and on as many ranks the same steps again."""
    lines = job.lines()
    starts = {line["attempt"]: line for line in lines if line["step"] == 0}
    for attempt in range(1, job.attempts):
        step, weights = starts[attempt]["restored"], starts[attempt]["weights"]
        before = [line for line in lines if line["attempt"] < attempt and line["step"] == step]
        assert step > 0 and {line["weights"] for line in before} == {weights}


def test_the_page_adds_five_lines_at_most() -> None:
    (text,) = re.findall(r"```python no-run\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ours = [line for line in text.splitlines() if "lakeckpt" in line.lower() or "manager" in line]
    in_place_of_a_dataset_and_its_loader = 2
    assert len(ours) - in_place_of_a_dataset_and_its_loader <= 5


# --- in this process


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
            patch.setenv(name, value)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def engine_of(stage: int, *, width: int = 3, config: dict[str, Any] | None = None, **zero: Any) -> Any:
    torch.manual_seed(width)
    model = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))
    model.register_buffer("seen", torch.zeros(1))
    model[1].bias.requires_grad = False
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **zero},
        **(config or {}),
    }
    return deepspeed.initialize(model=model, config=config)[0]


def loader_of(folder: Path) -> LakeLoader:
    if not folder.exists():
        write_table(folder, rows=32)
    return LakeLoader(LakeDataset(str(folder), batch_size=4, shuffle=True, seed=1))


def train(engine: Any, loader: LakeLoader, manager: Any, steps: int) -> None:
    for _, batch in zip(range(steps), loader, strict=False):
        engine.module.seen += 1
        inputs = batch["x"][:, None].to(next(engine.module.parameters()).dtype)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
        manager.step(batch)


HALF = {"bf16": {"enabled": True}}
CASES = [(0, 3, {}), (1, 3, {}), (2, LARGE, {}), (3, 3, {}), (3, LARGE, {}), (2, 3, HALF), (3, 3, HALF)]
CASES += [(1, 3, HALF | {"data_types": {"grad_accum_dtype": "fp32"}})]  # DeepSpeed takes another optimizer for this
CAPTURED = {"capture_every": 1}


@pytest.mark.parametrize(
    ("stage", "width", "config", "options"),
    [*((*case, {}) for case in CASES), (1, 3, {}, CAPTURED), (3, LARGE, {}, CAPTURED)],
)
def test_weights_buffers_and_states_of_each_stage_come_back(
    tmp_path: Path, stage: int, width: int, config: dict[str, Any], options: dict[str, Any]
) -> None:
    options = {**options, "arenas": str(tmp_path / "arenas")} if options else {}
    states = []
    for _ in range(2):
        engine, loader = engine_of(stage, width=width, config=config), loader_of(tmp_path / "events")
        with LakeCheckpoint(str(tmp_path / "run"), engine, loader, **options) as manager:
            if not manager.restore():
                train(engine, loader, manager, 3)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
                weights = {name: one.clone() for name, one in engine.module.state_dict().items()}
            moments = [one for each in engine.optimizer.state.values() for one in each.values()]
            states.append((engine.global_steps, engine.global_samples, weights, [one.clone() for one in moments]))
    (steps, samples, weights, moments), (steps_2, samples_2, weights_2, moments_2) = states
    assert (steps, samples) == (steps_2, samples_2) == (3, 12)
    assert all(torch.equal(one, weights_2[name]) for name, one in weights.items())
    assert len(moments) == len(moments_2) > 0
    assert all(torch.equal(one, other) for one, other in zip(moments, moments_2, strict=True))


def test_states_come_back_where_it_is_not_known_what_the_optimizer_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = []
    for _ in range(2):
        engine, loader = engine_of(3), loader_of(tmp_path / "events")
        with LakeCheckpoint(str(tmp_path / "run"), engine, loader) as manager:
            if not manager.restore():
                train(engine, loader, manager, 2)
            moments.append(engine.optimizer.state[engine.optimizer.fp32_partitioned_groups_flat[0]]["exp_avg"].clone())
        monkeypatch.setattr("lakeckpt.integrations.deepspeed._EngineState._first_state", lambda self, flat: {})
    assert torch.equal(*moments) and moments[0].any()


def test_another_model_or_stage_is_refused_by_its_name(tmp_path: Path) -> None:
    engine, loader = engine_of(2), loader_of(tmp_path / "events")
    with LakeCheckpoint(str(tmp_path / "run"), engine, loader) as manager:
        manager.restore()
        train(engine, loader, manager, 1)
    for other, said in ((engine_of(2, width=4), "0.weight is float32"), (engine_of(3), "'model' is in the checkpoint")):
        with LakeCheckpoint(str(tmp_path / "run"), other, loader_of(tmp_path / "events")) as manager:
            with pytest.raises(CheckpointMismatch, match=said):
                manager.restore()


def test_stage_1_goes_on_from_a_checkpoint_of_stage_2(tmp_path: Path) -> None:
    weights = []
    for stage in (2, 1):
        engine, loader = engine_of(stage), loader_of(tmp_path / "events")
        with LakeCheckpoint(str(tmp_path / "run"), engine, loader) as manager:
            if not manager.restore():
                train(engine, loader, manager, 2)
            weights.append(engine.optimizer.single_partition_of_fp32_groups[0].detach().clone())
    assert torch.equal(*weights)


def test_a_step_of_the_engine_that_was_not_counted_is_refused(tmp_path: Path) -> None:
    engine, loader = engine_of(1), loader_of(tmp_path / "events")
    with LakeCheckpoint(str(tmp_path / "run"), engine, loader) as manager:
        manager.restore()
        manager.step()  # the engine has not stepped
        assert manager.steps_done == 0
        batch = next(iter(loader))
        for _ in range(2):
            engine.backward(engine(batch["x"][:, None]).mean())
            engine.step()
        with pytest.raises(ConfigError, match="has done 2 steps"):
            manager.step(batch)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    loader = loader_of(tmp_path / "events")
    with pytest.raises(ConfigError, match="round_robin_gradients"):
        LakeCheckpoint(str(tmp_path / "run"), engine_of(2, round_robin_gradients=True), loader)
    with pytest.raises(ConfigError, match="got a LakeDataset"):
        LakeCheckpoint(str(tmp_path / "run"), engine_of(2), loader.dataset)
    with pytest.raises(ConfigError, match="got a Linear"):
        LakeCheckpoint(str(tmp_path / "run"), torch.nn.Linear(1, 1), loader)


def test_a_dataset_is_no_training_data(tmp_path: Path) -> None:
    dataset = loader_of(tmp_path / "events").dataset
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    with pytest.raises(ConfigError, match="training_data"):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config, training_data=dataset)
    with pytest.raises(ConfigError, match="sampler"):
        DistributedSampler(dataset, num_replicas=2, rank=0)
    assert len(DataLoader(dataset, batch_size=None)) == len(dataset) == 8
