"""How fast is a share read from another node, beside a bare ``os.sendfile``?  ``python -m benchmarks.transport``

One process serves, as the first rank of a node does; this process reads, over the loopback device. *Bare* sends the
file of an arena by ``os.sendfile`` into ``recv_into`` of one buffer, over one connection, and verifies nothing.
*Share* is what a restore does: challenge, documents, checksums, and all tensors into their places, each leaf verified.
Both take turns, and the ratio is that of a pair. ``--json FILE`` writes what was measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import show
from lakeckpt.checkpoint.agent.generations import identity_of
from lakeckpt.checkpoint.arena.checksums import checked
from lakeckpt.checkpoint.arena.contents import (
    Contents,
    GenerationDocuments,
    TensorPlace,
    TensorTable,
    contents_from,
    contents_of,
)
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaLayout
from lakeckpt.checkpoint.arena.slices import plan_slices
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.peers.fetch import PeerShare
from lakeckpt.checkpoint.peers.serve import ShareServer
from lakeckpt.checkpoint.peers.sources import HeldShare, ShareSource
from lakeckpt.checkpoint.peers.wire import KEY_BYTES, AskShare
from lakeckpt.recovery.facts import CutId

RUN, KEY, DIGEST = bytes(16), bytes(KEY_BYTES), bytes(16)
CUT = CutId(attempt=0, step=1)
ASKED = AskShare(identity=identity_of(RUN, rank=0, world_size=2), cut=CUT, digest=DIGEST)


def tensors(mebibytes: int) -> dict[str, int]:
    """Return the sizes of tensors of a model: a few large ones, and many small ones."""
    large = {f"m/large-{number}": 16 * 2**20 + 256 * number for number in range(max(1, mebibytes // 17))}
    return large | {f"m/small-{number}": 2048 + number for number in range(mebibytes)}


def capture(folder: str, sizes: Mapping[str, int]) -> None:
    """Write a generation with these tensors, and its checksums."""
    plan = plan_slices(sizes, slice_bytes=2**20)
    layout = ArenaLayout(
        identity=ASKED.identity,
        plan=plan.digest,
        data_bytes=plan.data_bytes,
        documents_bytes=2**20,
        generations=1,
    )
    with ArenaFolder(folder).create(layout) as arena:
        filling = arena.begin(common=1)
        assert filling is not None
        np.frombuffer(filling.data, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, plan.data_bytes, np.uint8)
        places = {
            key: TensorPlace(spec=TensorSpec(key=key, dtype="uint8", shape=(size,)), start=start)
            for key, (start, size) in plan.places.items()
        }
        documents = GenerationDocuments(trees={}, table=TensorTable(places=places))
        filling.complete(CUT, digest=DIGEST, documents=documents.to_bytes())
        with arena.hold() as held:
            assert held is not None
            checked(contents_of(held))


def serve(folder: str, mebibytes: int, pipe: Connection) -> None:
    """Be the node that has the share; serve bare connections, too, to the end of the pipe."""
    capture(folder, tensors(mebibytes))
    server = ShareServer(ArenaFolder(folder), "127.0.0.1")
    server.admit(KEY, RUN)
    bare = socket.create_server(("127.0.0.1", 0))
    (path,) = Path(folder).glob("*.arena")
    size = path.stat().st_size
    pipe.send((server.address, bare.getsockname(), size))
    with path.open("rb") as file:
        while pipe.recv() == "bare":
            connection, _ = bare.accept()
            with connection:
                done = 0
                while done < size:
                    done += os.sendfile(connection.fileno(), file.fileno(), done, size - done)
    server.close()


def read_bare(address: tuple[str, int], target: memoryview) -> float:
    """Return the bytes per second of a bare transport."""
    begun_s = time.perf_counter()
    with socket.create_connection(address) as connection:
        done = 0
        while done < len(target):
            done += connection.recv_into(target[done:])
    return len(target) / (time.perf_counter() - begun_s)


def read_share(address: str, targets: Mapping[str, memoryview]) -> float:
    """Return the bytes per second of a share that is read into its places."""

    def opened(stack: ExitStack) -> Contents:
        share = PeerShare(address, KEY, ASKED)
        stack.callback(share.close)
        return contents_from(share, share.documents(), share.checksums(), address)

    begun_s = time.perf_counter()
    source = ShareSource(rank=0, tier="other nodes", open=opened)
    share = HeldShare([source], lambda tier, size: None, missing="the share is gone")
    share.fill(targets)
    share.close()
    return sum(map(len, targets.values())) / (time.perf_counter() - begun_s)


def measured(mebibytes: int, pairs: int) -> dict[str, Any]:
    """Return the speeds of pairs, in bytes per second."""
    found: dict[str, list[float]] = {"bare": [], "share": []}
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lakeckpt-") as folder:
        os.chmod(folder, 0o700)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, mebibytes, there))
        process.start()
        address, bare, size = here.recv()
        target = memoryview(bytearray(size))
        targets = {key: memoryview(bytearray(size)) for key, size in tensors(mebibytes).items()}
        for _ in range(pairs + 1):
            here.send("bare")
            found["bare"].append(read_bare(bare, target))
            found["share"].append(read_share(address, targets))
        here.send("end")
        process.join()
    found = {name: speeds[1:] for name, speeds in found.items()}  # the first pair maps the memory of the targets
    ratios = [share / bare for bare, share in zip(found["bare"], found["share"], strict=True)]
    return {"mebibytes": mebibytes, **found, "ratios": ratios}


def main() -> None:
    """Measure pairs, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="of the share (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="how many (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    found = measured(options.mebibytes, options.pairs)
    rows = [
        (name, *(f"{pick(found[name]) / 1e9:.2f} GB/s" for pick in (min, statistics.median, max)))
        for name in ("bare", "share")
    ]
    rows.append(("ratio", *(f"{pick(found['ratios']):.2f}" for pick in (min, statistics.median, max))))
    show(f"A share of {options.mebibytes} MiB from another process", ("", "least", "median", "most"), rows)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
