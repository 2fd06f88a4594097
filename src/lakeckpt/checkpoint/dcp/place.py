"""In which folder does a writer or a reader of DCP work?  The one that it was made with, or DCP's ``checkpoint_id``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage import Storage, open_storage

__all__ = ["Place", "can_be_opened"]


class Place:
    """A folder, local or in a store, which may be named later. Opens nothing but it."""

    __slots__ = ("_options", "_storage", "_whose")

    def __init__(self, whose: str, uri: str | os.PathLike[str] | None, options: Mapping[str, Any] | None) -> None:
        self._whose, self._options = whose, options
        self._storage: Storage | None = None
        self.move(uri)

    def move(self, uri: str | os.PathLike[str] | None) -> None:
        """Go to ``uri``; None: stay."""
        if uri is not None:
            self._storage = open_storage(uri, storage_options=self._options)

    def get(self) -> Storage:
        """The folder. `ConfigError` where none was named."""
        if self._storage is None:
            raise ConfigError(f"{self._whose} needs a place: give it a uri, or DCP a checkpoint_id")
        return self._storage


def can_be_opened(uri: str | os.PathLike[str]) -> bool:
    """Whether ``uri`` names a place that can be opened."""
    try:
        open_storage(uri)
    except ConfigError:
        return False
    return True
