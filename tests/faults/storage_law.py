"""This module holds the law of a `Storage` as tests to inherit: each storage of ours must pass it.

Give it a fixture that makes storages::

    class TestMyStorage(StorageLaw):
        @pytest.fixture
        def make_storage(self) -> Callable[[], Storage]:
            return lambda: MyStorage(...)  # each call: a new object on the same, at first empty, place

It checks what every store can show from outside: listings of the present, ranges, whole-object puts, conditional puts
of which exactly one wins, paths confined to the root. It cannot show that an object outlives a power cut: each store's
own tests do.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from lakeckpt.errors import ObjectChanged, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import ObjectInfo, Storage

__all__ = ["BAD_PATHS", "MakeStorage", "StorageLaw"]

MakeStorage = Callable[[], Storage]

_NAMES = [
    "plain",
    "a/b/c.bin",
    "a/b2/ü ñ 日本.bin",
    "with space/x y",
    "per%20cent=1/k=v",
    "a/.hidden",
    "p+&?#[x]*",
]
BAD_PATHS = ["", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", ".", "..", "a/", "a\\b", "a\0b", "x" * 5000]
"""Paths that no storage takes."""


def _paths(infos: list[ObjectInfo]) -> list[str]:
    return [info.path for info in infos]


class StorageLaw:
    """Tests for a `Storage`: inherit them and say how to make one."""

    def test_every_storage_has_the_five_methods(self, make_storage: MakeStorage) -> None:
        assert isinstance(make_storage(), Storage)

    def test_an_empty_place_lists_nothing_and_misses_everything(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        assert storage.list() == [] == storage.list("a/b")
        with pytest.raises(ObjectMissing, match="nowhere/x"):
            storage.read("nowhere/x")
        storage.delete("nowhere/x")

    def test_what_was_put_is_listed_and_read_by_another_instance(self, make_storage: MakeStorage) -> None:
        writer, reader = make_storage(), make_storage()
        for path in _NAMES:
            written = writer.put(path, [path.encode(), bytearray(b""), memoryview(b"cdef")])
            assert written == len(path.encode()) + 4
        assert [(info.path, info.size_bytes) for info in reader.list()] == [
            (n, len(n.encode()) + 4) for n in sorted(_NAMES)
        ]
        for path in _NAMES:
            assert reader.read(path) == path.encode() + b"cdef"

    def test_a_listing_is_recursive_sorted_and_cut_to_its_folder(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        for name in ("b", "a/z", "a/b/c", "ab/x", "a-b", "ü"):
            storage.put(name, [b"1"])
        assert _paths(storage.list()) == sorted(["b", "a/z", "a/b/c", "ab/x", "a-b", "ü"])
        assert _paths(storage.list("a")) == ["a/b/c", "a/z"] == _paths(storage.list("a/"))
        assert _paths(storage.list("a/b")) == ["a/b/c"]
        assert _paths(storage.list("a/b/c")) == ["a/b/c"]
        assert storage.list("a/b/c/d") == []

    def test_a_listing_is_never_of_the_past(self, make_storage: MakeStorage) -> None:
        reader, writer = make_storage(), make_storage()
        for n in range(3):
            assert _paths(reader.list("log")) == [f"log/{i}" for i in range(n)]
            writer.put(f"log/{n}", [b"x"])
        writer.delete("log/1")
        assert _paths(reader.list()) == ["log/0", "log/2"]
        writer.put("log/0", [b"longer"])
        assert [info.size_bytes for info in reader.list()] == [6, 1]

    def test_a_read_gives_the_bytes_of_its_range_that_exist(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        data = b"0123456789"
        storage.put("x", [data])
        for start, stop in (
            (0, None),
            (3, None),
            (3, 5),
            (0, 3),
            (8, 99),
            (5, 5),
            (10, None),
            (10, 12),
            (99, 100),
            (5, 2),
        ):
            assert storage.read("x", start, stop) == data[start:stop], (start, stop)

    def test_a_read_of_what_was_listed_gives_that_or_nothing(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage.put("x", [b"0123456789"])
        (listed,) = storage.list()
        assert storage.read("x", 2, 5, etag=listed.etag) == b"234"
        assert storage.read("x", etag=listed.etag) == b"0123456789"
        storage.put("x", [b"abcdefghij"])
        if listed.etag is not None:
            for start, stop in ((0, None), (2, 5), (0, 10)):
                with pytest.raises(ObjectChanged, match="x"):
                    storage.read("x", start, stop, etag=listed.etag)
        (listed,) = storage.list()
        assert storage.read("x", 2, 5, etag=listed.etag) == b"cde"

    def test_ranges_of_a_missing_object_are_missing(self, make_storage: MakeStorage) -> None:
        with pytest.raises(ObjectMissing):
            make_storage().read("x", 3, 5)

    def test_negative_bounds_are_refused(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage.put("x", [b"0123456789"])
        for start, stop in ((-1, None), (0, -1)):
            with pytest.raises(StorageError, match="must not be negative"):
                storage.read("x", start, stop)

    def test_empty_objects_are_objects(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        written = storage.put("empty", [])
        assert written == 0
        storage.put_new("new", b"")
        assert [(info.path, info.size_bytes) for info in storage.list()] == [("empty", 0), ("new", 0)]
        assert storage.read("empty") == storage.read("new") == storage.read("new", 0, 4) == b""

    def test_a_put_replaces_the_whole_object(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage.put("x", [b"a much longer one"])
        storage.put("x", [b"short"])
        assert storage.read("x") == b"short"

    def test_a_large_object_comes_back(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        written = storage.put("large", [bytes([n]) * (9 << 20) for n in range(5)])  # past the size of a single put
        assert written == 45 << 20
        for n in range(5):
            assert storage.read("large", n * (9 << 20), n * (9 << 20) + 2) == bytes([n, n])
        assert storage.list()[0].size_bytes == 45 << 20

    def test_nothing_is_visible_before_a_put_returns(self, make_storage: MakeStorage) -> None:
        storage, seen = make_storage(), []

        class Looking(list[bytes]):
            def __iter__(self) -> Iterator[bytes]:
                for chunk in super().__iter__():
                    yield chunk
                    seen.append([storage.read(info.path) for info in storage.list()])

        storage.put("x", Looking([b"new"] * 3))
        assert seen and all(found == [] for found in seen)
        seen.clear()
        storage.put("x", Looking([b"newer"] * 3))
        assert seen and all(found == [b"new" * 3] for found in seen)

    def test_a_conditional_put_leaves_what_is_there(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage.put_new("log/0", b"first")
        with pytest.raises(ObjectExists, match="log/0"):
            make_storage().put_new("log/0", b"second")
        storage.put("log/1", [b"by put"])
        with pytest.raises(ObjectExists):
            storage.put_new("log/1", b"second")
        assert storage.read("log/0") == b"first"
        assert _paths(storage.list()) == ["log/0", "log/1"]

    def test_a_conditional_put_of_what_is_there_already_is_the_same_put_heard_twice(
        self, make_storage: MakeStorage
    ) -> None:
        storage = make_storage()
        storage.put_new("log/0", b"mine")
        storage.put_new("log/0", b"mine")
        assert storage.read("log/0") == b"mine"
        for other in (b"min", b"mine!", b""):
            with pytest.raises(ObjectExists):
                storage.put_new("log/0", other)

    def test_exactly_one_of_racing_conditional_puts_wins(self, make_storage: MakeStorage) -> None:
        racers, rounds = 4, 5
        winners: dict[int, list[int]] = {n: [] for n in range(rounds)}
        barrier = threading.Barrier(racers)

        def race(me: int) -> None:
            storage = make_storage()
            for n in range(rounds):
                barrier.wait()
                try:
                    storage.put_new(f"log/{n}", b"writer %d" % me)
                except ObjectExists:
                    continue
                winners[n].append(me)

        threads = [threading.Thread(target=race, args=(me,)) for me in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        storage = make_storage()
        for n in range(rounds):
            assert len(winners[n]) == 1
            assert storage.read(f"log/{n}") == b"writer %d" % winners[n][0]
        assert _paths(storage.list()) == [f"log/{n}" for n in range(rounds)]

    def test_deleting_removes_one_object_and_no_other(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        for name in ("a/b/x", "a/b/y", "a/c"):
            storage.put(name, [b"1"])
        storage.delete("a/b/x")
        storage.delete("a/b/x")
        storage.delete("a/b")  # a folder is no object
        assert _paths(storage.list()) == ["a/b/y", "a/c"]
        storage.delete("a/b/y")
        storage.put("a/b/z", [b"1"])
        assert _paths(storage.list()) == ["a/b/z", "a/c"]

    def test_no_path_leads_out_of_the_root(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage.put("inside", [b"1"])
        for path in [*BAD_PATHS, "\udcff"]:
            calls: list[Callable[[str], object]] = [
                storage.read,
                storage.delete,
                partial(storage.put, chunks=[b"2"]),
                partial(storage.put_new, data=b"2"),
            ]
            if path not in ("", "a/"):  # folders that a listing may name
                calls.append(storage.list)
            for call in calls:
                with pytest.raises(StorageError, match="storage p"):
                    call(path)
        assert _paths(storage.list()) == ["inside"]

    def test_an_instance_can_be_pickled(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage = getattr(storage, "inner", storage)  # the counter of faults belongs to one process
        storage.put("x", [b"1"])
        assert pickle.loads(pickle.dumps(storage)).read("x") == b"1"
