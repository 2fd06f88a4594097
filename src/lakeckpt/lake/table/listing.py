"""This module finds the files that a folder, a glob, a file or a list of files names.

`find_files` returns a storage and the objects in it, sorted bytewise by their path relative to its root:

- a folder: all Parquet files in it at any depth; names that begin with ``.`` or ``_`` are skipped (``_x=1`` is not:
  it is a partition), and so are names that do not end like a Parquet file's;
- a glob (``*``, ``?``, ``[…]`` within a name, ``**`` for any folders), one file, or a list of files: just those.

The root is the folder, or the deepest folder that holds all files, raised above folders named ``key=value``, so that
these become columns. The files of a Delta, Iceberg or Hudi table alone are not its rows: for a folder that holds such
a table, all objects are listed, and the format is named. The module opens no file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fsspec.utils import glob_translate

from lakeckpt.errors import ConfigError, ObjectMissing, StorageError, TableNotFound
from lakeckpt.lake.storage.base import ObjectInfo, Storage, check_key, redact_uri, split_uri
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.open import open_for_table
from lakeckpt.lake.table.partitions import is_partition_folder
from lakeckpt.lake.table.version import TableFormat

__all__ = [
    "METADATA_FILES",
    "Found",
    "Source",
    "common_root",
    "find_files",
    "list_exactly",
    "open_root",
    "paths_below",
]

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
PARQUET_SUFFIXES = (".parquet", ".parq", ".pqt", ".pq")
MAX_SINGLE_LISTINGS = 64
METADATA_FILES = (".metadata.json", ".metadata.json.gz")
"""How the names of Iceberg's metadata files end."""
_MAGIC = re.compile(r"[*?\[]")
_INNER = re.compile(r"/(?:_delta_log|\.hoodie)/.|/metadata/(?:v\d+|\d{5,}-[\w-]+)(?:\.gz)?\.metadata\.json(?:\.gz)?$")
"""Behind the folder of a table that lies in another folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A storage, a name for it without credentials, and the table's files in it, sorted by path.

    If ``format`` is not plain Parquet, these are all objects below ``place``, the root with whatever it was given.
    """

    storage: Storage
    uri: str
    files: tuple[ObjectInfo, ...]
    format: TableFormat = "parquet"
    place: str = ""


def find_files(
    source: Source, *, storage_options: Mapping[str, Any] | None, threads: int, kind: TableFormat | None = None
) -> Found:
    """Find the files of a table, or raise `TableNotFound` or `ConfigError` that names what was looked for.

    ``kind``: the format that it must have, if the caller knows.
    """
    if isinstance(source, str | os.PathLike):
        text = _text(source)
        if _MAGIC.search(text) and not _is_local_path(text):
            return _of_kind(_of_glob(text, storage_options, threads), kind)
        return _of_kind(_of_place(text, storage_options, kind), kind)
    if not isinstance(source, Sequence) or isinstance(source, bytes | bytearray):
        raise ConfigError(f"a table is a path, a URL or a list of them, not {type(source).__name__}")
    if not source:
        raise ConfigError("a table cannot be an empty list of files")
    return _of_kind(_of_list([_text(item) for item in source], storage_options, threads), kind)


def _of_kind(found: Found, kind: TableFormat | None) -> Found:
    if kind is not None and found.format != kind:
        raise ConfigError(f"format={kind!r} was given, but {found.uri!r} is a table in the format {found.format!r}")
    return found


def list_exactly(storage: Storage, paths: Sequence[str], *, threads: int) -> dict[str, ObjectInfo]:
    """Return what the storage lists for these paths now, by path. Paths that are gone have no entry."""
    if isinstance(storage, LocalStorage) or len(paths) <= MAX_SINGLE_LISTINGS:
        with ThreadPoolExecutor(max_workers=max(1, min(threads, len(paths)))) as pool:
            found = [info for infos in pool.map(storage.list, paths) for info in infos]
    else:
        found = storage.list(_common_folder(paths))
    wanted = set(paths)
    return {info.path: info for info in found if info.path in wanted}


def _of_place(text: str, storage_options: Mapping[str, Any] | None, kind: TableFormat | None) -> Found:
    """Return the files of a folder, or one file."""
    text = _absolute(text)
    if text.endswith(METADATA_FILES):
        root = text.rpartition("/")[0].rpartition("/")[0]
        return Found(
            storage=open_root(root, storage_options), uri=redact_uri(root), files=(), format="iceberg", place=text
        )
    storage = open_root(text, storage_options)
    if isinstance(storage, LocalStorage) and os.path.isfile(storage.name):
        return _of_list([text], storage_options, 1)
    try:
        infos = storage.list()
    except ObjectMissing:
        raise TableNotFound(
            f"there is no table at {redact_uri(text)!r}: its bucket does not exist. Check its name and the endpoint"
        ) from None
    if not infos:
        with contextlib.suppress(TableNotFound, ConfigError):  # there is no such file, or the place is a bucket
            return _of_list([text], storage_options, 1)
    uri = redact_uri(text)
    found = _format_of(uri, infos, kind)
    if found != "parquet":
        return Found(storage=storage, uri=uri, files=tuple(infos), format=found, place=text)
    _refuse_part_of_table(text, storage_options)
    files = [info for info in infos if _is_data_file(info.path)]
    if not files:
        raise TableNotFound(_nothing_in_folder(uri, infos))
    return _found(storage, uri, files)


def _of_glob(text: str, storage_options: Mapping[str, Any] | None, threads: int) -> Found:
    scheme, rest = split_uri(text)
    if scheme == "file":
        names = sorted(glob.glob(os.path.expanduser(rest), recursive=True))
        names = [os.path.abspath(name) for name in names if not os.path.isdir(name)]
    else:
        steady = rest[: _MAGIC.search(rest).start()].rpartition("/")[0]  # type: ignore[union-attr]
        if not steady:
            raise ConfigError(f"the glob {redact_uri(text)!r} needs a bucket without wildcards")
        base = f"{text[: len(text) - len(rest)]}{steady}"
        if steady.endswith("/"):
            raise ConfigError(_empty_name(text))
        matches = re.compile(glob_translate(rest[len(steady) + 1 :])).match
        listed = (info.path for info in open_root(base, storage_options).list(""))
        names = [f"{base}/{path}" for path in listed if matches(path) and "/." not in f"/{path}"]
    if not names:
        raise TableNotFound(f"no file matches the glob {redact_uri(text)!r}: check the path, or pass the folder")
    return _of_list(names, storage_options, threads)


def _of_list(texts: Sequence[str], storage_options: Mapping[str, Any] | None, threads: int) -> Found:
    texts = [_absolute(text) for text in texts]
    root = common_root(texts)
    paths = paths_below(root, texts)
    counts = Counter(paths)
    if len(counts) != len(paths):
        twice = next(text for text, path in zip(texts, paths, strict=True) if counts[path] > 1)
        raise ConfigError(f"the file {redact_uri(twice)!r} is listed twice: its rows would count twice")
    for path in paths:
        check_key(path)
    storage = open_root(root, storage_options)
    found = list_exactly(storage, paths, threads=threads)
    for path, text in zip(paths, texts, strict=True):
        if path not in found:
            raise TableNotFound(f"there is no file {redact_uri(text)!r}: a list names files, not folders or globs")
    return _found(storage, redact_uri(root), list(found.values()))


def _found(storage: Storage, uri: str, files: list[ObjectInfo]) -> Found:
    for info in files:
        try:
            check_key(info.path)
        except StorageError as error:
            raise StorageError(
                f"{error}. It lies in {uri!r}, and its rows can be neither read nor skipped silently: rename it, or "
                "name the files that you mean by a glob or a list"
            ) from None
    return Found(storage=storage, uri=uri, files=tuple(sorted(files, key=lambda info: info.path)))


def open_root(text: str, storage_options: Mapping[str, Any] | None) -> Storage:
    """Return the storage rooted at a table's folder. Local links to files are followed."""
    storage = open_for_table(text, storage_options=storage_options)
    return LocalStorage(storage.name, follow_file_links=True) if isinstance(storage, LocalStorage) else storage


def _text(source: str | os.PathLike[str]) -> str:
    text = os.fspath(source)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"a table needs a path or a URL, not {source!r}")
    return text


def _is_local_path(text: str) -> bool:
    scheme, rest = split_uri(text)
    return scheme == "file" and os.path.exists(os.path.expanduser(rest))


def _absolute(text: str) -> str:
    """Return a local path without detours, or a URL without a slash at its end."""
    scheme, rest = split_uri(text)
    return os.path.abspath(os.path.expanduser(rest)) if scheme == "file" else text.rstrip("/")


def common_root(texts: Sequence[str]) -> str:
    """Return the deepest folder above all of these files and their folders ``key=value``. `ConfigError`: none does."""
    schemes = {split_uri(text)[0] for text in texts}
    if len(schemes) > 1:
        raise ConfigError(f"the files of a table must lie in one store, not in {', '.join(sorted(schemes))}")
    scheme, first = split_uri(texts[0])
    head = texts[0][: len(texts[0]) - len(first)]
    folder = _common_folder([split_uri(text)[1] for text in texts])
    while is_partition_folder(folder.rpartition("/")[2]):
        folder = folder.rpartition("/")[0]
    if not folder.strip("/") and scheme != "file":
        raise ConfigError(f"the files of a table must lie in one bucket: {redact_uri(texts[0])!r} and others do not")
    return head + folder if folder or scheme != "file" else "/"


def paths_below(root: str, texts: Sequence[str]) -> list[str]:
    """Return the paths of files in their `common_root`, each without one separator in front.

    `ConfigError` for an empty name (``//``) in one: in an object store that is not what a single slash names.
    """
    if root.endswith("/") and split_uri(root)[0] != "file":
        raise ConfigError(_empty_name(next(text for text in texts if text.startswith(f"{root}/"))))
    above = root if root.endswith("/") else f"{root}/"
    paths = [text[len(above) :] for text in texts]
    for path, text in zip(paths, texts, strict=True):
        if path.startswith("/") or "//" in path:
            raise ConfigError(_empty_name(text))
    return paths


def _empty_name(text: str) -> str:
    return (
        f"{redact_uri(text)!r} has an empty folder name ('//') where it differs from the table's other files, or at "
        "its end: no table can hold that, and what a single slash names is another object. Write a single slash where "
        "that was meant, else move the object"
    )


def _common_folder(paths: Sequence[str]) -> str:
    """Return the deepest folder that holds all of these paths; ``""`` for the root."""
    low, high = min(paths).split("/")[:-1], max(paths).split("/")[:-1]
    count = 0
    while count < min(len(low), len(high)) and low[count] == high[count]:
        count += 1
    return "/".join(low[:count])


def _is_data_file(path: str) -> bool:
    if any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/")):
        return False
    return path.lower().endswith(PARQUET_SUFFIXES)


def _format_of(uri: str, infos: Sequence[ObjectInfo], kind: TableFormat | None) -> TableFormat:
    """Return the format of the table of these objects, ``kind`` if it is one; `ConfigError`: it could be two."""
    found: dict[TableFormat, str] = {}
    within: dict[str, str] = {}
    for info in infos:
        top, _, below = info.path.partition("/")
        if top == "_delta_log" and below:
            found.setdefault("delta", info.path)
        elif top == ".hoodie" and below:
            found.setdefault("hudi", info.path)
        elif top == "metadata" and below.endswith(METADATA_FILES):
            found.setdefault("iceberg", info.path)
        elif (inner := _INNER.search(info.path)) is not None:
            within.setdefault(info.path[: inner.start()], info.path)
    if kind in found:
        return kind
    if len(found) > 1 and kind is None:
        both = " and ".join(f"{kind} ({path!r})" for kind, path in found.items())
        raise ConfigError(
            f"{uri!r} is a table in more than one format, {both}: say which by format={next(iter(found))!r}"
        )
    data = [info.path for info in infos if _is_data_file(info.path)] if within and not found else []
    for folder, path in within.items() if not found else ():
        if not any(one.startswith(f"{folder}/") for one in data):
            continue
        raise ConfigError(
            f"the folder {folder!r} in {uri!r} is a table of its own ({path!r}), whose files alone are not its rows: "
            "open it by itself, or name the files that you mean by a glob or a list"
        )
    return next(iter(found), "parquet")


def _refuse_part_of_table(text: str, storage_options: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` if a folder ``key=value`` is part of a Delta, Hudi or Iceberg table."""
    root = text
    while is_partition_folder(root.rpartition("/")[2]):
        root = root.rpartition("/")[0]
    if root == text or root.endswith("/") or not split_uri(root)[1].strip("/"):
        return
    above, _, name = root.rpartition("/")
    places = [(root, "_delta_log"), (root, ".hoodie")]
    if name == "data" and not above.endswith("/") and split_uri(above)[1].strip("/"):
        places.append((above, "metadata"))
    for table, folder in places:
        infos: Sequence[ObjectInfo] = ()
        with contextlib.suppress(StorageError):  # who may not look there cannot know
            infos = open_root(table, storage_options).list(folder)
        if _format_of(table, infos, None) != "parquet":
            raise ConfigError(
                f"{redact_uri(text)!r} is a folder of the table {redact_uri(table)!r}, whose files alone are not its "
                "rows: open that table with a filter, or name the files that you mean by a glob or a list"
            )


def _nothing_in_folder(uri: str, infos: Sequence[ObjectInfo]) -> str:
    looked = (
        f"looked for files named *{', *'.join(PARQUET_SUFFIXES)} at any depth, without names that begin with . or _"
    )
    if not infos:
        return f"there is no table at {uri!r}: nothing is there ({looked}). Check the path and the credentials"
    return (
        f"there is no table at {uri!r}, since it holds no Parquet file: {looked}; found {_others(infos)}. "
        f"{_PARQUET_ONLY}. Parquet files with other names can be passed as a glob or a list"
    )


def _others(infos: Sequence[ObjectInfo]) -> str:
    some = ", ".join(repr(info.path) for info in infos[:3])
    return f"{len(infos)} other file{'s' * (len(infos) != 1)} ({some}{', …' if len(infos) > 3 else ''})"


_PARQUET_ONLY = (
    "lakeckpt reads Parquet only: write the rows of other files as Parquet first (pyarrow.dataset reads CSV and JSON, "
    "and its write_dataset writes Parquet)"
)
