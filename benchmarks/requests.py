"""This benchmark counts the requests of each rank for a save and a restore: ``python -m benchmarks.requests``.

Ranks are threads of one process over one store in memory, which counts the requests of each rank by kind. Every rank
has a part of each tensor. Two saves are made, and the second is counted, because retention then removes the first. A
save is counted twice: as of trainers, whose messages do not pass through the store, and as of agents, which agree
through records in the store. A rank that waits looks again when something that it may wait for was put, so the figures
do not depend on time: in a real job each further look, once a second at most, is two reads (the commit, and a note of
failure).

The restore is that of the same number of ranks: rank 0 chooses the checkpoint, and each rank reads what it had.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import TIMEOUT_S, Round, Talker, staged
from benchmarks.measure import show
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Begin, Manifest
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.log import put_entry, read_entry
from lakeckpt.checkpoint.persist.publish import Publisher, Settings
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.checkpoint.restore.choosing import Chooser
from lakeckpt.checkpoint.restore.from_storage import load_own
from lakeckpt.checkpoint.state.staged import StagedCut
from lakeckpt.errors import ObjectExists, ObjectMissing
from lakeckpt.lake.storage.base import Buffer, ObjectInfo
from lakeckpt.tracking.rounds import Rounds
from lakeckpt.tracking.waiting import SystemWaiter

KINDS = ("list", "read", "put", "delete")
_BATCH = 1000
"""Objects that one request lists or deletes, as S3 has it."""


class Store:
    """Objects in memory. `changed` is notified of each answer that ranks may wait for."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def put(self, path: str, data: bytes, *, only_new: bool = False) -> None:
        with self.changed:
            if only_new and path in self.objects:
                raise ObjectExists(path)
            self.objects[path] = data
            if path.startswith("log/") or "/answer-" in path:
                self.changed.notify_all()


class Counted:
    """What one rank sees of the store: a `lakeckpt.lake.storage.base.Storage` that counts its requests by kind."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.count: Counter[str] = Counter()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        with self._store.changed:
            found = [
                ObjectInfo(path=path, size_bytes=len(data))
                for path, data in sorted(self._store.objects.items())
                if path == prefix or path.startswith(f"{prefix}/") or not prefix
            ]
        self.count["list"] += max(1, -(-len(found) // _BATCH))
        return found

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.count["read"] += 1
        try:
            return self._store.objects[path][start:stop]
        except KeyError:
            raise ObjectMissing(path) from None

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        self.count["put"] += 1
        data = b"".join(chunks)
        self._store.put(path, data)
        return len(data)

    def put_new(self, path: str, data: bytes) -> None:
        self.count["put"] += 1
        self._store.put(path, data, only_new=True)

    def delete(self, path: str) -> None:
        self.delete_all([path])

    def delete_all(self, paths: Sequence[str]) -> None:
        self.count["delete"] += -(-len(paths) // _BATCH)
        with self._store.changed:
            for path in paths:
                self._store.objects.pop(path, None)


class PatientWaiter:
    """A waiter that looks again when something was put that it may wait for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def now(self) -> float:
        return 0.0

    def wait(self, seconds: float) -> None:
        with self._store.changed:
            self._store.changed.wait(1.0)


def measured(world_size: int, parameters: int, *, agents: bool) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Return the requests of each rank for the second save, and for a restore."""
    store = Store()
    begin = Begin(run="run", slot=0, world_size=world_size, library="0", created_s=0.0, write_id="benchmark")
    put_entry(Counted(store), begin)
    seen = [Counted(store) for _ in range(world_size)]
    publishers = [_publisher(store, storage, rank, world_size) for rank, storage in enumerate(seen)]
    with ThreadPoolExecutor(world_size) as pool:
        for step in (1, 2):
            for storage in seen:
                storage.count.clear()
            round_ = Round(world_size)
            save = SaveId(attempt=0, step=step, number=step)

            def rank_saves(rank: int, step: int = step, round_: Round = round_, save: SaveId = save) -> Manifest:
                cut = StagedCut(step=step, staged=staged(rank, world_size, parameters, 1))
                talk: Rounds = Talker(round_, rank, world_size)
                if agents:
                    talk = RecordTalk(
                        seen[rank],
                        save,
                        rank=rank,
                        world_size=world_size,
                        timeout_s=TIMEOUT_S,
                        waiter=_waiter(store, rank),
                    )
                return publishers[rank].publish(save, cut, talk)

            done = list(pool.map(rank_saves, range(world_size)))
        saves = [Counter(storage.count) for storage in seen]
        restores = list(pool.map(_restored(store, world_size, done[0].slot), range(world_size)))
    return saves, restores


def _publisher(store: Store, storage: Counted, rank: int, world_size: int) -> Publisher:
    return Publisher(
        storage,
        Attempt(run="run", number=0, last=0, parent=None, seed=0),
        rank=rank,
        world_size=world_size,
        settings=Settings(keep=Keep(last=1), timeout_s=TIMEOUT_S),
        waiter=_waiter(store, rank),
        refuse=lambda save: None,
        tell=lambda save, error: None,
    )


def _waiter(store: Store, rank: int) -> Any:
    return PatientWaiter(store) if rank else SystemWaiter()


def _restored(store: Store, world_size: int, slot: int) -> Callable[[int], Counter[str]]:
    def rank_restores(rank: int) -> Counter[str]:
        storage = Counted(store)
        if rank == 0:
            chosen = int(Chooser(storage, world_size=world_size, speaker=True).choose()["slot"])
            assert chosen == slot
        manifest = read_entry(storage, slot)
        assert isinstance(manifest, Manifest)
        own = load_own(storage, manifest, rank=rank)
        assert own is not None
        own.check()
        return storage.count

    return rank_restores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1000], help="how many (default: %(default)s)")
    parser.add_argument("--parameters", type=int, default=4, help="tensors of the model (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write what was counted to this file")
    options = parser.parse_args()
    rows, found = [], []
    for world_size in options.ranks:
        by_trainers, restores = measured(world_size, options.parameters, agents=False)
        by_agents, _ = measured(world_size, options.parameters, agents=True)
        for what, counts in (("save", by_trainers), ("save by agents", by_agents), ("restore", restores)):
            most = Counter({kind: max(count[kind] for count in counts[1:]) for kind in KINDS})
            for who, count in (("rank 0", counts[0]), ("another, at most", most)):
                rows.append((str(world_size), what, who, *(f"{count[kind]:,}" for kind in KINDS)))
                found.append({"ranks": world_size, "what": what, "who": who, **{kind: count[kind] for kind in KINDS}})
    show("Requests of a rank", ("ranks", "what", "who", *(f"{kind}s" for kind in KINDS)), rows)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
