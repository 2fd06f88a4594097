"""Arenas: whatever dies whenever, what is found is a complete cut, the newest or an older one, and nobody else's."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import resource
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.errors import ArenaDamaged, ArenaError
from lakeckpt.recovery.facts import CutId
from tests.examples import examples

SLICE, SLICES = 64, 5


def layout(**changes: object) -> ArenaLayout:
    told = {
        "identity": ArenaIdentity(run=b"r" * 16, rank=1, world=4),
        "plan": b"p" * 16,
        "data_bytes": SLICE * SLICES - 7,
        "documents_bytes": 300,
    }
    return ArenaLayout(**{**told, **changes})  # type: ignore[arg-type]


CUT = bytes(16)


def stamp(step: int, number: int) -> bytes:
    """What slice ``number`` holds at a step."""
    size = SLICE if number < SLICES - 1 else SLICE - 7
    return (step * 100 + number).to_bytes(8, "big") * 8 if size == SLICE else bytes([step % 251] * size)


def stamps(step: int) -> bytes:
    """What a generation holds at a step."""
    return b"".join(stamp(step, number) for number in range(SLICES))


def fill(filling: Filling, step: int) -> None:
    for number in range(SLICES):
        data = stamp(step, number)
        filling.data[number * SLICE : number * SLICE + len(data)] = data


def capture(arena: Arena, step: int, common: int | None = None) -> bool:
    filling = arena.begin(common=common)
    if filling is None:
        return False
    fill(filling, step)
    filling.complete(CutId(attempt=0, step=step), digest=bytes([step]) * 16, documents=f"documents {step}".encode())
    return True


def check(arena: Arena, step: int) -> None:
    """What is held of a step is what was captured at it, all of it."""
    with arena.hold(step=step) as held:
        assert held is not None
        assert held.record.digest == bytes([step]) * 16
        assert held.documents() == f"documents {step}".encode()
        assert bytes(held.data) == stamps(step)


@pytest.fixture
def folder(tmp_path: Path) -> ArenaFolder:
    return ArenaFolder(tmp_path / "arenas")


@contextmanager
def made(folder: ArenaFolder, **changes: object) -> Iterator[Arena]:
    with folder.create(layout(**changes)) as arena:
        yield arena


def test_what_was_captured_is_found_by_whoever_opens_it_again(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        for step in range(1, 8):
            assert capture(arena, step)
            check(arena, step)
    (info,) = folder.found()
    assert (info.identity, info.is_filled, info.steps) == (
        ArenaIdentity(run=b"r" * 16, rank=1, world=4),
        False,
        (7, 6, 5),
    )
    with folder.open(info.name) as again:
        for step in (7, 6, 5):
            check(again, step)
        with again.hold(step=4) as held:
            assert held is None
    folder.remove(info.name)
    assert folder.found() == []


def memory_of(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_is_removed_gives_its_memory_back_though_others_have_it_mapped(folder: ArenaFolder, step: int) -> None:
    """All but a generation that somebody holds, to persist it: that is whole until he lets go."""
    with made(folder, documents_bytes=2**16) as arena:
        for each in (1, 2, 3):
            capture(arena, each)
    path = Path(folder.path, arena.name)
    with folder.open(arena.name) as other:
        taken = memory_of(path)
        with other.hold(step=step) as held:
            assert held is not None
            folder.remove(arena.name)
            assert not path.exists() and folder.found() == []
            assert os.fstat(other._descriptor).st_blocks * 512 == taken - 2 * 2**16
            check(other, step)
            assert [record.cut.step for record in other.complete()] == [step]


def test_a_generation_that_several_hold_is_spared_until_the_last_lets_go(folder: ArenaFolder) -> None:
    with made(folder) as arena, folder.open(arena.name) as one, folder.open(arena.name) as other:
        for step in (1, 2, 3):
            capture(arena, step)
        with one.hold(step=1) as first:
            with other.hold(step=1) as second:
                assert first is not None and second is not None and first.record == second.record
            assert capture(arena, 4, common=3)
            check(one, 1)
            assert arena.begin(common=3) is None
        assert capture(arena, 5, common=3)
        assert [record.cut.step for record in arena.complete()] == [5, 4, 3]


def test_what_is_emptied_can_be_filled_again_and_what_is_held_by_who_empties_it_is_whole(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        for step in (1, 2, 3):
            capture(arena, step)
        with arena.hold(step=2) as held:
            assert held is not None
            arena.empty()
            check(arena, 2)
            assert [record.cut.step for record in arena.complete()] == [2]
        arena.empty()
        assert list(arena.complete()) == []
        for step in (4, 5, 6):
            assert capture(arena, step)
        for step in (4, 5, 6):
            check(arena, step)


def test_a_crash_at_any_write_leaves_the_newest_cut_or_the_one_before(
    folder: ArenaFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(folder) as arena:
        path = Path(folder.path, arena.name)
        newest, seen = 0, []
        real = Arena._put

        def put(self: Arena, at: int, data: bytes) -> None:
            half = len(data) // 2
            real(self, at, data[:half])
            crash()
            real(self, at, data)
            crash()

        def crash() -> None:
            """What a process finds that opens a copy of the memory as it is now."""
            copies = ArenaFolder(tmp_path / "copies")
            copies.create(layout()).close()
            name = copies.found()[0].name
            Path(copies.path, name).write_bytes(path.read_bytes())
            with copies.open(name) as found:
                steps = [record.cut.step for record in found.complete()]
                seen.append(tuple(steps))
                assert set(steps) >= {step for step in (newest, newest - 1) if step > 0}
                for step in steps:
                    check(found, step)
            Path(copies.path, name).unlink()

        monkeypatch.setattr(Arena, "_put", put)
        for step in range(1, 6):
            filling = arena.begin()
            assert filling is not None
            for number in range(SLICES):
                data = stamp(step, number)
                filling.data[number * SLICE : number * SLICE + len(data)] = data
                crash()
            filling.complete(
                CutId(attempt=0, step=step), digest=bytes([step]) * 16, documents=f"documents {step}".encode()
            )
            newest = step
            crash()
    assert {len(steps) for steps in seen} == {0, 1, 2, 3}


@given(st.lists(st.tuples(st.sampled_from(["capture", "abandon", "hold", "release"]), st.integers(0, 3)), max_size=40))
@settings(max_examples=examples(40))
def test_what_is_needed_is_never_written_to(actions: list[tuple[str, int]]) -> None:
    """Steps that are held, the newest one, and all that another rank may have to go back to stay whole."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = ArenaFolder(Path(name, "a"))
        with made(folder) as arena, folder.open(arena.name) as agent:
            step, common, holds = 0, 0, []
            for action, lag in actions:
                if action == "capture":
                    if capture(arena, step + 1, common or None):
                        step += 1
                    known = step - lag  # by all ranks, of which this one is the furthest
                    if known > common and known in {record.cut.step for record in arena.complete()}:
                        common = known
                elif action == "abandon":
                    if (filling := arena.begin(common=common or None)) is not None:
                        filling.data[:SLICE] = b"x" * SLICE
                        filling.abandon()
                elif action == "hold" and step:
                    hold = agent.hold()
                    held = hold.__enter__()
                    assert held is not None
                    holds.append((hold, held))
                elif action == "release" and holds:
                    holds.pop(0)[0].__exit__(None, None, None)
                for _, held in holds:
                    assert bytes(held.data) == stamps(held.record.cut.step)
                kept = {record.cut.step for record in arena.complete()}
                assert step in kept or not step
                assert common in kept or not common
            for hold, _ in holds:
                hold.__exit__(None, None, None)


def test_who_reads_meanwhile_is_told_of_what_is_complete_now(folder: ArenaFolder) -> None:
    with made(folder) as arena, folder.open(arena.name) as reader:
        for step in range(1, 10):
            assert capture(arena, step, common=step - 1)
            assert [record.cut.step for record in reader.complete()] == list(range(step, max(0, step - 3), -1))
        with reader.hold() as held:
            assert held is not None and held.record == arena.complete()[0]
        arena.forget(after=8)
        assert [record.cut.step for record in reader.complete()] == [8, 7] == [one.cut.step for one in arena.complete()]


def test_a_generation_that_every_rank_may_need_is_not_begun_again(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        for step in (1, 2, 3):
            assert capture(arena, step, common=1 if step > 1 else None)
        assert arena.begin(common=1) is None  # another rank has step 1 and no newer one
        assert capture(arena, 4, common=2)
        assert [record.cut.step for record in arena.complete()] == [4, 3, 2]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.sampled_from([3, 4]), st.booleans(), st.booleans())
@example(steps=[3, 3, 4, 5], generations=3, knows=False, restarts=False)
@example(steps=[3, 3, 4, 5], generations=4, knows=False, restarts=True)
def test_several_of_one_step_never_keep_a_newer_one_from_being_begun(
    steps: list[int], generations: int, knows: bool, restarts: bool
) -> None:
    """A policy saves a step, and the user does, too: of such generations the last one alone is what a rank needs.
    ``steps``: how many times each step is captured, each time by another attempt if the job ``restarts``."""
    with tempfile.TemporaryDirectory() as name, made(ArenaFolder(Path(name, "a")), generations=generations) as arena:
        last: dict[int, bytes] = {}
        for step, times in enumerate(steps, 1):
            for number in range(times):
                filling = arena.begin(common=max(last, default=0) or None if knows else None)
                assert filling is not None, f"{[record.cut.step for record in arena.complete()]} before step {step}"
                fill(filling, step)
                last[step] = bytes([step, number]) * 8
                filling.complete(CutId(attempt=number if restarts else 0, step=step), digest=last[step], documents=b"")
                with arena.hold(step=step) as held, arena.hold() as newest:
                    assert held is not None and newest is not None
                    assert held.record.digest == newest.record.digest == last[step]
                if step > 1:
                    with arena.hold(step=step - 1) as before:
                        assert knows or (before is not None and before.record.digest == last[step - 1])


def test_what_an_attempt_before_has_captured_of_a_step_goes_last(folder: ArenaFolder) -> None:
    """Another rank may have died before it captured that step again."""
    with made(folder, generations=4) as arena:
        for step, attempt in ((3, 0), (4, 0), (4, 1), (5, 1), (6, 1)):
            filling = arena.begin()
            assert filling is not None
            fill(filling, step)
            filling.complete(CutId(attempt=attempt, step=step), digest=CUT, documents=b"")
        assert [(one.cut.step, one.cut.attempt) for one in arena.complete()] == [(6, 1), (5, 1), (4, 1), (4, 0)]


def test_what_is_completed_while_another_one_is_begun_is_not_begun_anew(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        assert capture(arena, 1)
        first = arena.begin(common=1)
        assert first is not None
        how = {"digest": CUT, "documents": b""}
        copier = threading.Thread(target=first.complete, args=(CutId(attempt=0, step=2),), kwargs=how)
        records = arena._records

        def records_before_it() -> list[Any]:
            found = records()
            copier.start()
            copier.join(0.2)
            return found

        arena._records = records_before_it  # type: ignore[method-assign]
        second = arena.begin(common=1)
        arena._records = records  # type: ignore[method-assign]
        copier.join()
        assert second is not None and second.number != first.number
        assert [one.cut.step for one in arena.complete()] == [2, 1]


def test_two_generations_may_be_filled_and_the_newest_complete_one_is_spared(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        assert capture(arena, 1)
        first, second = arena.begin(common=1), arena.begin(common=1)
        assert first is not None and second is not None and first.number != second.number
        assert arena.begin(common=1) is None
        assert [one.cut.step for one in arena.complete()] == [1]
        for step, filling in ((2, first), (3, second)):
            filling.complete(CutId(attempt=0, step=step), digest=CUT, documents=b"")
        assert [one.cut.step for one in arena.complete()] == [3, 2, 1]
        first, second = arena.begin(common=3), arena.begin(common=3)
        assert first is not None and second is not None and arena.begin(common=3) is None
        assert [one.cut.step for one in arena.complete()] == [3]
        first.abandon()
        third = arena.begin(common=3)
        assert third is not None and third.number == first.number != second.number


def test_documents_that_do_not_fit_are_refused_and_cost_nothing_else(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        assert capture(arena, 1)
        for _ in range(arena.layout.generations):  # each time the generation is given back
            filling = arena.begin()
            assert filling is not None
            fill(filling, 2)
            with pytest.raises(ArenaDamaged, match="has room for 300"):
                filling.complete(CutId(attempt=0, step=2), digest=CUT, documents=b"x" * 301)
        check(arena, 1)
        assert capture(arena, 2)


@pytest.mark.parametrize("place", ["documents", "record", "sequence", "superblock"])
def test_damage_is_noticed(folder: ArenaFolder, place: str) -> None:
    with made(folder) as arena:
        assert capture(arena, 1)
        at = {
            "documents": arena.layout.documents_at(0) + 1,
            "record": arena.layout.record_at(0) + 60,
            "sequence": arena.layout.sequence_at(0),
            "superblock": 40,
        }[place]
        name = arena.name
    with open(Path(folder.path, name), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 2]))
    if place == "superblock":
        with pytest.raises(ArenaDamaged):
            folder.open(name)
        assert folder.found()[0].problem is not None
        return
    with folder.open(name) as arena, arena.hold() as held:
        if place in ("record", "sequence"):
            assert held is None
            return
        assert held is not None
        with pytest.raises(ArenaDamaged, match="its documents of step 1"):
            held.documents()


def test_one_process_fills_an_arena_and_another_may_when_it_is_gone(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        assert folder.found()[0].is_filled
        with pytest.raises(ArenaError, match="is filled by another process"):
            folder.open(arena.name, writes=True)
        assert capture(arena, 1)
    with folder.open(arena.name, writes=True) as again:
        assert capture(again, 2)
        assert [record.cut.step for record in again.complete()] == [2, 1]


def test_an_arena_that_is_filled_is_neither_replaced_nor_removed(folder: ArenaFolder) -> None:
    with made(folder) as arena:
        assert capture(arena, 1)
        for take in (lambda: folder.create(layout()), lambda: folder.remove(arena.name)):
            with pytest.raises(ArenaError, match="is filled by another process"):
                take()
        assert arena.is_there and folder.found()[0].steps == (1,)
    with folder.create(layout()) as again:
        assert again.name == arena.name and again.complete() == []


def _train(folder: ArenaFolder, pipe: multiprocessing.connection.Connection) -> None:  # type: ignore[name-defined]
    with folder.create(layout()) as arena:
        step = 0
        begun, begins = os.pipe()
        child = os.fork()  # a loader worker, which outlives its trainer
        if not child:
            os.write(begins, b"x")
            signal.pause()
        assert os.read(begun, 1) == b"x", "until it runs it has what its parent had"
        pipe.send(child)
        while True:
            step += 1
            assert capture(arena, step)
            if step == 20:
                pipe.send(step)


def test_a_killed_process_leaves_a_complete_cut_to_the_next_one(folder: ArenaFolder) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(folder, theirs))
    process.start()
    child = ours.recv()
    try:
        assert ours.recv() == 20
        process.kill()
        process.join()
        (info,) = folder.found()
        assert not info.is_filled, "a forked child keeps the lock of its parent"
        assert info.steps[0] >= 20
        with folder.open(info.name, writes=True) as arena:
            for record in arena.complete():
                with arena.hold(step=record.cut.step) as held:
                    assert held is not None and bytes(held.data) == stamps(record.cut.step)
            assert capture(arena, 200)
            check(arena, 200)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("closed", [False, True])
def test_forked_children_close_what_is_open_of_an_arena_and_nothing_that_came_after_it(
    folder: ArenaFolder, closed: bool
) -> None:
    def is_open(descriptor: int) -> bool:
        with suppress(OSError):
            os.fstat(descriptor)
            return True
        return False

    null = os.open(os.devnull, os.O_RDONLY)
    with made(folder) as arena:
        descriptor = arena._descriptor
        if closed:
            arena.close()
            os.dup2(null, descriptor)
        if not (child := os.fork()):
            as_expected = is_open(descriptor) == closed
            os.dup2(null, descriptor)
            if not (grandchild := os.fork()):
                os._exit(0 if is_open(descriptor) else 1)
            os._exit(0 if os.waitpid(grandchild, 0)[1] == 0 and as_expected else 1)
        assert os.waitpid(child, 0)[1] == 0
    os.close(null)
    if closed:
        os.close(descriptor)


def test_a_file_system_without_locks_is_not_taken_for_another_who_fills_the_arena(
    folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(folder) as arena:
        capture(arena, 1)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="No locks available"):
        folder.open(arena.name, writes=True)


def test_arenas_are_the_users_alone_and_opened_through_no_link(folder: ArenaFolder, tmp_path: Path) -> None:
    with made(folder) as arena:
        name = arena.name
    path = Path(folder.path, name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(folder.path).stat().st_mode) == 0o700
    Path(folder.path, "linked.arena").symlink_to(path)
    with pytest.raises(ArenaDamaged, match="cannot be opened"):
        folder.open("linked.arena")
    for wrong in ("../x.arena", "x", "/etc/passwd"):
        with pytest.raises(ArenaError, match="not the name of an arena"):
            folder.open(wrong)
    path.chmod(0o644)
    with pytest.raises(ArenaDamaged, match="this user's alone"):
        folder.open(name)
    path.chmod(0o600)
    Path(folder.path).chmod(0o755)
    with pytest.raises(ArenaError, match="0755"):
        folder.open(name)
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(ArenaError, match="cannot lie in"):
        ArenaFolder(tmp_path / "link").create(layout())


def test_arenas_of_another_user_are_neither_read_nor_added_to(
    folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(folder) as arena:
        name = arena.name
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for use in (lambda: folder.open(name), folder.make):
        with pytest.raises(ArenaError, match=f"user {owner}'s"):
            use()


@pytest.mark.parametrize("when", ["_fill", "link"])
def test_a_process_that_is_killed_as_it_makes_an_arena_leaves_none(
    when: str, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.make()
    if not (child := os.fork()):
        try:
            if when == "link":
                monkeypatch.setattr(os, "link", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            else:
                fill = ArenaFolder._fill

                def killed(*args: Any) -> None:
                    fill(*args)
                    os.kill(os.getpid(), signal.SIGKILL)

                monkeypatch.setattr(ArenaFolder, "_fill", killed)
            folder.create(layout())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.listdir(folder.path) == []


def test_a_file_system_whose_files_need_names_is_refused(folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ArenaError, match=r"no files without a name \(O_TMPFILE\). Give a folder in memory"):
        folder.create(layout())
    assert os.listdir(folder.path) == []


def test_an_arena_that_does_not_fit_is_refused_with_what_it_takes(folder: ArenaFolder) -> None:
    with pytest.raises(ArenaError, match=r"3 generations of 1048576\.00 GiB"):
        folder.create(layout(data_bytes=2**50))
    assert folder.found() == []


def test_a_folder_that_cannot_be_made_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"arenas cannot lie in .*/gone/arenas': No such file"):
        ArenaFolder(tmp_path / "gone" / "arenas").make()
    (tmp_path / "file").write_text("")
    with pytest.raises(ArenaError, match=r"arenas cannot lie in .*/file': Not a directory"):
        ArenaFolder(tmp_path / "file").make()


def test_a_folder_that_cannot_be_made_is_told_with_what_kept_it_from_that(
    folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ArenaError, match=r"arenas cannot lie in .*: Read-only file system"):
        folder.make()


def test_a_folder_that_is_there_already_leaves_nothing_to_the_garbage_collector(folder: ArenaFolder) -> None:
    """An error that is kept would keep its callers' frames, and memory that they have mapped."""
    folder.make()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        folder.make()
        gc.collect()
        assert [one for one in gc.garbage if isinstance(one, OSError)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_an_arena_is_not_taken_for_damaged_where_no_more_files_can_be_opened(folder: ArenaFolder) -> None:
    """Damaged ones are reclaimed."""
    with made(folder) as arena:
        capture(arena, 1)
        name = arena.name
    refused = 0
    for left in range(8):
        with files_left(left):
            found, opened = outcome(folder.found), outcome(lambda: folder.open(name).close())
        for one in (found, opened):
            if isinstance(one, Exception):
                assert isinstance(one, ArenaError) and not isinstance(one, ArenaDamaged), one
                assert "Too many open files" in str(one)
                refused += 1
        assert isinstance(found, Exception) or [(one.name, one.problem) for one in found] == [(name, None)]
    assert refused >= 4
    with folder.open(name) as arena:
        check(arena, 1)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises."""
    try:
        return call()
    except Exception as error:
        return error


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """This process can open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(one) for one in os.listdir("/proc/self/fd")) + 16, hard))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_arena_without_data_holds_documents(folder: ArenaFolder) -> None:
    with made(folder, data_bytes=0) as arena:
        filling = arena.begin()
        assert filling is not None
        filling.complete(CutId(attempt=0, step=3), digest=b"c" * 16, documents=b"only these")
        with arena.hold() as held:
            assert held is not None
            assert held.documents() == b"only these"
