"""Nodes whose memory holds a share, and their servers: what the tests of peers stand on."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from lakeckpt.checkpoint.agent.generations import identity_of
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.contents import Contents, GenerationDocuments, TensorPlace, TensorTable, contents_from
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaLayout
from lakeckpt.checkpoint.arena.slices import plan_slices
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.checkpoint.peers.fetch import PeerShare
from lakeckpt.checkpoint.peers.serve import ShareServer
from lakeckpt.checkpoint.peers.sources import ShareSource
from lakeckpt.checkpoint.peers.wire import AskShare
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.agent.rig import take_checksums

RUN, KEY, DIGEST = bytes(range(16)), bytes(32), b"d" * 16
CUT = CutId(attempt=3, step=7)
SIZES = {"m/small": 100, "m/large": 2 * LEAF_BYTES + 77}
SPECS = {key: TensorSpec(key=key, dtype="uint8", shape=(size,)) for key, size in SIZES.items()}
BYTES = {key: np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes() for key, size in SIZES.items()}


def captured(folder: Path, *, rank: int = 0, world: int = 2, hashed: bool = True) -> Arena:
    """Capture `CUT` in ``folder``. Return the arena, which is open to be filled."""
    plan = plan_slices(SIZES, slice_bytes=LEAF_BYTES)
    layout = ArenaLayout(
        identity=identity_of(RUN, rank=rank, world_size=world),
        plan=plan.digest,
        data_bytes=plan.data_bytes,
        documents_bytes=8192,
        generations=3,
    )
    arena = ArenaFolder(folder).create(layout)
    filling = arena.begin(common=CUT.step)
    assert filling is not None
    for key, (start, size) in plan.places.items():
        filling.data[start : start + size] = BYTES[key]
    places = {key: TensorPlace(spec=SPECS[key], start=start) for key, (start, _) in plan.places.items()}
    trees = {RANDOM: b"random of rank %d" % rank, "m": b"tree"}
    documents = GenerationDocuments(trees=trees, table=TensorTable(places=places))
    filling.complete(CUT, digest=DIGEST, documents=documents.to_bytes())
    if hashed:
        take_checksums(folder)
    return arena


def asked(rank: int = 0, world: int = 2, *, run: bytes = RUN) -> AskShare:
    return AskShare(identity=identity_of(run, rank=rank, world_size=world), cut=CUT, digest=DIGEST)


def serving(folder: Path, stack: ExitStack) -> ShareServer:
    server = ShareServer(ArenaFolder(folder), "127.0.0.1")
    stack.callback(server.close)
    server.admit(KEY, RUN)
    return server


def source(address: str, *, rank: int = 0, key: bytes = KEY, name: str = "") -> ShareSource:
    """A source at an address, whose tier is ``name``."""
    return ShareSource(rank=rank, tier=name or address, open=partial(_opened, address, key, asked(rank)))


def _opened(address: str, key: bytes, which: AskShare, stack: ExitStack) -> Contents:
    share = PeerShare(address, key, which)
    stack.callback(share.close)
    return contents_from(share, share.documents(), share.checksums(), address)


def read_all(share: object) -> dict[str, bytes]:
    """Return all tensors of a `TensorSource`."""
    made = {key: bytearray(size) for key, size in SIZES.items()}
    share.fill({key: memoryview(data) for key, data in made.items()})  # type: ignore[attr-defined]
    return {key: bytes(data) for key, data in made.items()}
