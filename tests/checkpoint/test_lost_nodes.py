"""A node that is lost with its memory costs no step, if other nodes hold what its ranks had captured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.peers import copies
from lakeckpt.checkpoint.peers.copies import CopySender
from lakeckpt.checkpoint.peers.grouping import Keeping
from lakeckpt.checkpoint.peers.next_node import NodeNote
from lakeckpt.checkpoint.peers.serve import ShareServer
from lakeckpt.errors import DamageWarning
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.rig import MemoryStorage
from tests.checkpoint.test_other_nodes import ROWS, Came, job
from tests.checkpoint.test_remembered import flip, rows_recorded

STEPS = 9


class Watched(MemoryStorage):
    """A storage that notes which objects of data are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.reads += [path] if path.startswith("objects/") else []
        return super().read(path, start, stop)


def lost(storage: MemoryStorage, tmp_path: Path, after: Sequence[str], **options: Any) -> tuple[list[Came], list[Came]]:
    """Train on the nodes a and b; b is lost; go on with a rank on each of the nodes ``after``. Return both."""
    before = job(storage, [tmp_path / "a", tmp_path / "b"], steps=STEPS, seed=0, saves_at=2, in_step=True, **options)
    return before, job(storage, [tmp_path / name for name in after], steps=2, seed=9, saves_at=2, in_step=True)


@pytest.mark.parametrize(
    "after", [("a", "c"), ("c", "a"), ("a",), ("a", "c", "d"), pytest.param(("c", "d", "a"), marks=pytest.mark.soak)]
)
def test_a_lost_node_costs_no_step_and_reads_no_data_from_storage(tmp_path: Path, after: tuple[str, ...]) -> None:
    storage = Watched()
    before, found = lost(storage, tmp_path, after)
    assert [one.step for one in found] == [STEPS] * len(after)
    assert {one.restored for one in found} == {one.reached for one in before}
    assert storage.reads == []
    own = "own" if after == ("a", "c") else "own node"
    for name, one in zip(after, found, strict=True):
        assert one.report is not None and one.report.captured == STEPS and one.report.checked
        assert set(one.report.read) == {own if name == "a" else "other nodes"}
    assert [one.report is not None and one.report.derived_random for one in found] == [
        rank > 0 for rank in range(len(after))
    ]
    assert rows_recorded(storage) == [2 * 2 * ROWS, (STEPS - 2) * 2 * ROWS + 2 * len(after) * ROWS]
    assert verify(storage).every_damage == ()


def test_what_a_lost_rank_had_of_its_own_is_no_replica_and_the_report_says_so(tmp_path: Path) -> None:
    storage = MemoryStorage()
    _, found = lost(storage, tmp_path, ("a", "c"), own=True)
    for one in found:
        assert one.step == 2 and one.report is not None
        assert one.report.passed_over[0].startswith(
            f"step {STEPS} of attempt 0: no node holds what rank 1 captured, and no replica of it is known"
        )


def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str = "ab") -> None:
    """Let each of two nodes keep a copy of the newest share of the other one's rank; more nodes keep parity."""
    monkeypatch.setattr(copies, "_SPARED_CUTS", 0)
    monkeypatch.setattr(copies, "_MEASURED", 0)
    folders, ranks = [ArenaFolder(tmp_path / name) for name in names], range(len(names))
    identities = [one.identity for folder in folders for one in folder.found() if one.identity]
    servers = [ShareServer(folder, "127.0.0.1") for folder in folders]
    for server in servers:
        server.admit(bytes(32), identities[0].run)
    notes = [NodeNote(node="", address=server.address, key=bytes(32)) for server in servers]

    def send(rank: int) -> None:
        others = (*ranks[rank + 1 :], *ranks[:rank])
        own, more = {"here": (rank,), "keeps": others, "every_s": 0.0, "capture_every": 1}, {}
        if len(names) > 2:
            more = {"members": tuple(ranks), "parity_of": others}
        keeping = Keeping(keepers=others, **own, **more)
        log, now = pytest.fail, time.monotonic
        sender = CopySender(
            folders[rank], identities[rank], 0, keeping, note=notes.__getitem__, agree=lambda _: 1, now=now, log=log
        )
        assert sender.look() == CutId(attempt=0, step=STEPS)
        sender.close()

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(send, ranks))
    for server in servers:
        server.close()


@pytest.mark.parametrize("after", [("a", "c"), ("c", "a"), ("a",), ("a", "c", "d")])
def test_what_only_a_lost_node_held_is_read_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: tuple[str, ...]
) -> None:
    storage, options = Watched(), {"own": True, "in_step": True}
    before = job(storage, [tmp_path / "a", tmp_path / "b"], steps=STEPS, seed=0, saves_at=2, **options)
    copied(tmp_path, monkeypatch)
    found = job(storage, [tmp_path / name for name in after], steps=1, seed=9, **options)
    assert [one.step for one in found] == [STEPS] * len(after) and storage.reads == []
    assert [one.restored for one in found] == [before[rank % 2].reached for rank in range(len(after))]
    assert all(one.report is not None and one.report.checked for one in found)
    assert [one.report is not None and one.report.derived_random for one in found[:2]] == [False] * len(found[:2])


@pytest.mark.parametrize("after", [("a", "d", "c"), ("c", "a", "d"), ("a", "c"), ("a", "c", "d", "e")])
def test_what_only_a_lost_node_held_is_computed_from_parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: tuple[str, ...]
) -> None:
    storage, options = Watched(), {"own": True, "in_step": True}
    before = job(storage, [tmp_path / name for name in "abc"], steps=STEPS, seed=0, saves_at=2, **options)
    copied(tmp_path, monkeypatch, "abc")
    found = job(storage, [tmp_path / name for name in after], steps=1, seed=9, **options)
    assert [one.step for one in found] == [STEPS] * len(after) and storage.reads == []
    assert [one.restored for one in found] == [before[rank % 3].reached for rank in range(len(after))]
    assert all(one.report is not None and one.report.checked for one in found)
    assert [one.report is not None and one.report.derived_random for one in found[:3]] == [False] * len(found[:3])


@pytest.mark.parametrize("after", [("a", "c"), ("c", "a")])
def test_the_random_states_of_a_lost_rank_are_read_from_the_node_that_keeps_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: tuple[str, ...]
) -> None:
    storage = Watched()
    job(storage, [tmp_path / "a", tmp_path / "b"], steps=STEPS, seed=0, saves_at=2, in_step=True)
    copied(tmp_path, monkeypatch)
    found = job(storage, [tmp_path / name for name in after], steps=1, seed=9, in_step=True)
    assert [one.step for one in found] == [STEPS] * 2 and storage.reads == []
    assert [one.report is not None and one.report.derived_random for one in found] == [False, False]


def test_a_share_that_is_damaged_on_its_own_node_is_read_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, nodes, options = Watched(), [tmp_path / "a", tmp_path / "b"], {"own": True, "in_step": True}
    before = job(storage, nodes, steps=STEPS, seed=0, saves_at=2, **options)
    copied(tmp_path, monkeypatch)
    kept = [one.name for one in ArenaFolder(tmp_path / "a").found() if one.identity and one.identity.kind == "copy"]
    aside = (tmp_path / "a" / kept[0]).rename(tmp_path / "aside")
    damaged(tmp_path / "a")
    aside.rename(tmp_path / "a" / kept[0])
    found = job(storage, nodes, steps=1, seed=9, **options)
    assert [one.step for one in found] == [STEPS] * 2 and storage.reads == []
    assert [one.restored for one in found] == [one.reached for one in before]
    assert [sorted(one.report.read) for one in found if one.report] == [["other nodes"], ["own"]]


def damaged(folder: Path) -> None:
    """Flip a bit of the weights of the last step in a node's memory, whose checksums were taken."""
    flip(folder, torch.full((3, 3), float(STEPS)).numpy().tobytes())


def test_a_share_that_is_damaged_on_its_own_node_is_read_from_another_one(tmp_path: Path) -> None:
    storage, nodes = Watched(), [tmp_path / name for name in "abc"]
    before = job(storage, nodes, steps=STEPS, seed=0, saves_at=2, in_step=True)
    damaged(tmp_path / "a")
    found = job(storage, [*nodes[:2], tmp_path / "d"], steps=1, seed=9, in_step=True)
    assert [one.step for one in found] == [STEPS] * 3 and storage.reads == []
    assert {one.restored for one in found} == {one.reached for one in before}
    assert [sorted(one.report.read) for one in found if one.report] == [["other nodes"], ["own"], ["other nodes"]]


def test_if_no_source_of_a_share_is_left_all_ranks_take_the_cut_before(tmp_path: Path) -> None:
    storage, nodes = Watched(), [tmp_path / name for name in "ab"]
    job(storage, nodes, steps=STEPS, seed=0, saves_at=2, in_step=True)
    damaged(tmp_path / "a")
    with pytest.warns(DamageWarning, match=f"memory/0:{STEPS}: this cut is not restored from memory"):
        found = job(storage, [tmp_path / "a", tmp_path / "c"], steps=1, seed=9, in_step=True)
    assert [one.step for one in found] == [STEPS - 1] * 2 and storage.reads == []


@pytest.mark.parametrize(("before", "after"), [("aabb", "ab"), ("ab", "bac"), ("abc", "b")])
def test_another_number_of_ranks_reads_the_shares_of_several_nodes(tmp_path: Path, before: str, after: str) -> None:
    """Each rank has a buffer of its own, so that no share stands for another one."""
    storage = Watched()
    first = job(storage, [tmp_path / name for name in before], steps=4, seed=0, saves_at=2, own=True, in_step=True)
    second = job(storage, [tmp_path / name for name in after], steps=1, seed=9, own=True, in_step=True)
    if set(before) <= set(after):
        assert [one.step for one in second] == [4] * len(after) and storage.reads == []
        assert [one.restored for one in second] == [first[rank % len(before)].reached for rank in range(len(after))]
    else:  # no rank runs on the other nodes, to serve what they hold
        assert [one.step for one in second] == [2] * len(after) and storage.reads
