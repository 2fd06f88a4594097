"""What every `Storage` keeps, whichever store is below."""

from __future__ import annotations

import pytest

from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import check_key, delete_all, describe
from lakeckpt.lake.storage.open import open_storage
from tests.faults.storage_law import MakeStorage, StorageLaw


class TestStorageLaw(StorageLaw):
    """Every kind of store that the fixture ``make_storage`` of this folder makes."""

    def test_many_are_deleted(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        for n in range(5):
            storage.put(f"log/{n}", [b"1"])
        delete_all(storage, ["log/0", "log/3", "never/there"])
        assert [info.path for info in storage.list()] == ["log/1", "log/2", "log/4"]


def test_check_key_takes_only_str() -> None:
    with pytest.raises(StorageError, match="must be a str, not bytes"):
        check_key(b"x")  # type: ignore[arg-type]


def test_a_file_url_is_a_local_folder(tmp_path: object) -> None:
    storage = open_storage(f"file://{tmp_path}/with%20space")
    storage.put("x", [b"1"])
    assert describe(storage) == f"{tmp_path}/with space"
    assert open_storage(f"{tmp_path}/with space").read("x") == b"1"
