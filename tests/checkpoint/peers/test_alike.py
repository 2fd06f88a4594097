"""Ranks that capture the same share find each other while they train, and no others do."""

from __future__ import annotations

import random

import pytest

from lakeckpt.checkpoint.arena.contents import TensorPlace, TensorTable
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.checkpoint.peers.alike import ShareFinder, statement
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.shares import ShareList
from lakeckpt.tracking.obstacles import Notes

SIZES = {"a": 1, "b": 100, "c": 4096, "d": 0}


class Store(Notes):
    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}

    def publish(self, key: str, data: bytes, /) -> None:
        self.notes[key] = data

    def peek(self, key: str, /) -> bytes | None:
        return self.notes.get(key)


def table(**sizes: int) -> TensorTable:
    places, end = {}, 0
    for key, size in {**SIZES, **sizes}.items():
        places[key] = TensorPlace(spec=TensorSpec(key=key, dtype="uint8", shape=(size,)), start=end)
        end += size
    return TensorTable(places=places)


DATA = random.Random(0).randbytes(sum(SIZES.values()) + 1)


class Job:
    """Ranks that step together. ``differ``: rank → what differs in its tree."""

    def __init__(self, world: int, differ: dict[int, bytes] | None = None) -> None:
        self.store, self.differ, self.step, self.table = Store(), differ or {}, 0, table()
        self.alone: set[int] = set()
        self.exchange_every = 1
        self.finders = [ShareFinder(self.store, rank=rank, world_size=world, now=lambda: 0.0) for rank in range(world)]

    def train(self, steps: int, *, skips: int = -1, every: int = 1) -> list[ShareList | None]:
        """Do steps; return what each rank's last capture names. Rank ``skips`` captures nothing. ``every``: of so many
        cuts, all ranks skip all but one."""
        named: list[ShareList | None] = []
        for _ in range(steps):
            self.step += 1
            named = []
            for rank, finder in enumerate(self.finders):
                finder.begins(self.step, is_alone=rank in self.alone)
                finder.look()
                own = b"" if self.step % self.exchange_every == 0 else b"%d" % rank
                trees = {RANDOM: b"%d" % rank, "m": self.differ.get(rank, b"same") + own}
                cut = CutId(attempt=0, step=self.step)
                is_skipped = rank == skips or self.step % every != 0
                named.append(None if is_skipped else finder.named(cut, self.table, trees, memoryview(DATA)))
        return named


def classes(found: ShareList | None) -> str:
    """Which ranks are replicas: equal letters are."""
    assert found is not None
    ids = [found.id_of(rank) for rank in range(found.world)]
    return "".join("abcdefgh"[ids.index(one)] for one in ids)


def test_replicas_find_each_other_within_a_few_cuts() -> None:
    job = Job(4)
    assert job.train(3) == [None] * 4
    for found in job.train(5):
        assert classes(found) == "aaaa"
    mesh = Job(4, {1: b"other", 3: b"other"}).train(8)
    assert [classes(one) for one in mesh] == ["abab"] * 4


@pytest.mark.parametrize("exchange_every", [2, 3, 4, 8])
def test_ranks_that_exchange_their_states_every_few_steps_are_no_replicas(exchange_every: int) -> None:
    job = Job(2)
    job.exchange_every = exchange_every
    assert all(job.train(1) == [None, None] for _ in range(70))


def test_ranks_that_are_all_different_name_no_list() -> None:
    assert Job(3, {1: b"x", 2: b"y"}).train(20) == [None] * 3


def test_a_rank_with_places_of_readers_of_its_own_is_nobodys_replica() -> None:
    job = Job(3)
    job.alone = {1}
    assert [classes(one) for one in job.train(8)] == ["aba"] * 3


def test_ranks_that_drift_apart_are_told_apart() -> None:
    job = Job(3)
    assert [classes(one) for one in job.train(8)] == ["aaa"] * 3
    job.differ[2] = b"drifted"
    assert [classes(one) for one in job.train(20)] == ["aac"] * 3


def test_a_rank_that_skips_a_capture_keeps_the_list_before() -> None:
    job = Job(2)
    job.train(15)
    job.train(2, skips=1)  # the 16th and the next cut are compared
    assert [classes(one) for one in job.train(10)] == ["aa"] * 2


@pytest.mark.parametrize("every", [2, 3, 7])
def test_captures_that_are_slower_than_steps_are_compared_as_well(every: int) -> None:
    assert [classes(one) for one in Job(2).train(10 * every, every=every)] == ["aa"] * 2


def test_captures_of_other_tensors_name_no_list_until_ranks_have_compared_them() -> None:
    job = Job(2)
    job.train(15)
    job.table = table(d=1)
    assert job.train(1) == [None, None]
    assert [classes(one) for one in job.train(20)] == ["aa"] * 2


def test_a_job_of_one_rank_asks_nothing() -> None:
    job = Job(1)
    assert job.train(20) == [None] and job.store.notes == {}


@pytest.mark.parametrize("at", [0, 1, 50, 100, 101, 101 + 4095])
def test_a_statement_notices_small_tensors_whole_and_both_ends_of_large_ones(at: int) -> None:
    other = bytearray(DATA)
    other[at] ^= 1
    assert statement(table(), {}, memoryview(other)) != statement(table(), {}, memoryview(DATA))


def test_a_statement_ignores_random_states_alone() -> None:
    trees = {RANDOM: b"1", "m": b"2"}
    first = statement(table(), trees, memoryview(DATA))
    assert statement(table(), {**trees, RANDOM: b"3"}, memoryview(DATA)) == first
    assert statement(table(), {**trees, "m": b"3"}, memoryview(DATA)) != first
    assert statement(table(), trees, memoryview(DATA), b"rank 1") != first
    assert statement(table(e=0), trees, memoryview(DATA)) != first
