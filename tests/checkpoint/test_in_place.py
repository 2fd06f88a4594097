"""Tensors are read into the live parameters themselves; a refusal leaves them; late damage is followed by an older
checkpoint on all ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lakeckpt.checkpoint.restore.load_into as in_place
import lakeckpt.checkpoint.state.loaded as loaded_module
from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.state.tensors import empty_for
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, DamageWarning, ObjectMissing, StorageError
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import (
    Counter,
    EventWaiter,
    HubExchange,
    MemoryStorage,
    good,
    manager,
    run_ranks,
    train_step,
    training,
)


def saved(storage: Any, objects: dict[str, Any], steps: int = 1) -> list[str]:
    """Train and save; what the state was at each save."""
    saver = manager(storage, objects)
    saver.restore()
    found = []
    for _ in range(steps):
        train_step(objects)
        saver.step()
        saver.save()
        found.append(said(objects))
    return found


def said(objects: dict[str, Any]) -> str:
    return str({name: one.state_dict() for name, one in objects.items()})


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every tensor that restoring makes."""
    found: list[int] = []

    def counting(spec: Any) -> Any:
        found.append(spec.size_bytes)
        return empty_for(spec)

    for module in (in_place, loaded_module):
        monkeypatch.setattr(module, "empty_for", counting)
    return found


def test_a_state_is_read_into_the_live_tensors_and_nothing_is_made_beside_them(
    allocated: list[int], tmp_path: Path
) -> None:
    storage = LocalStorage(tmp_path)
    (before,) = saved(storage, training())
    objects = training(seed=7)
    train_step(objects)  # so that the optimizer has states to read into
    places = [parameter.data_ptr() for parameter in objects["model"].parameters()]
    moments = [state["exp_avg"].data_ptr() for state in objects["optimizer"].state.values()]
    manager(storage, objects).restore()
    assert said(objects) == before
    assert [parameter.data_ptr() for parameter in objects["model"].parameters()] == places
    assert [state["exp_avg"].data_ptr() for state in objects["optimizer"].state.values()] == moments
    assert sum(allocated) == 0


def test_what_an_optimizer_does_not_have_yet_is_made_once_and_becomes_its_own(allocated: list[int]) -> None:
    storage = MemoryStorage()
    (before,) = saved(storage, training())
    objects = training(seed=7)
    manager(storage, objects).restore()
    assert said(objects) == before
    others = [
        one for key, state in objects["optimizer"].state.items() for one in state.values() if one.shape != key.shape
    ]
    assert sum(allocated) == sum(one.nbytes for one in others)  # the rest is made as its parameter lies


class Odd(torch.nn.Module):
    """Parameters and buffers whose memory is not plainly their own."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        base = torch.full((4, 6), fill)
        self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).T * fill)
        self.last = torch.nn.Parameter(
            (torch.arange(48.0).reshape(2, 2, 3, 4) * fill).to(memory_format=torch.channels_last)
        )
        self.register_buffer("rows", base[:2])
        self.register_buffer("middle", base[1:2])  # inside of ``rows``
        self.register_buffer("every_second", base[:, ::2])
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("count", torch.tensor(fill))
        self.register_buffer("conjugate", torch.full((2,), complex(fill, 1)).conj())
        self.tied = self.turned

    def get_extra_state(self) -> dict[str, Any]:
        return {"noted": torch.full((3,), float(self.count)), "text": "x" * int(self.count)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.noted = state


class Sundry(torch.nn.Linear):
    """A module with buffers of many dtypes and shapes: some have no elements, or no dimension, or one element that lies
    strided, which torch calls contiguous."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"empty_{name}", torch.empty(0, 2, dtype=dtype))
            self.register_buffer(f"scalar_{name}", torch.full((), value).to(dtype))
            self.register_buffer(f"some_{name}", torch.full((3,), value).to(dtype))
            table = torch.full((4, 3), value).to(dtype)
            self.register_buffer(f"one_{name}", table[:1, 0])
            self.register_buffer(f"turned_{name}", table.t()[:1, :1])


@pytest.mark.parametrize("is_local", [True, False])
def test_tensors_of_no_elements_or_dimensions_or_of_one_strided_element_are_restored_among_others(
    is_local: bool, tmp_path: Path
) -> None:
    storage: Any = LocalStorage(tmp_path) if is_local else MemoryStorage()
    objects = {"model": Sundry(1.0)}
    saver = manager(storage, objects)
    saver.restore()
    saver.save()
    found = {"model": Sundry(0.0)}
    assert said(found) != said(objects)
    manager(storage, found).restore()
    assert said(found) == said(objects)


def test_tensors_that_share_memory_or_lie_strided_are_restored_too() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"model": Odd(3.0)})
    saver.restore()
    saver.save()
    live = Odd(5.0)
    live.middle.fill_(5.0)
    manager(storage, {"model": live}).restore()
    assert str(live.state_dict()) == str(Odd(3.0).state_dict())
    assert live.noted["text"] == "xxx" and live.noted["noted"].tolist() == [3.0, 3.0, 3.0]
    assert live.tied is live.turned and live.turned.T.is_contiguous()


def test_moments_keep_a_dtype_that_is_not_their_parameters() -> None:
    def built() -> dict[str, Any]:
        model = torch.nn.Linear(3, 2).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1 / 3)
        return {"model": model, "optimizer": optimizer}

    storage, objects = MemoryStorage(), built()
    saver = manager(storage, objects)
    saver.restore()
    saver.save()
    for fresh in (built(), built() | {}):
        if fresh is not objects:
            fresh["optimizer"].state.clear()
        manager(storage, fresh).restore()
        for state in fresh["optimizer"].state.values():
            assert state["momentum_buffer"].dtype == torch.float32
            assert (state["momentum_buffer"] == 1 / 3).all() or torch.allclose(
                state["momentum_buffer"], torch.tensor(1 / 3)
            )


class Nested(torch.optim.SGD):
    """An optimizer whose states lie in lists and dicts, as Shampoo's and SOAP's do."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        assert all(isinstance(one.get("name", ""), str) for one in self.state.values())


def nested(fill: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = Nested(model.parameters(), lr=0.1)
    for parameter in model.parameters() if fill else ():
        optimizer.state[parameter] = {
            "GG": [torch.full((3,), fill), (torch.full((2,), fill, dtype=torch.float64), [])],
            "inner": {"step": torch.tensor(7), "mean": torch.full(parameter.shape, fill), "bits": torch.tensor([3])},
            "name": "left",
            "codes": b"ab",
            "count": 5,
        }
    return {"model": model, "optimizer": optimizer}


def kinds(state: Any) -> Any:
    """What lies where in a state: values, and the dtypes of tensors."""
    if isinstance(state, dict):
        return {key: kinds(one) for key, one in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(kinds(one) for one in state)
    return (state.dtype, state.tolist()) if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("live", [0.0, 2 / 3])
def test_states_in_lists_and_dicts_keep_their_dtypes_and_texts_stay_texts(live: float) -> None:
    storage, objects = MemoryStorage(), nested(1 / 3)
    saver = manager(storage, objects)
    saver.restore()
    saver.save()
    fresh = nested(live)
    manager(storage, fresh).restore()
    assert kinds(fresh["optimizer"].state_dict()) == kinds(objects["optimizer"].state_dict())


def test_the_count_of_steps_is_where_torch_puts_it() -> None:
    """A fused optimizer counts in float32."""

    def built(step: torch.Tensor | None) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        for parameter in model.parameters() if step is not None else ():
            moments = {"exp_avg": torch.ones_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
            optimizer.state[parameter] = {"step": step, **moments}
        return {"model": model, "optimizer": optimizer}

    storage = MemoryStorage()
    saver = manager(storage, built(torch.tensor(3)))
    saver.restore()
    saver.save()
    fresh = built(None)
    manager(storage, fresh).restore()
    assert [state["step"].dtype for state in fresh["optimizer"].state.values()] == [torch.float32] * 2


def damaged(storage: MemoryStorage, step: int) -> None:
    """Flip a bit in the last tensor of the checkpoint of ``step``."""
    path = max(name for name in storage.objects if name.startswith("objects/") and f"/{step:012d}-" in name)
    data = storage.objects[path]
    storage.objects[path] = data[:-1] + bytes([data[-1] ^ 1])


def test_damage_found_while_reading_in_place_leaves_nothing_of_itself_behind() -> None:
    storage = MemoryStorage()
    first, _ = saved(storage, training() | {"n": Counter(1)}, steps=2)
    damaged(storage, 2)
    objects = training(seed=3) | {"n": Counter(5)}
    saver = manager(storage, objects)
    with pytest.warns(DamageWarning, match="not what was written"):
        assert saver.restore() == 1
    assert said(objects) == first
    assert [one.path for one in saver.restore_report.damaged] == ["log/0000000002.lkc"]


def test_damage_that_one_rank_finds_late_sends_all_ranks_to_the_checkpoint_before() -> None:
    storage = MemoryStorage()

    def write(rank: int, exchange: HubExchange) -> list[str]:
        objects = {"model": torch.nn.BatchNorm1d(3)}
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        saver.restore()
        found = []
        for step in (1.0, 2.0):
            objects["model"].running_mean.fill_(step * 10 + rank)  # each rank has its own
            saver.step()
            saver.save()
            found.append(said(objects))
        return found

    before = good(run_ranks(2, write))
    own = max(
        name
        for name in storage.objects
        if name.startswith("objects/") and "000000000002-" in name and "/00001-" in name
    )
    data = storage.objects[own]
    storage.objects[own] = data[:-1] + bytes([data[-1] ^ 1])

    def read(rank: int, exchange: HubExchange) -> tuple[int, str]:
        objects = {"model": torch.nn.BatchNorm1d(3)}
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        return saver.restore(), said(objects)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        found = good(run_ranks(2, read))
    assert found == [(1, before[0][0]), (1, before[1][0])]


def test_where_no_checkpoint_is_whole_it_says_that_the_objects_hold_a_mixture() -> None:
    storage = MemoryStorage()
    saved(storage, training(), steps=2)
    damaged(storage, 1)
    damaged(storage, 2)
    saver = manager(storage, training(seed=3))
    with pytest.warns(DamageWarning), pytest.raises(CheckpointDamaged) as caught:
        saver.restore()
    assert any("mixture of states" in note for note in caught.value.__notes__)


class Refusing(Counter):
    def load_state_dict(self, state: Any) -> None:
        raise ValueError("never")


def test_an_object_that_refuses_leaves_modules_and_optimizers_untouched() -> None:
    storage = MemoryStorage()
    saved(storage, training() | {"n": Counter(1)})
    objects = training(seed=3) | {"n": Refusing(5), "a": Counter(7)}
    del objects["a"]
    before = said(objects)
    with pytest.raises(CheckpointMismatch, match="'n' refused"):
        manager(storage, objects).restore()
    assert said(objects) == before


def test_a_store_that_fails_while_reading_in_place_is_told_with_what_it_left() -> None:
    class Failing(MemoryStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            if path.startswith("objects/") and start > 8 and stop is not None and stop - start > 4:
                raise StorageError(f"{path}: the store is busy")
            return super().read(path, start, stop)

    storage = MemoryStorage()
    saved(storage, training())
    failing = Failing()
    failing.objects = storage.objects
    with pytest.raises(StorageError, match="busy") as caught:
        manager(failing, training(seed=3)).restore()
    assert any("mixture of states" in note for note in caught.value.__notes__)


def test_a_local_folder_reads_into_memory_that_it_is_given(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/b", [bytes(range(50))])
    buffer = bytearray(10)
    assert storage.read_into("a/b", 5, memoryview(buffer)) == 10 and bytes(buffer) == bytes(range(5, 15))
    assert storage.read_into("a/b", 45, memoryview(buffer)) == 5 and bytes(buffer[:5]) == bytes(range(45, 50))
    assert storage.read_into("a/b", 60, memoryview(buffer)) == 0
    with pytest.raises(ObjectMissing):
        storage.read_into("a/c", 0, memoryview(buffer))
    with pytest.raises(StorageError):
        storage.read_into("../x", 0, memoryview(buffer))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    with pytest.raises(StorageError, match="symbolic link"):
        storage.read_into("link", 0, memoryview(buffer))


def test_a_run_restores_through_the_front_door(tmp_path: Path) -> None:
    objects = training()
    with CheckpointManager(tmp_path, objects) as saver:
        saver.restore()
        train_step(objects)
        saver.step()
    live = training(seed=8)
    assert CheckpointManager(tmp_path, live).restore() == 1 and said(live) == said(objects)
