"""State dicts come apart and together again: names, ties, types; and what cannot be written is refused by its path."""

from __future__ import annotations

import functools
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.state.names import canonical_names
from lakeckpt.checkpoint.state.random_states import capture_random, check_random, derive_random, restore_random
from lakeckpt.checkpoint.state.tree import flatten, rebuild, tree_from_bytes, tree_to_bytes
from lakeckpt.errors import CheckpointDamaged, UnsupportedValue


def there_and_back(state: Any, like: Any = None) -> Any:
    flat = flatten("item", state)
    return rebuild(tree_from_bytes(tree_to_bytes(flat))[0], flat.tensors, like)


def test_wrappers_leave_no_trace_in_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    bare = flatten("m", model.state_dict(), of_module=True)
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager")).state_dict()
    assert all("module._orig_mod." in name for name in wrapped)
    found = flatten("m", wrapped, of_module=True)
    assert found.tree == bare.tree and set(found.tensors) == set(bare.tensors)
    back = rebuild(found.tree, found.tensors, wrapped)
    assert list(back) == list(wrapped)
    inner = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager"), torch.nn.BatchNorm1d(2))
    assert flatten("m", inner.state_dict(), of_module=True).tree == bare.tree


def test_names_that_would_collide_keep_their_own() -> None:
    names = ["module.a", "a", "module.b", "module", "x.module"]  # as of a wrapper that has a parameter of its own
    assert canonical_names(names) == {
        "module.a": "module.a",
        "a": "a",
        "module.b": "b",
        "module": "module",
        "x.module": "x",
    }


_PARTS = st.sampled_from(["a", "b", "module", "_orig_mod", "_checkpoint_wrapped_module", ""])
_NAMES = st.sets(st.lists(_PARTS, min_size=1, max_size=5).map(".".join), min_size=1, max_size=12)


@given(names=_NAMES)
def test_canonical_names_are_one_to_one(names: set[str]) -> None:
    found = canonical_names(names)
    assert found.keys() == names and len(set(found.values())) == len(names)


@pytest.mark.parametrize(
    ("saved", "live", "expected"),
    [
        ({"module.loss": 1, "x": {"module.y": 2}}, {}, {"module.loss": 1, "x": {"module.y": 2}}),
        (Counter({"torch.module.nn": 3}), Counter(), Counter({"torch.module.nn": 3})),
        ({"module.w": 1, "module.new": 2}, {"w": 0}, {"w": 1, "module.new": 2}),
        ({"w": 1}, {"module.w": 0}, {"module.w": 1}),
        ({"w": 1}, {"module.w": 0, "w": 0}, {"w": 1}),
        ({"module.w": 1}, {"module.w": 0, "w": 0}, {"module.w": 1}),
        ({"module.w": 1, "w": 2}, {"module.w": 0}, {"module.w": 1, "w": 2}),
        ({"module.w": 1, "w": 2}, {"w": 0}, {"module.w": 1, "w": 2}),
        ({"module.w": 1, "_orig_mod.w": 2}, {"w": 0}, {"module.w": 1, "_orig_mod.w": 2}),
    ],
)
def test_a_name_that_the_live_object_does_not_have_stays_as_it_was_saved(saved: Any, live: Any, expected: Any) -> None:
    assert there_and_back(saved, live) == expected


def test_what_a_module_puts_beside_its_tensors_keeps_its_names() -> None:
    state = {"module.weight": torch.ones(1), "module._extra_state": {"module.seen": 3}}
    flat = flatten("m", state, of_module=True)
    assert set(flat.tree) == {"weight", "_extra_state"}
    assert rebuild(flat.tree, flat.tensors, {"weight": torch.zeros(1), "_extra_state": {}}) == {
        "weight": torch.ones(1),
        "_extra_state": {"module.seen": 3},
    }


def test_tied_tensors_are_one() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    flat = flatten("m", {"embed": weight, "head": weight, "view": weight[0], "other": torch.ones(2, 3)})
    assert set(flat.tensors) == {"m/embed", "m/view", "m/other"}
    assert flat.tree["head"] == flat.tree["embed"]
    empty = torch.empty(0)
    assert len(flatten("m", {"a": empty, "b": empty.clone()}).tensors) == 2


def test_keys_that_look_alike_stay_apart() -> None:
    state = {
        0: torch.zeros(1),
        "0": torch.ones(1),
        "a": {"b/c": torch.full((1,), 2.0)},
        "a/b": {"c": torch.full((1,), 3.0)},
    }
    back = there_and_back(state)
    assert [back[0], back["0"], back["a"]["b/c"], back["a/b"]["c"]] == [0.0, 1.0, 2.0, 3.0]


def test_containers_get_the_types_of_the_live_object() -> None:
    live = {
        "counter": Counter({1: 2}),
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list),
        "size": torch.Size([1]),
        "plain": {1: (2, [3])},
    }
    state = {
        "counter": Counter({5: 1}),
        "ordered": OrderedDict(b=torch.ones(1)),
        "default": defaultdict(list, x=[1]),
        "size": torch.Size([4, 5]),
        "plain": {7: (8, [torch.ones(1)])},
    }
    back = there_and_back(state, live)
    assert back == state
    assert [type(one) for one in back.values()] == [type(one) for one in state.values()]
    assert back["default"].default_factory is list
    plain = there_and_back(state)
    assert [type(one) for one in plain.values()] == [dict, dict, dict, tuple, dict]


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, {"f": lambda: 0}]}, r"item\.a\[1\]\.f"),
        ({"p": functools.partial(int)}, r"item\.p"),
        ({"s": {1, 2}}, r"item\.s"),
        ({"n": Pair(1, 2)}, r"item\.n"),
        ({"d": torch.float32}, r"item\.d"),
        ({"g": torch.Generator()}, r"item\.g"),
        ({"o": object()}, r"item\.o"),
        ({"t": [torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)]}, r"item/t/0: .*sparse"),
        ({"t": torch.empty(3, device="meta")}, r"item/t: .*meta"),
        (torch.nn.LazyLinear(3).state_dict(), r"item/weight: .*no shape yet"),
    ],
)
def test_what_is_outside_the_closed_list_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedValue, match=path):
        tree_to_bytes(flatten("item", value))


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = [state]
    with pytest.raises(UnsupportedValue, match="inside one another"):
        flatten("item", state)


def test_a_reference_to_no_tensor_is_damage() -> None:
    flat = flatten("m", {"a": torch.ones(1)})
    with pytest.raises(CheckpointDamaged, match="m/a"):
        rebuild(flat.tree, {})


def draws() -> list[Any]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()]


def test_random_states_come_back_in_the_middle_of_a_pair() -> None:
    random.gauss(0, 1), np.random.randn()  # both keep a second value for next time
    flat = flatten("r", capture_random())
    expected = draws()
    restore_random(check_random(rebuild(tree_from_bytes(tree_to_bytes(flat))[0], flat.tensors)))
    assert draws() == expected


def test_derived_states_are_a_function_of_seed_step_and_rank() -> None:
    before = capture_random()
    try:
        found = {}
        for args in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 2, 3)]:
            derive_random(*args)
            found.setdefault(args, []).append(tuple(draws()))
        assert found[1, 2, 3][0] == found[1, 2, 3][1]
        assert len({draw for runs in found.values() for draw in runs}) == 4
    finally:
        restore_random(before)


@given(st.lists(st.tuples(st.sampled_from(["uniform", "normal", "seed", "set"]), st.integers(0, 9)), max_size=30))
def test_the_state_of_numpys_generator_is_the_one_of_now_whatever_was_drawn(drawn: list[tuple[str, int]]) -> None:
    """Normal numbers come in pairs: the second one changes the state and not the memory of the generator."""
    for how, number in drawn:
        if how == "uniform":
            np.random.rand(number)
        elif how == "normal":
            np.random.randn()
        elif how == "seed":
            np.random.seed(number)
        else:
            np.random.set_state(np.random.RandomState(number).get_state())
        found, now = capture_random()["numpy"], np.random.get_state()
        assert (found[0], *found[2:]) == (now[0], *now[2:]) and np.array_equal(found[1], now[1])


@pytest.mark.parametrize(
    ("name", "bad"),
    [("python", ()), ("python", "x"), ("numpy", None), ("torch", np.zeros(3, np.uint8)), ("torch", "x"), ("cuda", [7])],
)
def test_random_states_that_cannot_be_used_are_damage(name: str, bad: object) -> None:
    states = capture_random()
    with pytest.raises(CheckpointDamaged, match="random states"):
        check_random({**states, name: bad})
    with pytest.raises(CheckpointDamaged, match="random states"):
        check_random(None)
    assert capture_random()["python"] == states["python"]
