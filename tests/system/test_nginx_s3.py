"""The law of storages over S3 as another server speaks it: nginx, which answers the reads, in front of a folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from benchmarks.s3_server import NginxS3
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage
from tests.faults.storage_law import StorageLaw

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server() -> Iterator[NginxS3]:
    with NginxS3() as running:
        yield running


class TestNginxS3(StorageLaw):
    @pytest.fixture
    def make_storage(self, server: NginxS3) -> Callable[[], Storage]:
        uri = f"s3://bucket/{uuid.uuid4().hex}/ru n-ü"
        return lambda: open_storage(uri, storage_options=server.options())

    def test_empty_objects_are_objects(self, make_storage: Callable[[], Storage]) -> None:
        storage = make_storage()
        storage.put("empty", [])
        assert [(info.path, info.size_bytes) for info in storage.list()] == [("empty", 0)]
        with pytest.raises(StorageError, match="non-partial"):  # nginx answers with 200, whatever the range
            storage.read("empty")
