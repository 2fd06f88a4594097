"""A call through fsspec ends by its deadline, whatever the filesystem's client waits for."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from lakeckpt.errors import StorageTimeout
from lakeckpt.lake.deadlines import Deadlines
from lakeckpt.lake.fsspec_storage import FsspecStorage

DEADLINES = Deadlines(total_s=0.2)


class Silent(AsyncFileSystem):  # type: ignore[misc]
    """Never answers."""

    protocol = "silent"
    cachable = False

    async def _wait(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()

    _find = _info = _cat_file = _pipe_file = _rm_file = _wait


CALLS: dict[str, Callable[[FsspecStorage], object]] = {
    "list": lambda storage: storage.list(),
    "read all": lambda storage: storage.read("x"),
    "read a range": lambda storage: storage.read("x", 3, 5),
    "delete": lambda storage: storage.delete("x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_filesystem_that_never_answers_ends_in_a_timeout(call: str) -> None:
    fsspec.register_implementation("silent", Silent, clobber=True)
    storage = FsspecStorage("silent://place/run", deadlines=DEADLINES)
    for one in (storage, pickle.loads(pickle.dumps(storage))):
        with pytest.raises(StorageTimeout, match="silent://place/run"):
            CALLS[call](one)
