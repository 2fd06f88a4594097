"""Rounds and notes of ranks over the store of a job; and what the others raise when a rank is late or gone."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lakeckpt.errors import CheckpointError, MissingRanksError
from lakeckpt.tracking import exchange as module
from lakeckpt.tracking.ballots import SILENT
from lakeckpt.tracking.exchange import Exchange, StoreExchange, exchange_of_group
from lakeckpt.tracking.obstacles import LEFT, STOPPED, own_node, own_process
from lakeckpt.tracking.rounds import answer_to_bytes, tally_from_bytes
from lakeckpt.tracking.tally import Tally
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes

TIMEOUT = timedelta(seconds=PATIENCE_S)


class Clock:
    """A clock that stands still until a test moves it. All ranks share it."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.never = threading.Event()
        self.waiting: set[int] = set()  # threads that have waited
        self.asked: set[int] = set()  # threads that have begun to wait

    def now(self) -> float:
        thread = threading.get_ident()
        (self.waiting if thread in self.asked else self.asked).add(thread)
        return self.time_s

    def wait(self, seconds: float) -> None:
        self.never.wait(0.001)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a rank that waits looks at the clock, which stands still."""
    monkeypatch.setattr(module, "_SHORT_S", 0.001)


class Job:
    """Ranks that are threads, over one store; ``timeout_s`` is 10."""

    def __init__(self, world_size: int, pool: ThreadPoolExecutor, store: Any = None) -> None:
        self.store = dist.HashStore() if store is None else store
        self.world_size = world_size
        self.clock = Clock()
        self.pool = pool
        self.ranks = list(pool.map(self.exchange, range(world_size)))

    def exchange(self, rank: int) -> StoreExchange:
        return StoreExchange(self.store, rank=rank, world_size=self.world_size, timeout_s=10.0, waiter=self.clock)

    def begin(self, *ranks: int) -> list[Future[Any]]:
        """Begin a round on ``ranks``, and return when each of them has stated its facts."""
        return [self.started(self.ranks[rank].everyone, {"rank": str(rank)}) for rank in ranks]

    def started(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call on another thread, and return when it waits or is done."""
        threads: list[int] = []

        def body() -> Any:
            for known in (self.clock.waiting, self.clock.asked):
                known.discard(threading.get_ident())
            threads.append(threading.get_ident())
            return call(*args)

        begun = self.pool.submit(body)
        while not begun.done() and not self.clock.waiting.intersection(threads):
            self.clock.never.wait(0.001)
        return begun

    def round(self) -> list[dict[str, Any]]:
        """Return what a round of all ranks gives each of them."""
        return [dict(one.result(PATIENCE_S).facts) for one in self.begin(*range(self.world_size))]


def missing(begun: Future[Any]) -> str:
    """The message of the error of a round."""
    with pytest.raises(MissingRanksError) as raised:
        begun.result(PATIENCE_S)
    return str(raised.value)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


@pytest.mark.parametrize("world_size", [2, 5])
def test_every_rank_has_the_facts_of_all_and_the_store_does_not_grow(world_size: int, pool: ThreadPoolExecutor) -> None:
    job = Job(world_size, pool)
    sizes = set()
    for _ in range(4):
        found = job.round()
        assert found == [found[0]] * world_size
        assert {value: ranks.pairs() for value, ranks in found[0]["rank"].items()} == {
            str(rank): [(rank, rank + 1)] for rank in range(world_size)
        }
        sizes.add(job.store.num_keys())
    assert len(sizes) == 1  # the keys of the last round
    for one in job.ranks:
        one.close()
        one.close()
    assert job.store.num_keys() == len({"callers", "callers/answered"})


def test_rank_0_closes_when_all_have_read_the_last_answer(pool: ThreadPoolExecutor) -> None:
    """Its process may host the store, and end."""
    job = Job(2, pool)
    job.ranks[1]._await_answer = lambda number: None  # type: ignore[method-assign,assignment,return-value]
    for one in job.begin(1, 0):
        one.result(PATIENCE_S)  # rank 1 has not read the answer
    closing = job.started(job.ranks[0].close)
    assert not closing.done()
    del job.ranks[1]._await_answer
    assert job.ranks[1]._await_answer(1).value("rank") == "0"
    closing.result(PATIENCE_S)
    assert job.store.num_keys() == len({"callers", "callers/answered"})


def test_rank_0_waits_only_a_moment_for_a_rank_that_is_gone(pool: ThreadPoolExecutor) -> None:
    job = Job(2, pool)
    job.ranks[1]._await_answer = lambda number: None  # type: ignore[method-assign,assignment,return-value]
    for one in job.begin(1, 0):
        one.result(PATIENCE_S)
    closing = job.started(job.ranks[0].close)
    job.clock.time_s += 5.5
    closing.result(PATIENCE_S)


def test_facts_of_any_size_arrive(pool: ThreadPoolExecutor) -> None:
    job = Job(3, pool)
    facts = {f"é\0{n}": "ü" * 1000 for n in range(1000)}
    for tally in pool.map(lambda one: one.everyone(facts), job.ranks):
        assert {name: tally.value(name) for name in tally.facts} == facts


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_is_late_is_named_to_all_and_takes_part_in_the_next_round(
    late: int, pool: ThreadPoolExecutor
) -> None:
    job = Job(3, pool)
    for _ in range(2):
        job.round()
        begun = job.begin(*({0, 1, 2} - {late}))
        job.clock.time_s += 10.5
        messages = {missing(one) for one in begun}
        messages |= {missing(one) for one in job.begin(late)}
        assert len(messages) == 1 and messages.pop().startswith(f"rank {late} of 3 did not answer within 10 s")
        assert job.round() == job.round()


def test_where_rank_0_is_late_all_raise_that_and_so_does_it(pool: ThreadPoolExecutor) -> None:
    job = Job(3, pool)
    for _ in range(2):
        begun = job.begin(1, 2)
        job.clock.time_s += 20.5
        messages = {missing(one) for one in begun} | {missing(one) for one in job.begin(0)}
        assert len(messages) == 1 and messages.pop().startswith("rank 0 of 3 did not answer")
        assert len(job.round()[0]["rank"]) == 3


def test_an_answer_that_rank_0_writes_too_late_is_not_taken(pool: ThreadPoolExecutor) -> None:
    job = Job(2, pool)
    begun = job.begin(1)
    job.clock.time_s += 20.5
    assert missing(begun[0]).startswith("rank 0 of 2 did not answer")
    with pytest.raises(MissingRanksError, match="rank 0 of 2 did not answer"):
        tally_from_bytes(job.ranks[0]._answer(1, answer_to_bytes(Tally.of([{}, {}]))))


def test_rank_0_may_come_late_and_then_wait_as_long_for_another(pool: ThreadPoolExecutor) -> None:
    job = Job(3, pool)
    begun = job.begin(1)
    job.clock.time_s += 9.5
    begun += job.begin(0)
    job.clock.time_s += 9.5
    begun += job.begin(2)
    assert [len(one.result(PATIENCE_S).facts["rank"]) for one in begun] == [3, 3, 3]


@pytest.mark.parametrize("kind", [STOPPED, LEFT])
@pytest.mark.parametrize("stops", [0, 2])
def test_nobody_waits_for_a_rank_that_has_stopped(stops: int, kind: str, pool: ThreadPoolExecutor) -> None:
    job = Job(3, pool)
    begun = job.begin(*({0, 1, 2} - {stops}))
    if kind == STOPPED:
        job.ranks[stops].obstacles.stop(CheckpointError("the cause"))
    else:
        job.ranks[stops].obstacles.leave(7, first=0)
    cause = "the cause" if kind == STOPPED else "it closed its manager after step 7. Let the loops of all ranks end at "
    assert all(missing(one).startswith(f"rank {stops} has stopped: {cause}") for one in begun)


@pytest.mark.parametrize(("first", "second"), [(1, 0), (1, 2)])
def test_nobody_waits_for_a_rank_that_stopped_after_another_one(
    first: int, second: int, pool: ThreadPoolExecutor
) -> None:
    """Only the first of many ranks that stop is in the list that all read."""
    job = Job(3, pool)
    begun = job.begin(1, 2 - second)
    for rank in (first, second):
        job.ranks[rank].obstacles.stop(CheckpointError(f"the cause of {rank}"))
    assert len(job.ranks[second].obstacles.look()) == 1
    assert missing(begun[1]) == f"rank {second} has stopped: the cause of {second}"


@pytest.mark.parametrize(("dies", "watches"), [(0, 1), (0, 2), (1, 0), (1, 2)])
def test_nobody_waits_for_a_rank_whose_process_has_ended_on_the_node_of_another(
    dies: int, watches: int, pool: ThreadPoolExecutor
) -> None:
    job = Job(3, pool)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        job.ranks[watches].obstacles.watch({watches: own_process(), dies: f"{own_node()} {process.pid}"})
        begun = job.begin(*({0, 1, 2} - {dies}))
        assert not any(one.done() for one in begun)
        process.kill()
        cause = f"rank {dies} has stopped: the process of rank {dies} has ended: see its log"
        assert {missing(one) for one in begun} == {cause}
    job.ranks[watches].close()


def test_a_process_that_ends_after_a_rank_has_left_is_no_failure(pool: ThreadPoolExecutor) -> None:
    job = Job(2, pool)
    job.ranks[1].obstacles.leave(7, first=3)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        job.ranks[0].obstacles.watch({0: own_process(), 1: f"{own_node()} {process.pid}"})
        process.kill()
        process.wait()
        assert {one.kind for one in job.ranks[0].obstacles.look()} == {LEFT}
        job.ranks[0].obstacles.refuse(2)
        job.ranks[0].close()


class Ended:
    """The store of a rank 0 that has ended when a value is read."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str) -> bytes:
        return b""


def test_a_rank_that_comes_too_late_for_the_answer_of_a_rank_0_that_has_ended_says_so(pool: ThreadPoolExecutor) -> None:
    job = Job(2, pool)
    job.ranks[1]._store = Ended(job.ranks[1]._store)  # type: ignore[assignment]
    assert "rank 0" in missing(job.begin(0, 1)[1])


class Late:
    """A store of a rank whose process gets no processor before it reads an answer, until rank 0 waits for it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.reads, self.goes = threading.Event(), threading.Event()

    def get(self, key: str) -> Any:
        if key.endswith("/answer"):
            self.reads.set()
            assert self.goes.wait(PATIENCE_S)
            if not self._store.check([key]):
                return b""  # a store waits for a key that is gone
        return self._store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_rank_0_removes_no_answer_that_a_rank_is_about_to_read(pool: ThreadPoolExecutor) -> None:
    job = Job(2, pool)
    late = Late(job.ranks[1]._store)
    job.ranks[1]._store = late  # type: ignore[assignment]
    begun = job.begin(1, 0)
    assert late.reads.wait(PATIENCE_S)
    closing = job.started(job.ranks[0].close)  # it waits, or has ended
    is_there = job.store.check([f"{job.ranks[0]._name}/{job.ranks[0]._round - 1}/answer"])
    late.goes.set()
    assert is_there
    assert [len(one.result(PATIENCE_S).facts["rank"]) for one in begun] == [2, 2]
    closing.result(PATIENCE_S)


class Slow:
    """A store of rank 0, which says that an answer says nothing only when a rank has come to read it."""

    def __init__(self, store: Any, reads: threading.Event) -> None:
        self._store, self._reads = store, reads

    def add(self, key: str, amount: int) -> Any:
        if amount == SILENT:
            assert self._reads.wait(PATIENCE_S)
        return self._store.add(key, amount)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_rank_0_removes_no_answer_that_says_nothing_and_is_about_to_be_read(pool: ThreadPoolExecutor) -> None:
    job = Job(3, pool)
    late = Late(job.ranks[1]._store)
    job.ranks[1]._store = late  # type: ignore[assignment]
    job.ranks[0]._store = Slow(job.ranks[0]._store, late.reads)  # type: ignore[assignment]
    begun = [job.started(job.ranks[rank].everyone, {}) for rank in (1, 2, 0)]
    assert late.reads.wait(PATIENCE_S)
    begun[2].result(PATIENCE_S)
    closing = job.started(job.ranks[0].close)  # it waits, or has ended
    is_there = job.store.check([f"{job.ranks[0]._name}/{job.ranks[0]._round - 1}/answer"])
    late.goes.set()
    assert is_there
    assert [one.result(PATIENCE_S).facts for one in begun] == [{}] * 3
    closing.result(PATIENCE_S)


def test_a_rank_that_stops_after_its_facts_keeps_nobody_from_the_round(pool: ThreadPoolExecutor) -> None:
    job = Job(2, pool)
    begun = job.begin(1)
    job.ranks[1].obstacles.stop(CheckpointError("the cause"))
    begun += job.begin(0)
    assert [len(one.result(PATIENCE_S).facts["rank"]) for one in begun] == [2, 2]


def test_a_note_of_rank_0_is_removed_when_all_have_fetched_it(pool: ThreadPoolExecutor) -> None:
    job = Job(3, pool)
    keys = job.store.num_keys()
    fetched = job.started(job.ranks[1].fetch, "note")
    job.ranks[0].publish("note", b"\x00later")
    assert fetched.result(PATIENCE_S) == b"\x00later" == job.ranks[2].peek("note")
    assert job.ranks[2].fetch("note") == b"\x00later"
    assert job.ranks[2].peek("note") is None and job.store.num_keys() == keys
    fetched = job.started(job.ranks[1].fetch, "another")
    job.clock.time_s += 10.5
    with pytest.raises(MissingRanksError, match="rank 0 did not announce 'another' within 10 s"):
        fetched.result(PATIENCE_S)


def test_a_rank_that_is_missing_when_ranks_meet_is_named(pool: ThreadPoolExecutor) -> None:
    job = Job(1, pool)
    job.world_size = 3
    begun = [job.started(job.exchange, rank) for rank in (0, 2)]
    while job.store.add("callers", 0) != 1 or job.store.check(["caller/1"]):  # rank 2 was welcomed
        job.clock.wait(0.0)
    job.clock.time_s += 10.5
    assert missing(begun[0]).startswith(("rank 1 of 3", "ranks 1-2 of 3"))
    job.clock.time_s += 20.5
    assert missing(begun[1])


def test_ranks_read_nothing_of_those_that_died_before_on_the_same_store(pool: ThreadPoolExecutor) -> None:
    """As under torchrun with ``--max-restarts``, whose store stays. The first start dies as it meets, and later."""
    job = Job(1, pool)
    job.world_size = 3
    for rank in (1, 2, 3):
        number = job.store.add("callers", 1)
        if rank < 3:  # the third died before it could say its name
            job.store.set(f"caller/{number}", f"of a dead rank {rank}")
    for start in range(3):
        job.ranks = list(pool.map(job.exchange, range(3)))
        assert job.ranks[2].peek("note") is None
        job.ranks[0].publish("note", b"of start %d" % start)
        assert len(job.round()[0]["rank"]) == 3
        job.begin(1)  # and dies as it waits
        job.clock.time_s += 30.0


def test_a_store_whose_host_has_ended_is_named_at_once(pool: ThreadPoolExecutor) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    clients = [dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=TIMEOUT) for _ in range(2)]
    ranks = list(pool.map(lambda at: StoreExchange(clients[at], rank=at, world_size=2, timeout_s=PATIENCE_S), range(2)))
    assert ranks[1].peek("note") is None
    del host
    with pytest.raises(MissingRanksError, match=r"the store .* is gone: its host \(rank 0, or the launcher\)"):
        ranks[1].everyone({})
    assert ranks[1].peek("note") is None
    with pytest.raises(MissingRanksError, match="is gone"):
        ranks[1].publish("note", b"")
    ranks[1].close()


def talk(rank: int, folder: str, port: int) -> None:
    """Be one of three ranks: all talk, and then two of them, twice."""
    init = f"tcp://127.0.0.1:{port}" if port else f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=3, timeout=TIMEOUT)
    some = dist.new_group([0, 2])
    every = exchange_of_group(None, timeout_s=PATIENCE_S)
    found = [list(every.everyone({"rank": str(rank)}).facts["rank"])]
    every.publish(f"of {rank}", b"\x00\xff")
    every.everyone({})
    found.append([every.peek(f"of {one}") for one in range(3)])
    for number in range(2 if rank != 1 else 0):
        few = exchange_of_group(some, timeout_s=PATIENCE_S)
        found.append(list(few.everyone({"rank": f"{few.rank} {number}"}).facts["rank"]))
        few.close()
    every.everyone({})
    every.close()
    Path(folder, f"{rank}.txt").write_text(repr(found))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_processes_talk_over_the_store_of_their_job(kind: str, tmp_path: Path) -> None:
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port if kind == "tcp" else 0
    del free
    run_processes(3, talk, str(tmp_path), port)
    every = [["0", "1", "2"], [b"\x00\xff"] * 3]
    few = [["0 0", "1 0"], ["0 1", "1 1"]]
    for rank in range(3):
        assert (tmp_path / f"{rank}.txt").read_text() == repr(every + (few if rank != 1 else []))


def talk_until_one_dies(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=TIMEOUT)
    exchange = exchange_of_group(None, timeout_s=PATIENCE_S)
    if rank == 1:
        os._exit(0)
    exchange._timeout_s = 1.0  # type: ignore[attr-defined]  # nobody is slow from here on: a dead rank is waited for
    for _ in range(2):
        with pytest.raises(MissingRanksError, match=r"^rank ([01] of 3 did not answer|1 has stopped)"):
            exchange.everyone({})
    os._exit(0)


def test_a_dead_rank_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    run_processes(3, talk_until_one_dies, str(tmp_path))


def test_a_job_of_one_talks_to_itself() -> None:
    solo = Exchange()
    assert dict(solo.everyone({"a": "b"}).facts) == {"a": {"b": solo.everyone({"a": "b"}).facts["a"]["b"]}}
    solo.publish("k", b"v")
    assert solo.peek("k") is None
    solo.close()
