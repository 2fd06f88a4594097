"""A put into a local folder is durable when it returns, and there wholly or not at all whenever the process dies."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lakeckpt.errors import ConditionalPutUnsupported, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import clear_leftovers
from lakeckpt.lake.storage.local import LocalStorage
from tests.lake.traced import Crash, TracedOs, assert_durable, storage_over, summary

Put = Callable[[LocalStorage, str, bytes], object]


def by_put(storage: LocalStorage, path: str, data: bytes) -> object:
    return storage.put(path, [data[:2], data[2:]])


def by_put_new(storage: LocalStorage, path: str, data: bytes) -> object:
    return storage.put_new(path, data)


BOTH = pytest.mark.parametrize("put", [by_put, by_put_new])


def temporaries(root: Path) -> list[str]:
    return [name for _, _, names in os.walk(root) for name in names if name.startswith(".lakeckpt-")]


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def test_put_writes_syncs_renames_and_syncs_the_folder_in_this_order(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    calls = TracedOs()
    storage_over(root, calls).put("log/0", [b"ab", b"cd"])
    assert summary(calls.events, str(root)) == [
        "fsync .",  # perhaps the root is new, by another process
        "mkdir run/log",
        "fsync run",
        "create run/log/.lakeckpt-t1.tmp",
        "write run/log/.lakeckpt-t1.tmp",
        "fsync run/log/.lakeckpt-t1.tmp",
        "rename run/log/.lakeckpt-t1.tmp run/log/0",
        "fsync run/log",
    ]
    assert calls.left_open == []


def test_a_conditional_put_writes_syncs_links_and_syncs_the_folder_in_this_order(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    calls = TracedOs()
    storage_over(root, calls).put_new("0", b"ab")
    assert summary(calls.events, str(root)) == [
        "fsync .",
        "create run/.lakeckpt-t1.tmp",
        "write run/.lakeckpt-t1.tmp",
        "fsync run/.lakeckpt-t1.tmp",
        "link run/.lakeckpt-t1.tmp run/0",
        "unlink run/.lakeckpt-t1.tmp",
        "fsync run",
    ]


@BOTH
def test_every_new_folder_is_synced_into_its_parent_also_above_the_root(tmp_path: Path, put: Put) -> None:
    root = tmp_path / "not" / "yet" / "run"
    calls = TracedOs()
    put(storage_over(root, calls), "a/b/c", b"1234")
    assert_durable(calls.events, f"{root}/a/b/c", str(root))
    assert [e[1] for e in calls.of("mkdir")] == [
        str(tmp_path / "not"),
        str(tmp_path / "not/yet"),
        str(root),
        f"{root}/a",
        f"{root}/a/b",
    ]


@BOTH
def test_a_folder_that_another_process_made_is_synced_once_before_we_rely_on_it(tmp_path: Path, put: Put) -> None:
    (tmp_path / "a").mkdir()
    calls = TracedOs()
    storage = storage_over(tmp_path, calls)
    put(storage, "a/1", b"1")
    assert ("fsync", str(tmp_path)) in calls.events
    calls.events.clear()
    put(storage, "a/2", b"2")
    assert ("fsync", str(tmp_path)) not in calls.events


@BOTH
def test_a_folder_that_was_removed_meanwhile_is_made_and_synced_again(tmp_path: Path, put: Put) -> None:
    calls = TracedOs()
    storage = storage_over(tmp_path / "run", calls)
    put(storage, "a/b/1", b"1")
    LocalStorage(tmp_path / "run").delete("a/b/1")
    assert list((tmp_path / "run").iterdir()) == []
    calls.events.clear()
    put(storage, "a/b/1", b"1")
    assert_durable(calls.events, f"{tmp_path}/run/a/b/1", str(tmp_path / "run"))


@BOTH
def test_short_writes_are_continued(tmp_path: Path, put: Put) -> None:
    storage = storage_over(tmp_path, TracedOs(short_writes=True))
    put(storage, "x", b"0123456789")
    assert storage.read("x") == b"0123456789"


@BOTH
def test_after_a_failed_fsync_the_next_put_writes_a_new_file_and_the_old_one_goes(tmp_path: Path, put: Put) -> None:
    calls = TracedOs(fail={("fsync", 2): io_error()})  # the first is of the root's parent
    root = tmp_path / "run"
    root.mkdir()
    storage = storage_over(root, calls)
    with pytest.raises(StorageError, match=r"cannot write 'x' in .*: Input/output error") as caught:
        put(storage, "x", b"abcd")
    assert caught.value.errno == errno.EIO
    assert storage.list() == [] and temporaries(root) == []
    put(storage, "x", b"abcd")
    failed, synced = calls.of("failed fsync"), calls.of("fsync")
    assert failed == [("failed fsync", f"{root}/.lakeckpt-t1.tmp")]
    assert ("fsync", f"{root}/.lakeckpt-t1.tmp") not in synced
    assert_durable([e for e in calls.events if "t1" not in e[1]], f"{root}/x", str(root))
    assert storage.read("x") == b"abcd"
    assert temporaries(root) == [] == calls.left_open


@BOTH
def test_after_a_failed_fsync_of_the_folder_the_next_put_writes_the_object_anew(tmp_path: Path, put: Put) -> None:
    calls = TracedOs(fail={("fsync", 3): io_error()})
    storage = storage_over(tmp_path, calls)
    with pytest.raises(StorageError, match="Input/output error"):
        put(storage, "x", b"abcd")
    assert calls.of("failed fsync") == [("failed fsync", str(tmp_path))]
    calls.events.clear()
    put(storage, "x", b"abcd")
    assert_durable(calls.events, f"{tmp_path}/x", str(tmp_path))
    assert [call for call, *_ in calls.of("rename", "link")] == ["rename"]
    assert storage.read("x") == b"abcd"
    assert temporaries(tmp_path) == []


@BOTH
def test_a_new_folder_whose_entry_cannot_be_synced_is_made_anew_by_the_next_put(tmp_path: Path, put: Put) -> None:
    calls = TracedOs(fail={("fsync", 2): io_error()})
    storage = storage_over(tmp_path, calls)
    with pytest.raises(StorageError, match="Input/output error"):
        put(storage, "a/x", b"abcd")
    assert not (tmp_path / "a").exists()
    calls.events.clear()
    put(storage, "a/x", b"abcd")
    assert_durable(calls.events, f"{tmp_path}/a/x", str(tmp_path))
    assert ("mkdir", f"{tmp_path}/a") in calls.events


@BOTH
def test_a_folder_of_another_process_that_cannot_be_synced_is_an_error(tmp_path: Path, put: Put) -> None:
    (tmp_path / "a").mkdir()
    calls = TracedOs(fail={("fsync", 2): io_error()})
    storage = storage_over(tmp_path, calls)
    with pytest.raises(StorageError, match="Input/output error"):
        put(storage, "a/x", b"abcd")
    assert calls.of("mkdir", "rmdir", "create") == []
    assert calls.left_open == []


@BOTH
def test_a_folder_that_we_removed_and_another_process_made_is_synced_again(tmp_path: Path, put: Put) -> None:
    calls = TracedOs()
    storage = storage_over(tmp_path, calls)
    put(storage, "a/x", b"1")
    storage.delete("a/x")
    (tmp_path / "a").mkdir()
    calls.events.clear()
    put(storage, "a/x", b"1")
    assert ("fsync", str(tmp_path)) in calls.events


@BOTH
def test_a_disk_that_never_syncs_ends_in_an_error_and_leaves_nothing(tmp_path: Path, put: Put) -> None:
    calls = TracedOs(fail={("fsync", n): io_error() for n in range(2, 100)})
    storage = storage_over(tmp_path, calls)
    for _ in range(3):
        with pytest.raises(StorageError, match=r"cannot write 'x' in .*: Input/output error"):
            put(storage, "x", b"abcd")
    assert len({event[1] for event in calls.of("create")}) == 3
    assert storage.list() == []
    assert temporaries(tmp_path) == [] == calls.left_open


@BOTH
@pytest.mark.parametrize("call", ["create", "write", "rename", "link", "mkdir"])
def test_a_full_disk_leaves_nothing_visible(tmp_path: Path, put: Put, call: str) -> None:
    if call == ("link" if put is by_put else "rename"):
        call = "write"
    calls = TracedOs(fail={(call, 0): OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))})
    storage = storage_over(tmp_path, calls)
    with pytest.raises(StorageError, match=r"cannot write 'a/x' in .*: No space left on device\. Make room") as caught:
        put(storage, "a/x", b"abcd")
    assert caught.value.errno == errno.ENOSPC
    assert storage.list() == []
    assert temporaries(tmp_path) == [] == calls.left_open


@pytest.mark.parametrize(("put", "replaces"), [(by_put, False), (by_put, True), (by_put_new, False)])
def test_a_crash_between_any_two_calls_leaves_nothing_or_the_whole_object(
    tmp_path: Path, put: Put, replaces: bool
) -> None:
    seen, n = set(), 0
    while True:
        n += 1
        root = tmp_path / str(n)
        before = {}
        if replaces:
            LocalStorage(root).put("a/b/x", [b"old"])
            before = {"a/b/x": b"old"}
        calls = TracedOs(crash_at=n)
        try:
            put(storage_over(root, calls), "a/b/x", b"abcd")
            break
        except Crash:
            pass
        survivor = LocalStorage(root)
        found = {info.path: survivor.read(info.path) for info in survivor.list()}
        assert found in (before, {"a/b/x": b"abcd"})
        seen.add(found.get("a/b/x"))
        clear_leftovers(survivor)
        assert temporaries(root) == []
        put(survivor, "a/b/x", b"abcd")  # and the next attempt succeeds
        assert survivor.read("a/b/x") == b"abcd"
    assert n > 8
    assert seen == {before.get("a/b/x"), b"abcd"}


def test_a_link_whose_answer_was_lost_has_succeeded(tmp_path: Path) -> None:
    class LostLink(TracedOs):
        def link(self, old: str, new: str) -> None:
            super().link(old, new)
            raise FileExistsError(errno.EEXIST, "as NFS says when it repeats a request that was done")

    storage = storage_over(tmp_path, LostLink())
    storage.put_new("x", b"mine")
    assert storage.read("x") == b"mine"
    assert temporaries(tmp_path) == []


def test_an_object_that_appears_just_before_the_link_wins(tmp_path: Path) -> None:
    class Racing(TracedOs):
        def before(self, call: str, path: str) -> None:
            if call == "link":
                Path(path).write_bytes(b"theirs")

    storage = storage_over(tmp_path, Racing())
    with pytest.raises(ObjectExists):
        storage.put_new("x", b"mine")
    assert storage.read("x") == b"theirs"
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_is_refused_for_commits(tmp_path: Path, number: int) -> None:
    storage = storage_over(tmp_path, TracedOs(fail={("link", 0): OSError(number, os.strerror(number))}))
    with pytest.raises(ConditionalPutUnsupported, match="without hard links"):
        storage.put_new("x", b"1")
    assert storage.list() == []
    assert temporaries(tmp_path) == []


@BOTH
def test_a_folder_that_vanishes_while_we_enter_it_is_made_again(tmp_path: Path, put: Put) -> None:
    class Sweeping(TracedOs):
        left = 2

        def before(self, call: str, path: str) -> None:
            if call == "create" and self.left:
                self.left -= 1
                os.rmdir(tmp_path / "a")  # someone deleted the last object in it

    storage = storage_over(tmp_path, Sweeping())
    put(storage, "a/x", b"abcd")
    assert storage.read("a/x") == b"abcd"


@BOTH
def test_files_are_for_their_owner_only(tmp_path: Path, put: Put) -> None:
    before = os.umask(0)
    try:
        put(LocalStorage(tmp_path), "x", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_deleting_the_last_object_of_folders_removes_them_but_never_the_root(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.put("a/b/x", [b"1"])
    storage.put("a/c", [b"1"])
    storage.delete("a/b/x")
    assert sorted(os.listdir(tmp_path / "run/a")) == ["c"]
    storage.delete("a/c")
    assert os.listdir(tmp_path / "run") == []


def test_leftovers_of_the_dead_are_cleared_and_those_of_the_living_are_kept(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from lakeckpt.lake.storage.local import LocalStorage\n"
        "def chunks():\n"
        "    yield b'x' * 100\n"
        "    print('writing', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    yield b'y'\n"
        "LocalStorage(sys.argv[1]).put('a/b/x', chunks())\n"
    )
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": source}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        storage = LocalStorage(tmp_path)
        assert len(temporaries(tmp_path)) == 1
        assert storage.list() == []
        assert clear_leftovers(storage) == 0
        writer.kill()
        writer.wait()
        assert len(temporaries(tmp_path)) == 1
        assert clear_leftovers(storage) == 1
    assert temporaries(tmp_path) == []


def test_clearing_leftovers_touches_nothing_else(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    assert clear_leftovers(storage) == 0
    storage.put(".hidden.tmp", [b"1"])
    storage.put("a/x.tmp", [b"1"])
    assert clear_leftovers(storage) == 0
    assert [info.path for info in storage.list()] == [".hidden.tmp", "a/x.tmp"]


def test_a_root_that_is_a_file_or_forbidden_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    storage = LocalStorage(tmp_path / "file")
    for call in (storage.list, lambda: storage.put("x", [b"1"])):
        with pytest.raises(StorageError, match="Not a directory"):
            call()
    with pytest.raises(ObjectMissing):
        storage.read("x")


def test_a_file_where_a_path_has_a_folder_is_missing_to_readers_and_an_error_to_writers(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", [b"1"])
    assert storage.list("a/b") == []
    with pytest.raises(FileNotFoundError):
        storage.read("a/b")
    with pytest.raises(StorageError, match="Not a directory"):
        storage.put("a/b", [b"1"])


def test_pickling_keeps_the_root_and_nothing_else(tmp_path: Path) -> None:
    storage = pickle.loads(pickle.dumps(LocalStorage(tmp_path, follow_file_links=True)))
    assert storage.name == str(tmp_path)
