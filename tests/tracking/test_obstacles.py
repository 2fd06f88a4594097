"""All ranks of a job know one list of obstacles, and the first cause of each counts."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lakeckpt.errors import (
    CheckpointError,
    LakeckptError,
    MissingRanksError,
    ReplicasDiffer,
    SaveFailed,
    SaveRefused,
    StorageError,
    UnsupportedValue,
)
from lakeckpt.tracking.obstacles import ABORTED, FAILED, LATE, LEFT, STOPPED, JobObstacles, Notes, Obstacle, own_node


class Board(Notes):
    """Notes in a dict. ``is_gone``: the process that kept them has ended."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.is_gone = False
        self.lock = threading.Lock()

    def publish(self, key: str, data: bytes, /) -> None:
        if self.is_gone:
            raise MissingRanksError("the store is gone")
        self.notes[key] = data

    def publish_once(self, key: str, data: bytes, /) -> None:
        with self.lock:
            self.publish(key, self.notes.get(key, data))

    def peek(self, key: str, /) -> bytes | None:
        return None if self.is_gone else self.notes.get(key)


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def ranks(board: Board) -> list[JobObstacles]:
    return [JobObstacles(board, rank) for rank in range(3)]


def test_of_a_save_that_fails_on_several_ranks_all_know_the_first_cause_and_no_other_save_fails(
    ranks: list[JobObstacles],
) -> None:
    ranks[1].fail(4, UnsupportedValue("the cause"))
    ranks[2].fail(4, SaveFailed("another cause"))
    for one in ranks:
        with pytest.raises(UnsupportedValue, match=r"^rank 1 dropped the save: the cause$"):
            one.refuse(4)
        one.refuse(3)
        one.refuse(5)
        one.refuse_absent(lambda: [0, 1, 2])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SaveFailed("the cause"), SaveRefused),  # no retry brings the rank back
        (ReplicasDiffer("the cause"), SaveRefused),
        (MissingRanksError("the cause"), SaveRefused),
        (KeyboardInterrupt("the cause"), CheckpointError),
        (StorageError("the cause"), SaveRefused),
        (UnsupportedValue("the cause"), UnsupportedValue),
    ],
)
def test_a_rank_that_stops_fails_the_saves_in_which_it_takes_no_part(
    ranks: list[JobObstacles], error: BaseException, kind: type[LakeckptError]
) -> None:
    ranks[1].stop(error, first=4)
    for one in ranks:
        one.refuse(3)
        for number in (4, 5, float("inf")):
            with pytest.raises(kind, match=r"^rank 1 has stopped: (KeyboardInterrupt: )?the cause$") as raised:
                one.refuse(number)
            assert type(raised.value) is kind


def test_each_rank_that_stops_is_known_to_the_ranks_that_wait_for_it(ranks: list[JobObstacles], board: Board) -> None:
    ranks[1].stop(CheckpointError("the cause"))
    ranks[2].stop(CheckpointError("rank 1 has stopped"))
    assert [one.rank for one in ranks[0].look()] == [1], "thousands of ranks may stop for one cause"
    ranks[0].refuse_absent(list)
    with pytest.raises(MissingRanksError, match=r"^rank 1 has stopped: the cause$"):
        ranks[0].refuse_absent(lambda: [1])
    with pytest.raises(MissingRanksError, match=r"^rank 2 has stopped: rank 1 has stopped$"):
        ranks[0].refuse_absent(lambda: [2])


def test_a_last_save_that_is_aborted_ends_no_other_wait(ranks: list[JobObstacles]) -> None:
    ranks[2].abort("it came to no cut", is_late=True)
    ranks[1].abort("rank 0 did not answer", is_late=False)
    for one in ranks:
        assert [(each.kind, each.rank, each.cause) for each in one.look()] == [
            (LATE, 2, "it came to no cut"),
            (ABORTED, 1, "rank 0 did not answer"),
        ]
        one.refuse(0)
        one.refuse_absent(lambda: [0, 1, 2])


def test_ranks_that_say_the_same_at_once_leave_one_obstacle_each_kind(board: Board) -> None:
    every = [JobObstacles(board, rank) for rank in range(8)]
    begin = threading.Barrier(8)

    def stop(one: JobObstacles) -> None:
        begin.wait()
        one.fail(3, SaveFailed("the cause"))
        one.stop(SaveFailed("the cause"))
        one.leave(7, first=3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(stop, every))
    known = {tuple(one.look()) for one in every}
    assert [sorted(one.kind for one in found) for found in known] == [[FAILED, LEFT, STOPPED]]


@pytest.mark.parametrize("kind", ["", LEFT, LATE])
def test_a_process_that_ends_has_died_unless_its_rank_has_left(
    ranks: list[JobObstacles], board: Board, kind: str
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        stated = {0: "", 1: f"{own_node()} {process.pid}", 2: ""}
        ranks[0].watch(stated)
        assert ranks[0].look() == ()
        ranks[2].leave(7, first=3)  # each rank leaves for itself
        if kind == LEFT:
            ranks[1].leave(7, first=3)
        elif kind == LATE:
            ranks[1].abort("it came to no cut", is_late=True)
        process.kill()
        process.wait()
        kinds = [one.kind for one in ranks[0].look() if one.rank == 1]
    ranks[0].close()
    expected = {"": [STOPPED, STOPPED], LEFT: [LEFT], LATE: [LATE, STOPPED, STOPPED]}[kind]
    assert kinds == expected, "in the list, and of this node"
    assert [one.kind for one in ranks[2].look() if one.rank == 1] == expected[:-1]


def test_a_death_is_known_on_its_node_though_the_notes_are_gone_with_the_process(
    ranks: list[JobObstacles], board: Board
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        stated = {0: f"{own_node()} {process.pid}", 1: "", 2: ""}
        ranks[1].watch(stated)
        process.kill()
        process.wait()
        board.is_gone = True
        with pytest.raises(SaveRefused, match=r"^rank 0 has stopped: the process of rank 0 has ended: see its log$"):
            ranks[1].refuse(7)
        with pytest.raises(MissingRanksError, match="the process of rank 0 has ended"):
            ranks[1].refuse_absent(lambda: [0])
        ranks[1].stop(SaveFailed("the cause"))  # nobody reads it
    ranks[1].close()


def test_a_rank_that_cannot_read_what_it_writes_does_not_hang(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the store has failed once: it is not read any more."""
    one = JobObstacles(board, 1)
    monkeypatch.setattr(board, "peek", lambda key: None)
    one.stop(SaveFailed("the cause"))
    assert len(board.notes) == 2


def test_an_obstacle_reads_back_and_a_long_cause_is_cut_off() -> None:
    one = Obstacle(kind=STOPPED, rank=3, error="checkpoint: " + "é" * 9000, first=7)
    found = Obstacle.from_bytes(one.to_bytes())
    assert (found.kind, found.rank, found.first) == (STOPPED, 3, 7) and one.error.startswith(found.error[:-1])
    assert len(one.to_bytes()) <= 4000
    with pytest.raises(ValueError):
        Obstacle.from_bytes(b"\xff")
