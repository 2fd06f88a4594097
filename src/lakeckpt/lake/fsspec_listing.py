"""What lies below a place of an fsspec filesystem, and what does an entry of its listing say of an object?

`entries_below` walks the folders itself where the filesystem has no listing of its own for all of them: fsspec's
``find`` leaves out what it fails to list. `info_of` makes an `ObjectInfo` of an entry, whatever names the client has
for its times and ETag. Talks to the filesystem through ``call`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from lakeckpt.lake.folders import is_temporary
from lakeckpt.lake.storage import ObjectInfo

__all__ = ["entries_below", "etag_of", "info_of"]

Entry = Mapping[str, Any]
"""What a client says of a file or a folder."""


def entries_below(filesystem: Any, place: str, *, call: Callable[..., Any], scheme: str) -> Mapping[str, Entry]:
    """The files below ``place``, by name; ``call(method, …)`` calls a method of the filesystem.

    `FileNotFoundError` where nothing is there; what else the filesystem raises.
    """
    kind = type(filesystem)
    if isinstance(filesystem, AsyncFileSystem):
        is_own = kind._find is AsyncFileSystem._find
    else:
        is_own = kind.find is AbstractFileSystem.find
    if not is_own:
        told: Mapping[str, Entry] = call("find", place, detail=True)
        return told
    found, folders, seen = {}, [place.rstrip("/")], set[str]()
    while folders:
        folder = folders.pop()
        seen.add(folder)
        try:
            entries = call("ls", folder or "/", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if len(seen) == 1:
                break  # it may be a file
            continue  # since it was listed
        for entry in entries:
            name = entry["name"].rstrip("/")
            if scheme in ("http", "https") and ("?" in name or "#" in name):
                continue  # links of an index by which it is sorted
            if entry.get("type") != "directory":
                found[entry["name"]] = entry
            elif name not in seen and name.startswith(f"{folder}/"):
                folders.append(name)
    if not found and (told := call("info", place)).get("type") == "file":
        found[told["name"]] = told
    return found


def info_of(entry: Entry, path: str) -> ObjectInfo | None:
    """What an entry says of the object at ``path``; None for folders, their placeholders and unfinished objects."""
    if entry.get("type", "file") != "file" or not path or path.endswith("/") or is_temporary(path):
        return None
    times = (entry.get(key) for key in ("LastModified", "last_modified", "mtime", "updated", "created"))
    time = next((value for value in times if value is not None), None)
    return ObjectInfo(path=path, size_bytes=int(entry["size"]), etag=etag_of(entry), mtime_ns=_nanoseconds(time))


def etag_of(entry: Entry) -> str | None:
    """The ETag that an entry names, without quotes."""
    return next((str(entry[key]).strip('"') for key in ("ETag", "etag") if entry.get(key)), None)


def _nanoseconds(time: Any) -> int | None:
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return None
    if isinstance(time, datetime):
        return int(time.timestamp() * 1_000_000) * 1000
    return int(time * 1_000_000_000) if isinstance(time, int | float) else None
