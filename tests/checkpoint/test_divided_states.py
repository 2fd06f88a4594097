"""What ranks hold parts of is given back as such: states of any shape in optimizers, and tensors of any object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.state.shards import divided_like, offsets_of, sharing_of
from lakeckpt.convert import read_state
from lakeckpt.errors import CheckpointMismatch
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.test_sharded import begin, whole
from tests.tracking.processes import run_processes


class Factored(torch.optim.Optimizer):
    """Numbers for rows, for columns and for all, one of them in a list: states of other shapes than parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state, square = self.state[parameter], parameter.grad.square()
            if parameter.dim() == 1:
                state.setdefault("all", torch.zeros_like(parameter)).add_(square)
                parameter.sub_(state["all"].sqrt(), alpha=0.1)
                continue
            rows, columns = square.mean(1, keepdim=True), square.mean(0)
            if isinstance(columns, DTensor):
                columns = columns.redistribute(placements=[Replicate()] * columns.device_mesh.ndim)
            if not state:
                state["rows"], state["more"] = torch.zeros_like(rows), {"columns": [torch.zeros_like(columns)]}
            state["rows"].mul_(0.5).add_(rows)
            state["more"]["columns"][0].mul_(0.5).add_(columns)
            parameter.sub_(state["rows"].sqrt() + state["more"]["columns"][0].sqrt(), alpha=0.1)


class Average:
    """Copies into the tensors that it has."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, one in model.named_parameters():
            self.shadow[name].lerp_(one.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in state["shadow"].items():
            self.shadow[name].copy_(one)


class App:
    """As the documentation of torch has it: one object for a model and its optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def built(seed: int, world_size: int, *, sharded: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, other = torch.nn.Linear(5, 5), torch.nn.Linear(3, 7)  # rows and columns are told apart by how they lie
    if sharded:
        for one in (model, other):
            fully_shard(one, mesh=init_device_mesh("cpu", (world_size,)))
    app = App(other, torch.optim.AdamW(other.parameters(), lr=0.1, foreach=False))
    return {"model": model, "factored": Factored(model.parameters()), "average": Average(model), "app": app}


def train(objects: dict[str, Any], steps: int = 1) -> None:
    app = objects["app"]
    for _ in range(steps):
        for parameter in (*objects["model"].parameters(), *app.model.parameters()):
            parameter.grad = parameter.detach() * 0.5 + 1
        objects["factored"].step()
        app.optimizer.step()
        objects["average"].update(objects["model"])


def said(objects: dict[str, Any]) -> str:
    """Collective."""
    return str({name: whole(dict(one.state_dict())) for name, one in objects.items()})


def kinds(value: Any) -> Any:
    """What is a DTensor, and how it is divided."""
    if isinstance(value, DTensor):
        return f"DTensor {value.placements} of {tuple(value.shape)}"
    if isinstance(value, dict):
        return {key: kinds(one) for key, one in value.items()}
    return [kinds(one) for one in value] if isinstance(value, list) else type(value).__name__


def kinds_of(objects: dict[str, Any]) -> str:
    return str({name: kinds(dict(one.state_dict())) for name, one in objects.items()})


def save(rank: int, world_size: int, folder: str, captured: bool) -> None:
    begin(rank, world_size, folder)
    objects = built(1, world_size)
    options = {"capture_every": 1, "arenas": f"{folder}/memory"} if captured else {}
    saver = CheckpointManager(LocalStorage(f"{folder}/run"), objects, persist_every=10**9, **options)
    saver.restore()
    train(objects, 2)
    saver.step()
    if captured:
        saver._saves._engine.wait()  # until the arena is made
        saver.step()
        assert saver._saves._engine.wait() == 2
    else:
        saver.save()
    saved = said(objects)
    again = built(2, world_size)
    second = CheckpointManager(LocalStorage(f"{folder}/run"), again, persist_every=10**9, **options)
    assert second.restore() == 1 + captured and second.restore_report.captured == (2 if captured else None)
    assert said(again) == saved
    assert kinds_of(again) == kinds_of(objects)
    train(objects)
    train(again)  # DTensors and plain tensors do not mix
    assert said(again) == said(objects)
    Path(folder, f"saved.{rank}").write_text(saved)
    Path(folder, f"trained.{rank}").write_text(said(objects))
    for one in (second, saver):
        one.close()
    dist.destroy_process_group()


def go_on(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    objects = built(3, world_size)
    assert CheckpointManager(f"{folder}/run", objects).restore() == 1
    assert said(objects) == Path(folder, "saved.0").read_text()
    expected = built(4, world_size)
    train(expected)
    assert kinds_of(objects) == kinds_of(expected)
    train(objects)
    assert said(objects) == Path(folder, "trained.0").read_text()
    dist.destroy_process_group()


def test_states_of_any_shape_and_any_object_come_back_divided_as_their_optimizer_would_divide_them(
    tmp_path: Path,
) -> None:
    run_processes(2, save, 2, str(tmp_path), False)
    run_processes(3, go_on, 3, str(tmp_path))
    alone = built(5, 1, sharded=False)
    assert CheckpointManager(tmp_path / "run", alone).restore() == 1
    assert said(alone) == (tmp_path / "saved.0").read_text()
    assert str(read_state(tmp_path / "run")["average"]) == str(alone["average"].state_dict())
    train(alone)


def on_another_mesh(rank: int, folder: str) -> None:
    begin(rank, 2, f"{folder}/again")
    torch.manual_seed(9)
    model = torch.nn.Linear(5, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard")))
    objects = {"model": model, "factored": Factored(model.parameters())}
    before = said(objects)
    with pytest.raises(CheckpointMismatch, match="factored: it was divided over a mesh of 1 dimensions, and its par"):
        CheckpointManager(f"{folder}/run", objects).restore()
    assert said(objects) == before
    dist.destroy_process_group()


def save_factored(rank: int, folder: str) -> None:
    begin(rank, 2, folder)
    model = torch.nn.Linear(5, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    objects = {"model": model, "factored": Factored(model.parameters())}
    with CheckpointManager(f"{folder}/run", objects, persist_every=1) as saver:
        saver.restore()
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 1
        objects["factored"].step()
        saver.step()
    dist.destroy_process_group()


def test_a_state_of_another_shape_is_refused_on_a_mesh_of_other_dimensions(tmp_path: Path) -> None:
    run_processes(2, save_factored, str(tmp_path))
    (tmp_path / "again").mkdir()
    run_processes(2, on_another_mesh, str(tmp_path))


def twice(rank: int, folder: str) -> None:
    begin(rank, 4, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 3))
    parallelize_module(model, mesh["columns"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["rows"])
    for parameter in model.parameters():
        spec = TensorSpec(key="x", dtype="float32", shape=tuple(parameter.shape))
        made, expected = divided_like(parameter, spec, sharing_of(parameter).dims), torch.empty_like(parameter)
        assert isinstance(made, DTensor) and made.placements == expected.placements == parameter.placements
        assert offsets_of("x", made) == offsets_of("x", expected)
    dims = [sharing_of(parameter).dims for parameter in model.parameters()]
    assert dims == [(0, 0), (0, 0), (0, 1), (0, -1)]
    dist.destroy_process_group()


def test_parameters_that_are_divided_twice_by_one_dimension_have_states_that_are(tmp_path: Path) -> None:
    run_processes(4, twice, str(tmp_path))


def test_they_come_back_from_memory_too(tmp_path: Path) -> None:
    run_processes(2, save, 2, str(tmp_path), True)


class Flat(torch.optim.Optimizer):
    """Keeps the parameter that it began with, as Prodigy does: flattened."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            if not state:
                state["begin"], state["sum"] = parameter.flatten().clone(), torch.zeros_like(parameter.flatten())
            state["sum"].add_(parameter.grad.flatten())
            distance = torch.dot(state["sum"], state["begin"] - parameter.flatten()).item()
            parameter.sub_(parameter.grad, alpha=0.1 + distance * 0.001)


def flat(rank: int, world_size: int, folder: str, number: int) -> None:
    """Both dimensions of the mesh, or one of them, divide the parameters."""
    begin(rank, world_size, f"{folder}/{number}")
    torch.manual_seed(number)
    model = torch.nn.Linear(5, 12)
    fully_shard(model, mesh=init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replica", "shard")))
    objects = {"model": model, "optimizer": Flat(model.parameters())}
    manager = CheckpointManager(f"{folder}/run", objects, persist_every=10**9)
    assert manager.restore() == number
    if number:
        assert said(objects) == Path(folder, "saved").read_text()
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 1
    objects["optimizer"].step()
    for state in objects["optimizer"].state.values():
        assert {kinds(one) for one in state.values()} == {kinds(state["sum"])}
        assert state["sum"].placements == (Replicate(), Shard(0))
    manager.step()
    manager.save()
    text = said(objects)
    if rank == 0:
        Path(folder, "saved").write_text(text)
    manager.close()
    dist.destroy_process_group()


def test_what_was_flattened_comes_back_divided(tmp_path: Path) -> None:
    for number, world_size in enumerate((2, 2, 3, 1, 2)):
        (tmp_path / str(number)).mkdir()
        run_processes(world_size, flat, world_size, str(tmp_path), number)


class Local(torch.optim.Optimizer):
    """Works on this rank's part, and keeps plain tensors: of the part's shape, and of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            part, state = parameter.to_local(), self.state[parameter]
            if not state:
                state["moment"] = torch.zeros_like(part)
                state["own"] = torch.full((4,), 10.0 * dist.get_rank() + 1)
            state["moment"].add_(parameter.grad.to_local())
            state["own"].add_(1)
            part.sub_(state["moment"], alpha=0.1)


def own(rank: int, folder: str, attempt: int, captures: bool, with_model: bool) -> None:
    begin(rank, 2, f"{folder}/{attempt}")
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = Local(model.parameters())
    state = {"optimizer": optimizer, **({"model": model} if with_model else {})}
    options: dict[str, Any] = {"capture_every": 1, "arenas": f"{folder}/arenas"} if captures else {}
    manager = CheckpointManager(f"{folder}/run", state, **options)
    assert manager.restore() == 2 * attempt
    for _ in range(2):  # the first cut has the arena made
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
        optimizer.step()
        manager.step()
        if captures:
            manager._saves._engine.wait()
    if not captures:
        manager.save()
    (found,) = optimizer.state.values()
    assert not any(isinstance(one, DTensor) for one in found.values())
    assert found["own"].tolist() == [10.0 * rank + 3 + 2 * attempt] * 4 and found["moment"].shape == (2, 8)
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("captures", "with_model"),
    [
        (False, True),
        (True, False),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in ((False, False), (True, True))),
    ],
)
def test_what_an_optimizer_keeps_of_this_ranks_part_stays_its_own(
    tmp_path: Path, captures: bool, with_model: bool
) -> None:
    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
        run_processes(2, own, str(tmp_path), attempt, captures, with_model)


class Views:
    """Holds the second half of a memory as a DTensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        mesh = init_device_mesh("cpu", (1,))
        self.view = DTensor.from_local(memory[4:], mesh, [Shard(0)], run_check=False)

    def state_dict(self) -> dict[str, Any]:
        return {"view": self.view}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.view.copy_(state["view"])


def views(rank: int, folder: str) -> None:
    begin(rank, 1, folder)
    with CheckpointManager(folder + "/run", {"views": Views(torch.arange(8.0))}) as manager:
        manager.restore()
        manager.step()
    again = Views(torch.zeros(8))
    with CheckpointManager(folder + "/run", {"views": again}) as manager:
        assert manager.restore() == 1
    assert again.memory.tolist() == [0, 0, 0, 0, 4, 5, 6, 7]


def test_a_part_that_begins_inside_of_a_larger_memory_comes_back(tmp_path: Path) -> None:
    run_processes(1, views, str(tmp_path))
