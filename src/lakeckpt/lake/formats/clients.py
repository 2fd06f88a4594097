"""This module passes the options of a store to the clients of table formats, and explains the clients' failures.

deltalake and hudi open a table's metadata by themselves. They build on Rust's object_store, as obstore does. So they
get the options by its names, and bounds on how long they may try. Options of stores other than S3 are passed as they
are. The module never shows a value of an option, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lakeckpt.errors import ConfigError, StorageError, TableError, one_line
from lakeckpt.lake.storage.base import split_uri
from lakeckpt.lake.storage.open import FILESYSTEM
from lakeckpt.lake.storage.store_options import StoreOptions

__all__ = ["asking", "is_of_the_store", "object_store_options"]

_BOUNDS = {"timeout": "60s", "connect_timeout": "10s", "max_retries": "4", "retry_timeout": "120s"}


def object_store_options(uri: str, storage_options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the options of object_store for the store of ``uri``; {} for local files. They hold credentials."""
    scheme, _ = split_uri(uri)
    if FILESYSTEM in (storage_options or {}):
        raise ConfigError("deltalake and hudi open tables by themselves, not by a filesystem: pass storage_options=")
    if scheme == "file":
        return {}
    if scheme not in ("s3", "s3a"):
        return _BOUNDS | {name: value for name, value in (storage_options or {}).items() if isinstance(value, str)}
    options = StoreOptions.of(storage_options)
    keys = {name: value for name, value in options.keys().items() if name != "expires_at"}
    config = {f"aws_{name}": value for name, value in {**options.config, **keys}.items()}
    return _BOUNDS | {
        name: _as_text(value) for name, value in {**config, **options.client}.items() if value is not None
    }


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def asking(explained: Callable[[BaseException, str], Exception]) -> Iterator[None]:
    """Turn what a client raises into ``explained(error, its text in one line)``; our own errors go through."""
    try:
        yield
    except (TableError, ConfigError, StorageError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt; panics of Rust are no `Exception` either
        failure = explained(error, one_line(error, 500))
    else:
        return
    raise failure from None


def is_of_the_store(error: BaseException, text: str) -> bool:
    """Return whether the store failed, and not the table in it."""
    return isinstance(error, OSError) or "Generic S3 error" in text or "error sending request" in text
