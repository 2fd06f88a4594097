"""What do saving and restoring cost a rank, by how many there are?  ``python -m benchmarks.many_ranks [--json FILE]``

Every rank has a part of each tensor (FSDP: a parameter and two moments of each of ``--parameters``), of a few bytes, so
that what is measured is what ranks tell one another and read of one another, not the tensors. With ``--replicas`` as
many ranks have the same part (HSDP). With ``--shapes`` each tensor has a shape of its own. Ranks are threads of one
process, over a folder: processor seconds of a rank's own thread are printed, of rank 0, which commits, and of the
median of the others. Beside the restore, in the same run: from the parts of all ranks, as for other shardings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import show
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests, short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Begin, Manifest
from lakeckpt.checkpoint.format.parts import PARTS, SHARING, SaveId
from lakeckpt.checkpoint.format.sharing import Sharing, part_key, sharing_to_bytes
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.log import put_entry
from lakeckpt.checkpoint.persist.publish import Publisher, Settings
from lakeckpt.checkpoint.restore.from_storage import fetch_parts, load_from, load_own
from lakeckpt.checkpoint.state.random_states import RANDOM, capture_random
from lakeckpt.checkpoint.state.staged import Staged, StagedCut, StagedTensor, StagedTree
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.tracking.rounds import Rounds, facts_to_bytes
from lakeckpt.tracking.tally import Tally
from lakeckpt.tracking.waiting import SystemWaiter
from lakeckpt.wire.envelope import TensorRef, dumps

ROWS, COLUMNS = 4, 4
"""Of each tensor, on each rank."""
TIMEOUT_S = 600.0


class Round:
    """Facts of all ranks, added up when the last of them has come; counts the bytes of messages."""

    def __init__(self, world_size: int) -> None:
        self.sent = [0] * world_size
        self._facts: list[Mapping[str, str]] = [{}] * world_size
        self._tally = Tally(facts={})
        self._barrier = threading.Barrier(world_size)

    def everyone(self, rank: int, facts: Mapping[str, str]) -> Tally:
        self.sent[rank] += len(facts_to_bytes(facts))
        self._facts[rank] = facts
        self._barrier.wait(TIMEOUT_S)
        if rank == 0:
            self._tally = Tally.of(self._facts)
        self._barrier.wait(TIMEOUT_S)
        return self._tally


class Talker(Rounds):
    """The rounds of one rank, in memory."""

    def __init__(self, round_: Round, rank: int, world_size: int) -> None:
        super().__init__(rank=rank, world_size=world_size)
        self._all = round_

    def everyone(self, facts: Mapping[str, str]) -> Tally:
        return self._all.everyone(self.rank, facts)


def names(parameters: int) -> list[str]:
    """The keys of all tensors, by item."""
    moments = [f"{number}/{kind}" for number in range(parameters) for kind in ("exp_avg", "exp_avg_sq")]
    return [f"model/layers.{number}.weight" for number in range(parameters)] + [f"optimizer/state/{m}" for m in moments]


def staged(rank: int, world_size: int, parameters: int, replicas: int, *, shapes: bool = False) -> Staged:
    """The state of a rank."""
    keys, divided = names(parameters), world_size // replicas
    tensors = {}
    for number, name in enumerate(keys):
        columns = COLUMNS + number * shapes
        data = np.full(ROWS * columns, rank % divided * 1e-3 + number, np.float32)
        key = part_key(name, (rank % divided * ROWS, 0), (divided * ROWS, columns))
        tensors[key] = StagedTensor(
            spec=TensorSpec(key=key, dtype="float32", shape=(ROWS, columns)),
            data=data.view(np.uint8).data,
            leaves=leaf_digests(data.view(np.uint8).data, LEAF_BYTES),
        )
    shared = Sharing(ranks=((0, world_size),), dims=(0,) if replicas == 1 else (-1, 0))
    trees: dict[str, Any] = {
        item: {key: TensorRef(key=key) for key in keys if key.startswith(item)} for item in ("model", "optimizer")
    }
    documents = {item: dumps(tree, kind="tree", version=(1, 0)) for item, tree in trees.items()}
    documents[RANDOM] = dumps(capture_random(), kind="tree", version=(1, 0))
    documents[SHARING] = sharing_to_bytes(dict.fromkeys(keys, shared))
    return Staged(
        tensors=tensors,
        trees={item: StagedTree(item=item, document=one, digest=short_digest(one)) for item, one in documents.items()},
    )


def saved(
    storage: LocalStorage, world_size: int, parameters: int, replicas: int, shapes: bool
) -> tuple[Manifest, list[float], list[int]]:
    """Save on all ranks: what was committed, the seconds and the bytes said of each."""
    begin = Begin(run="run", slot=0, world_size=world_size, library="0", created_s=0.0, write_id="benchmark")
    put_entry(storage, begin)
    round_ = Round(world_size)
    save = SaveId(attempt=0, step=1, number=0)

    def rank_saves(rank: int) -> tuple[Manifest, float]:
        publisher = Publisher(
            storage,
            Attempt(run="run", number=0, last=0, parent=None, seed=0),
            rank=rank,
            world_size=world_size,
            settings=Settings(keep=Keep(last=3), timeout_s=TIMEOUT_S),
            waiter=SystemWaiter(),
        )
        cut = StagedCut(step=1, staged=staged(rank, world_size, parameters, replicas, shapes=shapes))
        before = time.thread_time()
        manifest = publisher.publish(save, cut, Talker(round_, rank, world_size))
        return manifest, time.thread_time() - before

    with ThreadPoolExecutor(world_size) as pool:
        done = list(pool.map(rank_saves, range(world_size)))
    return done[0][0], [seconds for _, seconds in done], round_.sent


class Counting(LocalStorage):
    """Counts the parts that are read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.parts = 0

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.parts += path.startswith(f"{PARTS}/")
        return super().read(path, start, stop, etag=etag)


def restored(folder: str, manifest: Manifest) -> tuple[float, int, float]:
    """Processor seconds, and parts read, of a rank that begins with what it had; seconds of one that wants all."""
    rank, storage = manifest.world_size // 2, Counting(folder)
    before = time.process_time()
    own = load_own(storage, manifest, rank=rank)
    assert own is not None
    own.check()
    own_s, parts = time.process_time() - before, storage.parts
    before = time.process_time()
    full = load_from(storage, manifest, fetch_parts(storage, manifest), rank=rank, world_size=manifest.world_size)
    full.check()
    assert full.trees == own.trees
    return own_s, parts, time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256], help="how many (default: %(default)s)")
    parser.add_argument("--parameters", type=int, default=100, help="tensors of the model (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="ranks that have the same (default: %(default)s)")
    parser.add_argument("--shapes", action="store_true", help="each tensor has a shape of its own")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    if any(ranks % options.replicas for ranks in options.ranks):
        parser.error(f"--replicas {options.replicas} does not divide --ranks {options.ranks}")
    rows: list[Sequence[str]] = []
    found = []
    for world_size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            storage = LocalStorage(folder)
            manifest, seconds, sent = saved(storage, world_size, options.parameters, options.replicas, options.shapes)
            own_s, parts, all_s = restored(folder, manifest)
        one = {
            "ranks": world_size,
            "said_bytes": max(sent),
            "save_first_s": seconds[0],
            "save_other_s": statistics.median(seconds[1:]),
            "restore_s": own_s,
            "parts_read": parts,
            "restore_from_all_s": all_s,
        }
        found.append(one)
        rows.append(
            (
                f"{world_size}",
                f"{max(sent) / 1e3:.1f} kB",
                f"{seconds[0]:.2f} s",
                f"{one['save_other_s']:.2f} s",
                f"{own_s:.2f} s, {parts} parts",
                f"{all_s:.2f} s, {world_size} parts",
            )
        )
    columns = ("ranks", "said by a rank", "save: rank 0", "save: another", "restore", "restore, divided otherwise")
    held = f", {options.replicas} of which have the same" if options.replicas > 1 else ""
    shapes = " of as many shapes" if options.shapes else ""
    show(
        f"{3 * options.parameters} tensors{shapes} divided over all ranks{held}, processor time of a rank",
        columns,
        rows,
    )
    if options.json is not None:
        what = {"parameters": options.parameters, "replicas": options.replicas, "cases": found}
        options.json.write_text(json.dumps(what, indent=1))


if __name__ == "__main__":
    main()
