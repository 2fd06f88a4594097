"""A store that fails is asked again for the same, ever less often, as long as it makes sense."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from lakeckpt.checkpoint.agent.retrying import RetryingStorage
from lakeckpt.errors import ConditionalPutUnsupported, ObjectChanged, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import Storage, delete_all, describe

CALLS: dict[str, Callable[[Storage], Any]] = {
    "list": lambda storage: storage.list("folder"),
    "read": lambda storage: storage.read("path", 3, 9, etag="e"),
    "put": lambda storage: storage.put("path", iter([b"a", b"b"])),
    "put_new": lambda storage: storage.put_new("path", b"data"),
    "delete": lambda storage: storage.delete("path"),
    "delete_all": lambda storage: delete_all(storage, ["path", "other"]),
}


class Store:
    """Raises ``errors``, one at each call, and then answers; ``asked``: for what."""

    name = "the store below"

    def __init__(self, *errors: StorageError) -> None:
        self.errors, self.asked = list(errors), list[Any]()

    def _ask(self, *what: Any) -> Any:
        self.asked.append(what)
        if self.errors:
            raise self.errors.pop(0)
        return what

    def list(self, prefix: str = "") -> Any:
        return self._ask("list", prefix)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> Any:
        return self._ask("read", path, start, stop, etag)

    def put(self, path: str, chunks: Any) -> Any:
        return self._ask("put", path, b"".join(chunks))

    def put_new(self, path: str, data: bytes) -> Any:
        return self._ask("put_new", path, data)

    def delete(self, path: str) -> Any:
        return self._ask("delete", path)

    def delete_all(self, paths: Any) -> Any:
        return self._ask("delete_all", *paths)


class Clock:
    def __init__(self) -> None:
        self.pauses: list[float] = []

    def now(self) -> float:
        return sum(self.pauses)

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.mark.parametrize("call", CALLS)
def test_what_failed_is_asked_for_again_as_it_was_at_first(call: str) -> None:
    errors = [StorageError(f"failure {n}") for n in range(11)]
    store, expected, clock = Store(*errors), Store(), Clock()
    told: list[StorageError] = []
    times_s: list[float] = []

    def failing(error: StorageError) -> None:
        told.append(error)
        times_s.append(clock.now())

    retrying = RetryingStorage(store, waiter=clock, is_hopeless=lambda: False, failing=failing)
    assert CALLS[call](retrying) in (CALLS[call](expected), None)
    assert store.asked == expected.asked * 12
    assert told == errors
    pauses_s = [after - before for before, after in pairwise([*times_s, clock.now()])]
    assert pauses_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])
    assert describe(retrying) == "the store below"


@pytest.mark.parametrize("error", [ObjectExists, ObjectMissing, ObjectChanged, ConditionalPutUnsupported])
def test_what_says_something_of_the_object_goes_through_at_once(error: type[StorageError]) -> None:
    store, clock = Store(error("no")), Clock()
    with pytest.raises(error):
        CALLS["read"](RetryingStorage(store, waiter=clock, is_hopeless=lambda: False))
    assert len(store.asked) == 1 and clock.pauses == []


def test_what_is_not_worth_it_any_more_is_not_tried_again() -> None:
    store, clock = Store(*(StorageError(f"failure {n}") for n in range(9))), Clock()
    retrying = RetryingStorage(store, waiter=clock, is_hopeless=lambda: clock.now() > 0.5)
    with pytest.raises(StorageError, match="failure 3"):
        CALLS["list"](retrying)


def test_a_long_pause_ends_when_it_is_not_worth_it_any_more() -> None:
    store, clock = Store(*(StorageError(f"failure {n}") for n in range(99))), Clock()
    with pytest.raises(StorageError, match="failure 11"):
        CALLS["list"](RetryingStorage(store, waiter=clock, is_hopeless=lambda: clock.now() > 90))
    assert clock.now() < 92


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_store_that_is_full_or_refuses_this_user_is_not_tried_again(code: int) -> None:
    store, clock = Store(StorageError(code, "no")), Clock()
    with pytest.raises(StorageError, match="no"):
        CALLS["put"](RetryingStorage(store, waiter=clock, is_hopeless=lambda: False))
    assert len(store.asked) == 1 and clock.pauses == []
