"""A wait for a key blocks in the store, looks at other things meanwhile, and leaves no thread and no warning behind."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lakeckpt.tracking.key_waits import KeyWaits
from tests.patience import PATIENCE_S


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "lakeckpt-store"]


@pytest.fixture(params=["tcp", "hash"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))


def test_a_value_wakes_the_wait_and_other_keys_can_be_read_meanwhile(store: dist.Store) -> None:
    waits = KeyWaits(store)
    for number in range(2):
        with waits.on(f"key {number}", PATIENCE_S) as comes:
            assert not comes(0.0) and threads() == ["lakeckpt-store"]
            store.set("another", "1")
            assert store.get("another") == b"1"
            store.set(f"key {number}", "1")
            assert comes(PATIENCE_S)
        assert threads() == []


def test_a_wait_that_ends_without_its_key_leaves_no_thread_and_says_nothing(
    store: dist.Store, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = KeyWaits(store)
    with contextlib.suppress(KeyError), waits.on("key", PATIENCE_S) as comes:
        assert not comes(0.0)
        raise KeyError
    assert threads() == [] and store.check(["key"])
    with waits.on("another", PATIENCE_S) as comes:
        assert not comes(0.0)
    assert threads() == [] and capfd.readouterr().err == ""


def test_a_wait_ends_with_its_store(capfd: pytest.CaptureFixture[str]) -> None:
    patience = timedelta(seconds=PATIENCE_S)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    waits = KeyWaits(dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=patience))
    with waits.on("key", PATIENCE_S) as comes:
        assert not comes(0.0)
        del host
    assert threads() == []


class Late:
    """A store whose waits begin when the rank that waits has found the value by itself."""

    def __init__(self) -> None:
        self.store, self.may = dist.HashStore(), threading.Event()

    def clone(self) -> Late:
        return self

    def check(self, keys: list[str]) -> bool:
        self.may.set()
        return self.store.check(keys)

    def set(self, key: str, value: str) -> None:
        self.may.set()
        self.store.set(key, value)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.may.wait()
        self.store.wait(keys, limit)


def test_a_value_that_the_rank_finds_before_its_thread_stays_as_it_is() -> None:
    late = Late()
    with KeyWaits(late).on("welcome", PATIENCE_S):
        late.store.set("welcome", "the name")
    assert late.store.get("welcome") == b"the name" and threads() == []
