"""Pipelines reshard by names: what 4 stages saved, 2 stages and the merged model take, moments included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lakeckpt.errors import CheckpointMismatch
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks

LAYERS = 8


def stage_of(rank: int, world_size: int) -> dict[str, Any]:
    """The layers of one stage under the names that they have in the whole model, and their optimizer."""
    torch.manual_seed(100 + rank)
    count = LAYERS // world_size
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict(
        {str(at): torch.nn.Linear(2, 2) for at in range(rank * count, (rank + 1) * count)}
    )
    if rank == 0:
        model.embedding = torch.nn.Embedding(3, 2)
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1)
    return {"model": model, "optimizer": optimizer}


def stepped(rank: int, world_size: int) -> dict[str, Any]:
    objects = stage_of(rank, world_size)
    for name, one in objects["model"].named_parameters():
        one.grad = torch.full_like(one, float(1 + sum(map(ord, name))))
    objects["optimizer"].step()
    return objects


def values(objects: dict[str, Any]) -> dict[str, list[Any]]:
    """name → the parameter and its moments."""
    state = objects["optimizer"].state
    return {
        name: [one.tolist(), *(value.tolist() for value in state[one].values())]
        for name, one in objects["model"].named_parameters()
    }


def saved(world_size: int) -> tuple[MemoryStorage, dict[str, list[Any]]]:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def save(rank: int, exchange: HubExchange) -> dict[str, list[Any]]:
        objects = stepped(rank, world_size)
        saver = manager(storage, objects, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()
        return values(objects)

    found = good(run_ranks(world_size, save, waiters=[waiter]))
    return storage, {name: one for some in found for name, one in some.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_stages_are_restored_by_names_on_another_number_of_ranks(world_size: int) -> None:
    storage, every = saved(4)
    assert len(every) == 2 * LAYERS + 1

    def restore(rank: int, exchange: HubExchange) -> dict[str, list[Any]]:
        objects = stage_of(rank, world_size)
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(MemoryStorage()))
        assert saver.restore() == 0 and saver.restore_report.damaged == ()
        return values(objects)

    found = good(run_ranks(world_size, restore))
    assert {name: one for some in found for name, one in some.items()} == every


def test_a_layer_that_no_stage_saved_is_named() -> None:
    storage, _ = saved(4)
    objects = stage_of(0, 1)
    objects["model"].head = torch.nn.Linear(2, 1)
    objects["optimizer"].add_param_group({"params": [*objects["model"].head.parameters()]})
    with pytest.raises(CheckpointMismatch, match=r"model: head.weight is missing(.|\n)*3 parameter groups|3 here"):
        manager(storage, objects).restore()
    assert not objects["optimizer"].state


def test_a_module_that_was_the_same_on_all_ranks_is_not_restored_in_part() -> None:
    storage, _ = saved(1)
    with pytest.raises(CheckpointMismatch, match=r"layers.4.weight is in the checkpoint and not in the module"):
        manager(storage, stage_of(0, 2)).restore()
