"""A storage that fails on purpose does exactly what its faults say, to exactly the calls that they name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lakeckpt.errors import ConfigError, StorageError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing.faulty_storage import FaultyStorage, Killed, StoreFault

Call = Callable[[Storage], object]
CALLS: dict[str, Call] = {
    "list": lambda storage: storage.list("a"),
    "read": lambda storage: storage.read("a/x"),
    "put": lambda storage: storage.put("a/y", [b"01", b"2345"]),
    "put_new": lambda storage: storage.put_new("a/y", b"012345"),
    "delete": lambda storage: storage.delete("a/x"),
}


def contents(storage: Storage) -> dict[str, bytes]:
    return {info.path: storage.read(info.path) for info in storage.list()}


@pytest.fixture
def inner(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path)
    storage.put("a/x", [b"ab"])
    return storage


def done(method: str) -> dict[str, bytes]:
    return {"put": {"a/x": b"ab", "a/y": b"012345"}, "put_new": {"a/x": b"ab", "a/y": b"012345"}, "delete": {}}.get(
        method, {"a/x": b"ab"}
    )


@pytest.mark.parametrize("method", CALLS)
def test_calls_that_are_not_named_go_through(inner: LocalStorage, method: str) -> None:
    storage = FaultyStorage(inner, fail_at={(method, 2): StoreFault.ERROR})
    CALLS[method](storage)
    assert contents(inner) == done(method)
    assert storage.calls == [(method, {"list": "a", "read": "a/x", "delete": "a/x"}.get(method, "a/y"))]
    with pytest.raises(StorageError, match="injected"):
        CALLS[method](storage)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("any_method", [False, True])
def test_an_error_comes_before_and_a_lost_answer_after_the_call_is_done(
    inner: LocalStorage, method: str, any_method: bool
) -> None:
    before = contents(inner)
    address = ("*" if any_method else method, 1)
    with pytest.raises(StorageError, match=f"injected: {method} .* failed before it was done"):
        CALLS[method](FaultyStorage(inner, fail_at={address: StoreFault.ERROR}))
    assert contents(inner) == before
    storage = FaultyStorage(inner, fail_at={address: StoreFault.LOST_ANSWER})
    with pytest.raises(StorageError, match=f"injected: {method} .* was done, but the answer was lost"):
        CALLS[method](storage)
    assert contents(inner) == done(method)


@pytest.mark.parametrize("method", CALLS)
def test_a_kill_is_for_ever_and_no_ordinary_handler_catches_it(inner: LocalStorage, method: str) -> None:
    assert not issubclass(Killed, Exception)
    before = contents(inner)
    for fault, expected in ((StoreFault.KILL, before), (StoreFault.KILL_AFTER, done(method))):
        storage = FaultyStorage(inner, fail_at={(method, 1): fault})
        with pytest.raises(Killed, match=f"killed at {method}"):
            CALLS[method](storage)
        assert contents(inner) == expected
        for call in CALLS.values():
            with pytest.raises(Killed, match="after the process was killed"):
                call(storage)
        assert contents(inner) == expected
        assert storage.dead
        assert len(storage.calls) == 1


def test_a_torn_put_leaves_its_first_half(inner: LocalStorage) -> None:
    for fault, error in ((StoreFault.TORN, StorageError), (StoreFault.KILL_TORN, Killed)):
        with pytest.raises(error):
            FaultyStorage(inner, fail_at={("put", 1): fault}).put("y", [b"01", b"2345"])
        assert inner.read("y") == b"012"
    inner.delete("y")
    assert FaultyStorage(inner, fail_at={("put", 1): StoreFault.SILENT_TEAR}).put("y", [b"01", b"2345"]) == 6
    assert inner.read("y") == b"012"


def test_a_flipped_read_differs_in_one_bit(inner: LocalStorage) -> None:
    storage = FaultyStorage(inner, fail_at={("read", 1): StoreFault.FLIPPED})
    assert storage.read("a/x") == b"ac"
    assert storage.read("a/x") == b"ab"


def test_interleavings_are_forced_by_what_runs_before_a_call(inner: LocalStorage) -> None:
    def note(method: str, path: str) -> None:
        inner.put("seen", [f"{method} {path}".encode()])

    storage = FaultyStorage(inner, before=note)
    assert [info.path for info in storage.list()] == ["a/x", "seen"]
    assert inner.read("seen") == b"list "
    assert describe(storage) == inner.name


def test_faults_that_cannot_happen_are_refused(inner: LocalStorage) -> None:
    for fail_at in ({("pat", 1): StoreFault.ERROR}, {("put", 0): StoreFault.ERROR}, {("put", 1): "error"}):
        with pytest.raises(ConfigError, match="a fault is addressed by"):
            FaultyStorage(inner, fail_at=fail_at)  # type: ignore[arg-type]
    for method, fault in (("read", StoreFault.TORN), ("put_new", StoreFault.KILL_TORN), ("put", StoreFault.FLIPPED)):
        with pytest.raises(ConfigError, match="can only happen to"):
            FaultyStorage(inner, fail_at={(method, 1): fault})
    with pytest.raises(ConfigError, match="cannot happen"):
        FaultyStorage(inner, fail_at={("*", 1): StoreFault.TORN}).list()
