"""A state's keys and containers go through DCP's flat names and back, as far as anybody has noted what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lakeckpt import (
    LakeLoadPlanner,
    LakeSavePlanner,
    LakeStorageReader,
    LakeStorageWriter,
    PerRank,
    convert_checkpoint,
    read_state,
)
from lakeckpt.checkpoint.foreign.dcp_folder import nested
from lakeckpt.errors import ConfigError, WireDamaged
from tests.checkpoint.foreign.test_convert import alike

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


PARTS: dict[Any, Any] = {
    "a": {"b": {"c.d": {"is": 1}}, "b.c": {"is": 2}},
    "a.x": {"is": 3},
    "dot.": {"is": 4},
    "o": {"state": {0: {"is": 5}, 1.5: {"is": 6}}, "groups": [{}, {"is": 7}], "lr": 0.1},
    "twice.x": {},
    "twice": {"x": {}},
    1: {},
    "1": {},
}


@pytest.mark.parametrize(
    ("item", "number"),
    [("a.b.c.d", 1), ("a.b.c", 2), ("a.x", 3), ("dot.", 4), ("o.state.0", 5), ("o.state.1.5", 6), ("o.groups.1", 7)],
)
def test_a_part_is_named_by_its_path_though_names_have_dots_or_are_numbers(
    item: str, number: int, tmp_path: Path
) -> None:
    torch.save(PARTS, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", item=item)
    assert read_state(tmp_path / "b.pt") == {"is": number}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ("twice.x", "names 2 parts"),
        ("1", "names 2 parts"),
        ("a.y", r"there is no 'a\.y' in this checkpoint: it holds b, b\.c"),
        ("o.groups.2", "it holds 0, 1"),
        ("o.lr.x", "it holds no names"),
        ("o.groups", "is a list, not a state"),
        ("o.lr", "is a float, not a state"),
    ],
)
def test_a_part_that_is_not_there_or_there_twice_is_told(item: str, why: str, tmp_path: Path) -> None:
    torch.save(PARTS, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=why):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", item=item)


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ([{}, torch.ones(2)], [{}, torch.ones(2)]),
        ([{"k": {}}, torch.ones(2)], [{}, torch.ones(2)]),
        ([torch.ones(2), {}, 3, {}, {}, None], [torch.ones(2), {}, 3, {}, {}, None]),
        ([{}, {"x": [{}, {"y": 1}]}], [{}, {"x": [{}, {"y": 1}]}]),
    ],
)
def test_an_empty_dict_that_torch_left_out_of_a_list_has_its_place(saved: Any, read: Any, tmp_path: Path) -> None:
    dcp.save({"a": saved}, checkpoint_id=tmp_path, no_dist=True)
    assert alike(read_state(tmp_path), {"a": read})


def test_places_that_are_said_to_be_missing_make_no_memory() -> None:
    flat, paths = {"a": 1, "b": 2}, {"a": ("a", 60_000), "b": ("b", 60_000)}
    with pytest.raises(WireDamaged, match="the places in a list"):
        nested(flat, paths)
    assert len(nested(flat, paths | {"b": ("b", 9)})["a"]) == 60_001
    with pytest.raises(WireDamaged, match="the places in a list"):
        nested(flat, paths | {"b": ("b", 9)}, untold=[])


def keys_in(state: Any) -> list[str]:
    """All keys, told apart where they are equal, as True and 1 are."""
    if not isinstance(state, (dict, list)):
        return []
    inner = state.values() if isinstance(state, dict) else state
    return sorted(
        [repr(key) for key in state if isinstance(state, dict)] + [key for one in inner for key in keys_in(one)]
    )


@pytest.mark.parametrize(
    "key", [5, -1, 2**70, 1.5, float("inf"), True, None, (1, 2), ("a", (None, 2.5)), b"x", "5", "None", 1 + 2j]
)
@pytest.mark.parametrize("is_deep", [True, False])
def test_keys_that_are_no_texts_are_read_as_they_were(key: Any, is_deep: bool, tmp_path: Path) -> None:
    def state_of(value: float) -> dict[Any, Any]:
        state = {key: torch.full((2,), value), "x": {key: value, "list": [{}, {key: {}}]}}
        return {"a" if is_deep else key: {"b": state}}  # at the top torch sorts them: they must be of one kind

    dcp.save(state_of(3.0), storage_writer=LakeStorageWriter(tmp_path), planner=LakeSavePlanner(), no_dist=True)
    assert alike(found := read_state(tmp_path), state_of(3.0)), found
    assert keys_in(found) == keys_in(state_of(3.0))
    live = state_of(0.0)
    dcp.load(live, storage_reader=LakeStorageReader(tmp_path), planner=LakeLoadPlanner(), no_dist=True)
    assert alike(live, state_of(3.0))


def test_values_of_ranks_that_stand_in_a_list_are_read_in_their_places(tmp_path: Path) -> None:
    state = {"list": [PerRank(5), torch.ones(1), PerRank({"a": 1})], "alone": PerRank(7)}
    dcp.save(state, storage_writer=LakeStorageWriter(tmp_path), planner=LakeSavePlanner(), no_dist=True)
    found = read_state(tmp_path)
    assert found == {"list": [{"::rank:0": 5}, torch.ones(1), {"::rank:0": {"a": 1}}], "alone::rank:0": 7}
