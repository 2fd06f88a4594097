"""What do tests of captures share: reading what a generation holds, as state dicts, and comparing them bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.contents import Contents, contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.state.snapshot import snapshot
from lakeckpt.checkpoint.state.tensors import host_bytes, on_host
from lakeckpt.checkpoint.state.tree import tree_from_bytes

IDENTITY = ArenaIdentity(run=b"r" * 16, rank=0, world=1)
CUT = b"c" * 16
State = tuple[dict[str, Any], dict[str, bytes]]
"""item → its tree; key → the bytes of a tensor."""


def state_of(objects: Mapping[str, Any]) -> State:
    """The state of ``objects`` now, copied by the synchronous path."""
    taken = snapshot(objects)
    return (
        {item: tree_from_bytes(document)[0] for item, document in taken.documents.items()},
        {key: bytes(host_bytes(on_host(one))) for key, one in taken.tensors.items()},
    )


def steps_in(folder: ArenaFolder) -> list[int]:
    """The steps of the complete generations, the newest first."""
    return [step for info in folder.found() for step in info.steps]


def kept_state(folder: ArenaFolder, step: int) -> State:
    """What the generation of ``step`` holds, in whichever arena it lies."""
    (name,) = [info.name for info in folder.found() if step in info.steps]
    with folder.open(name) as arena:
        return held_state(arena, step)


def held_state(arena: Arena, step: int | None = None) -> State:
    """What a generation of an arena holds."""
    with arena.hold(step=step) as held:
        assert held is not None, f"there is no generation of step {step}"
        contents = contents_of(held)
        return (
            {item: tree_from_bytes(document)[0] for item, document in contents.documents.trees.items()},
            {key: bytes(tensor_bytes(contents, key)) for key in contents.specs},
        )


def tensor_bytes(contents: Contents, key: str) -> bytearray:
    """The bytes of a tensor, verified."""
    made = bytearray(contents.specs[key].size_bytes)
    contents.fill({key: memoryview(made)})
    return made


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, arrays included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def assert_same(found: State, expected: State) -> None:
    """That a generation holds the state, every bit of it."""
    assert same(dict(sorted(found[0].items())), dict(sorted(expected[0].items()))), "the trees differ"
    assert set(found[1]) == set(expected[1])
    assert [key for key in found[1] if found[1][key] != expected[1][key]] == []


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in the order of its elements."""
    return bytes(host_bytes(on_host(tensor)))


__all__ = ["CUT", "IDENTITY", "assert_same", "bytes_of", "held_state", "kept_state", "same", "state_of", "steps_in"]
