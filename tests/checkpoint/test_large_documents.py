"""The documents of large jobs stay far below what a document may hold, and are read as they were written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lakeckpt.checkpoint import parts
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.checkpoint.manifest import PartRef, entry_from_bytes, entry_to_bytes
from lakeckpt.checkpoint.parts import FileRecord, PartRecord, SaveId, TensorRecord
from lakeckpt.checkpoint.tree import flatten, tree_from_bytes, tree_to_bytes
from lakeckpt.wire import codec
from lakeckpt.wire.values import DEFAULT_LIMITS, NODE_BYTES
from tests.checkpoint.rig import MemoryStorage, manager, training

MANY = 20_000
DIGEST = bytes(range(16))


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of the lists, dicts and extensions that each document may have beside its first few, which share it has."""
    found: list[float] = []
    encode = codec.encode_payload

    def noted(value: object, *, limits: codec.Limits, root: str = "") -> codec.Payload:
        payload = encode(value, limits=limits, root=root)
        assert limits.nodes == DEFAULT_LIMITS.nodes
        found.append(payload.nodes / (len(payload) / NODE_BYTES))
        return payload

    monkeypatch.setattr(codec, "encode_payload", noted)
    return found


def test_the_part_of_tens_of_thousands_of_tensors_with_short_names(shares: list[float]) -> None:
    file = FileRecord(path="objects/x", size_bytes=2**40, head_digest=DIGEST, digest=DIGEST)
    records = [
        TensorRecord.of(
            TensorSpec(key=f"m/{at}", dtype="int8", shape=(8,)), DIGEST, [(0, DIGEST)], ((0, 1),), slab_bytes=2**24
        )
        for at in range(MANY)
    ]
    save = SaveId(attempt=0, step=0, number=0)
    part = PartRecord(
        run="r", save=save, rank=0, world_size=1, cut=b"", files=(file,), tensors=tuple(records), trees=()
    )
    assert parts.PartRecord.from_bytes(part.to_bytes()) == part
    assert max(shares) < 0.5


def test_the_tree_of_an_optimizer_of_tens_of_thousands_of_parameters(shares: list[float]) -> None:
    state = {at: {"step": torch.ones(()), "m": torch.ones(1), "v": torch.ones(1)} for at in range(MANY)}
    flat = flatten("o", {"state": state, "param_groups": [{"lr": 0.1, "params": [*range(MANY)]}]})
    assert tree_from_bytes(tree_to_bytes(flat)) == flat.tree
    assert max(shares) < 0.3


def test_the_manifest_of_a_world_of_tens_of_thousands_of_ranks(shares: list[float]) -> None:
    storage = MemoryStorage()
    saver = manager(storage, training())
    saver.restore()
    saver.save()
    tip = read_history(storage).tip
    refs = tuple(PartRef(rank=rank, path=f"parts/0/{rank}", size_bytes=1, digest=DIGEST) for rank in range(MANY))
    large = replace(tip, world_size=MANY, parts=refs)
    shares.clear()
    assert entry_from_bytes(entry_to_bytes(large)) == large
    assert max(shares) < 0.3
