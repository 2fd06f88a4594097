"""What cannot be right is refused before anything is done: wrong arguments, ties that would merge two values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader
from lakeckpt.errors import CheckpointMismatch, ConfigError, StorageError, UnsupportedValue
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, MemoryStorage, manager
from tests.lakes import LakeSpec


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.nn.Linear(1, 1)], "mapping of names to objects, .* got list"),
        (None, "mapping of names to objects, .* got NoneType"),
        ({"n": 5}, "'n' in state is of type int, which lacks state_dict"),
        ({"a/b": Counter()}, "without '/'"),
    ],
)
def test_a_state_that_is_no_mapping_of_objects_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(MemoryStorage(), state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_optimizer_that_divides_its_state_over_ranks_by_itself_is_refused_at_once() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(torch.nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ConfigError, match=r"'optimizer' is a ZeroRedundancyOptimizer: .* FSDP2"):
            manager(MemoryStorage(), {"optimizer": optimizer})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep is"),
        ({"keep": True}, "keep is"),
        ({"fail_after": -1}, "fail_after is a number of seconds from 0 on"),
        ({"timeout_s": 0}, "timeout_s is"),
        ({"timeout_s": "5"}, "timeout_s is"),
        ({"timeout_s": float("nan")}, "timeout_s is"),
        ({"persist_every": "5"}, "positive int"),
        ({"bubbles": 3}, "bubbles is a lakeckpt.bubbles.Bubbles, .*, got 3"),
        ({"arenas": 3, "capture_every": 1}, "arenas is the path of a folder, .*, got 3"),
        ({"arenas": 3}, "arenas is the path of a folder"),
        ({"peers": "copies"}, "peers is None .*, \"copy\" .* or False .*, got 'copies'"),
        ({"peers": True}, "peers is None .* or False .*, got True"),
        ({"peers": "copy"}, 'peers="copy" needs capture_every='),
        ({"peers": "3+1"}, 'peers="3\\+1" needs capture_every='),
        ({"peers_every_s": -1}, "peers_every_s is a number of seconds from 0 on, got -1"),
        ({"peers_every_s": "5"}, "peers_every_s is a number of seconds from 0 on, got '5'"),
    ],
)
def test_settings_that_cannot_be_are_refused_each_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(MemoryStorage(), {"n": Counter()}, **options)


@pytest.mark.parametrize("place", [None, 5, b"run"])
def test_a_place_that_is_none_is_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match="a run lies at a folder, a URL or in a Storage"):
        CheckpointManager(place, {"n": Counter()})


@pytest.fixture
def loader(tmp_path: Path) -> LakeLoader:
    return LakeLoader(LakeDataset(LakeSpec(files=((6,),)).write(tmp_path / "lake"), batch_size=2))


@pytest.mark.parametrize("consumed", [5, "reader", [1], {"reader": 5}])
def test_what_is_no_receipt_is_refused_at_the_cut(loader: LakeLoader, consumed: Any) -> None:
    saver = manager(MemoryStorage(), {"reader": loader})
    saver.restore()
    next(iter(loader))
    with pytest.raises(ConfigError, match="takes the last batch that the step used"):
        saver.step(consumed)
    assert saver.steps_done == 0


class Pair(torch.nn.Module):
    def __init__(self, first: float, second: float | None) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((3,), first))
        self.second = self.first if second is None else torch.nn.Parameter(torch.full((3,), second))


def test_two_values_do_not_merge_into_weights_that_are_tied_now() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"model": Pair(1.0, 2.0)})
    saver.restore()
    saver.save()
    tied = Pair(0.0, None)
    with pytest.raises(CheckpointMismatch, match="first and second are one tensor in the module, and two different"):
        manager(storage, {"model": tied}).restore()
    assert torch.equal(tied.first, torch.zeros(3))


@pytest.mark.parametrize("second", [1.0, None])
def test_one_value_loads_into_weights_tied_or_not(second: float | None) -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"model": Pair(1.0, second)})
    saver.restore()
    saver.save()
    for live in (Pair(0.0, None), Pair(0.0, 5.0)):
        manager(storage, {"model": live}).restore()
        assert torch.equal(live.first, torch.ones(3)) and torch.equal(live.second, torch.ones(3))


def stepped(kind: str, **options: Any) -> dict[str, Any]:
    """A model and an optimizer that has taken a step."""
    objects = fresh(kind, **options)
    objects["model"](torch.ones(2, 3)).sum().backward()
    objects["optimizer"].step()
    return objects


def fresh(kind: str, **options: Any) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    cls = globals().get(kind) or getattr(torch.optim, kind)
    return {"model": model, "optimizer": cls(model.parameters(), **{"lr": 0.1, **options})}


def saved(objects: dict[str, Any]) -> MemoryStorage:
    storage = MemoryStorage()
    saver = manager(storage, objects)
    saver.restore()
    saver.save()
    return storage


class Own(torch.optim.Adam):
    """A user's own, which loads as it wants to."""

    def load_state_dict(self, state_dict: Any) -> None:
        for group in state_dict["param_groups"]:
            group.setdefault("betas", (0.5, 0.5))
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("old", "new"), [("SGD", "Adam"), ("Adam", "Adamax"), ("Adam", "AdamW"), ("Adam", "Own"), ("Own", "Adam")]
)
@pytest.mark.parametrize("make", [fresh, stepped], ids=["fresh", "stepped"])
def test_the_state_of_an_optimizer_of_another_class_is_refused_by_name_with_nothing_changed(
    old: str, new: str, make: Any
) -> None:
    storage, objects = saved(stepped(old)), make(new)
    before = str({name: one.state_dict() for name, one in objects.items()})
    with pytest.raises(CheckpointMismatch, match=rf"holds the state of \S+\.{old}, and a \S+\.{new} is here"):
        manager(storage, objects).restore()
    assert str({name: one.state_dict() for name, one in objects.items()}) == before


def test_parameters_in_another_order_are_found_by_their_names() -> None:
    old = stepped("Adam")
    new = fresh("Adam")
    new["optimizer"] = torch.optim.Adam(reversed(list(new["model"].parameters())), lr=0.1)
    manager(saved(old), new).restore()
    for (name, was), now in zip(old["model"].named_parameters(), new["model"].parameters(), strict=True):
        assert torch.equal(old["optimizer"].state[was]["exp_avg"], new["optimizer"].state[now]["exp_avg"]), name


def test_parameters_of_no_module_in_another_order_are_refused() -> None:
    old, new = stepped("Adam"), fresh("Adam")
    new["optimizer"] = torch.optim.Adam(reversed(list(new["model"].parameters())), lr=0.1)
    del old["model"], new["model"]
    with pytest.raises(CheckpointMismatch, match=r"exp_avg of parameter 0 is \[2, 3\] .* the parameter is \[2\]"):
        manager(saved(old), new).restore()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (stepped("Adam", amsgrad=True), stepped("Adam")),
        (stepped("Adam"), stepped("Adam", amsgrad=True)),
        (stepped("RMSprop", centered=True), stepped("RMSprop", momentum=0.9)),
        (stepped("SGD", momentum=0.9), stepped("SGD")),
        (fresh("Adam"), stepped("Adam")),
        (stepped("Own"), fresh("Own")),
        (stepped("Adafactor"), fresh("Adafactor")),
    ],
)
def test_options_may_be_others_than_when_the_optimizer_was_saved(old: dict[str, Any], new: dict[str, Any]) -> None:
    manager(saved(old), new).restore()


def test_an_index_that_cannot_be_read_does_not_stop_a_job_that_reads_the_same_table(
    loader: LakeLoader, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path / "run", {"reader": loader}) as saver:
        saver.restore()
        next(iter(loader))
        saver.step()

    class Refusing(LocalStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            if path.startswith("index/"):
                raise StorageError(f"{path}: the store is busy")
            return super().read(path, start, stop)

        def put(self, path: str, chunks: Any) -> int:
            if path.startswith("index/"):
                raise StorageError(f"{path}: the store is full")
            return super().put(path, chunks)

    again = LakeLoader(loader.dataset)
    saver = CheckpointManager(Refusing(tmp_path / "run"), {"reader": again})
    assert saver.restore() == 1
    assert len(list(again)) == 2


class Expanded(torch.nn.Module):
    """A buffer of which several elements are one place in memory."""

    def __init__(self, buffer: torch.Tensor, *, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), weight))
        self.register_buffer("mask", buffer)


@pytest.mark.parametrize("buffer", [torch.ones(1).expand(4), torch.arange(6.0).as_strided((4, 3), (1, 1))])
def test_a_buffer_that_overlaps_itself_is_refused_at_the_first_save(buffer: torch.Tensor) -> None:
    with pytest.raises(UnsupportedValue, match=r"model/mask: several elements .* by clone\(\)"):
        saved({"model": Expanded(buffer, weight=5.0)})


class Slices:
    """Tensors that are parts of one memory."""

    def __init__(self, **parts: slice) -> None:
        memory = torch.arange(12.0)
        self.parts = {name: memory[part] for name, part in parts.items()} | {"other": torch.zeros(12)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.mark.parametrize("options", [{}, {"capture_every": 1, "persist_every": 1}])
def test_tensors_that_share_a_part_of_their_memory_are_refused_at_the_first_save(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def save(one: Slices, name: str) -> None:
        with CheckpointManager(tmp_path / name, {"one": one}, **options) as saver:
            saver.restore()
            saver.step()
            saver.save()

    apart = Slices(a=slice(0, 4), b=slice(4, 8), all=slice(0, 12), inner=slice(5, 7), again=slice(0, 12))
    apart.parts |= {f"column {at}": torch.arange(12.0).view(3, 4)[:, at] for at in range(4)}
    save(apart, "apart")
    nested = Slices(all=slice(0, 12), a=slice(1, 5), inner=slice(2, 3), b=slice(4, 8))
    with pytest.raises(UnsupportedValue, match=r"one/a and one/b share a part of their memory.* by clone\(\)"):
        save(nested, "nested")


class Views:
    """Two views of one memory, of which one has torch's negative bit."""

    def __init__(self) -> None:
        self.whole = torch.tensor([1 + 2j, 3 + 4j])

    def state_dict(self) -> dict[str, Any]:
        return {"plain": self.whole.imag, "negative": self.whole.conj().imag}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = {key: value.tolist() for key, value in state.items()}


def test_a_view_with_the_negative_bit_is_another_value_than_the_memory_it_shows() -> None:
    storage, found = saved({"views": Views()}), Views()
    manager(storage, {"views": found}).restore()
    assert found.loaded == {"plain": [2.0, 4.0], "negative": [-2.0, -4.0]}


class Derived(Counter):
    """Its state holds what was computed, with a graph, more than once."""

    def __init__(self) -> None:
        weight = torch.ones(2, requires_grad=True)
        mean = weight * 2
        super().__init__({"mean": mean, "list": [mean, (weight, {"deep": mean + 1})], "text": "x"})


class Stubborn(Counter):
    """Takes nothing but what it had."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["value"] == 1:
            raise ValueError("never")


def test_an_object_whose_state_has_a_graph_is_restored_and_goes_back_where_another_one_refuses() -> None:
    storage = saved({"derived": Derived(), "stubborn": Counter(1)})
    live = Derived()
    live.value["mean"] = live.value["mean"] * 5
    with pytest.raises(CheckpointMismatch, match="'stubborn' refused"):
        manager(storage, {"derived": live, "stubborn": Stubborn(2)}).restore()
    assert live.value["mean"].tolist() == [10.0, 10.0]
    manager(storage, {"derived": live, "stubborn": Counter(2)}).restore()
    assert live.value["mean"].tolist() == [2.0, 2.0] and live.value["list"][1][1]["deep"].tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor_is_refused_by_its_path() -> None:
    masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    with pytest.raises(UnsupportedValue, match=r"n/value/at: a MaskedTensor .* cannot be stored"):
        saved({"n": Counter({"at": masked})})
