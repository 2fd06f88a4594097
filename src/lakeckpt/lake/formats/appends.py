"""This module finds what was added to a table since a version that a reader knows.

A table format knows what each of its versions did. Files of consecutive appends are those of the last of these versions
that the version before the first one does not have. Compactions hold no new row and are skipped. A version that deletes
rows is refused, or skipped if the caller says so; a version that writes rows again is refused, because its new files
hold rows that were read before.

Plain Parquet files have no versions. Their listing is compared with the marks of all files that the reader knows
(`lakeckpt.lake.table.joined`). The module reads metadata and the footers of added files, and no row. The threads that
it starts have ended when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lakeckpt.errors import DataFileChanged, TableError, TableNotFound, TableRewritten, TableVersionGone
from lakeckpt.lake.formats.library import changes, pin, refreshed
from lakeckpt.lake.formats.pinned_files import Change, PinnedFiles
from lakeckpt.lake.formats.pinning import index_of, index_of_version, listed
from lakeckpt.lake.parquet.footer import summarize_all
from lakeckpt.lake.storage.base import ObjectInfo, redact_uri
from lakeckpt.lake.table.index import MARK_BYTES, TableIndex
from lakeckpt.lake.table.joined import Added, known_marks, mark_of
from lakeckpt.lake.table.listing import Found, Source, find_files, open_root
from lakeckpt.lake.table.version import TableFormat

__all__ = ["added_files", "added_versions", "runs_of_appends"]

_NO_VERSION = "-1"
"""Iceberg's name for the version of a table that has no snapshot yet."""
_ADVICE = "Begin a new run over the newest version, or read it epoch by epoch: ReadOptions(on_new_version='next_epoch')"


def added_files(
    source: Source,
    since: TableIndex,
    ignore_deletes: bool,
    *,
    uri: str,
    storage_options: Mapping[str, Any] | None,
    threads: int,
) -> Added:
    """Return which files were added to the plain Parquet table at ``source`` since ``since``.

    Raises `TableRewritten` if known files are gone, unless deletes are ignored; `DataFileChanged` if one was
    written again; `TableError` if the folder of all files is not ``uri`` any more.
    """
    found = find_files(source, storage_options=storage_options, threads=threads, kind="parquet")
    _check_place(found.uri, uri)
    known, marks = known_marks(since), {mark_of(info): info for info in found.files}
    new = [info for mark, info in marks.items() if mark not in known]
    _check_known(known.difference(marks), new, uri, ignore_deletes)
    if not new:
        return Added(indexes=(), version=since.version)
    summaries = summarize_all(found.storage, new, threads=threads, progress=None)
    return Added(indexes=(index_of(new, summaries),), version=since.version)


def _check_known(gone: set[bytes], new: Sequence[ObjectInfo], uri: str, ignore_deletes: bool) -> None:
    paths = {mark[: MARK_BYTES - 4] for mark in gone}
    again = [info.path for info in new if mark_of(info)[: MARK_BYTES - 4] in paths]
    if again:
        raise DataFileChanged(
            f"files of {uri!r} that were read were written again at another size: {again[:5]}. Put them back, and "
            "append rows as new files"
        )
    if gone and not ignore_deletes:
        raise TableRewritten(
            f"{len(gone)} files of {uri!r} that were known are gone, and a table that is followed is only appended to. "
            f"Follow(ignore_deletes=True) goes on with the files that are there. {_ADVICE}"
        )


def added_versions(
    kind: TableFormat,
    place: object,
    since: TableIndex,
    ignore_deletes: bool,
    *,
    uri: str,
    storage_options: Mapping[str, Any] | None,
    threads: int,
) -> Added:
    """Return which files newer versions of the table at ``place`` have added since ``since``.

    Raises `TableRewritten` for a version that is no append, `TableVersionGone` if a version that is needed is not
    known any more, and what pinning a version raises.
    """
    place = refreshed(place)
    asked: dict[str, Any] = {"storage_options": storage_options, "threads": threads}
    later = changes(kind, place, since=since.version.name, **asked)
    indexes = []
    for before, upto in runs_of_appends(later, since.version.name, uri, ignore_deletes=ignore_deletes):
        named: type[int] | type[str] = int if kind == "delta" else str
        try:
            old = None if before == _NO_VERSION else pin(kind, place, version=named(before), **asked)
        except TableNotFound as error:
            raise TableVersionGone(f"what was added to {uri!r} since version {before} is not known: {error}") from error
        now = pin(kind, place, version=named(upto), **asked)
        known = set() if old is None else {file.path for file in old.files}
        new = replace(now, files=tuple(file for file in now.files if file.path not in known))
        if new.files:
            indexes.append(_index_of(new, place, since, uri=uri, **asked))
        if old is not None and old.root != now.root:
            _check_place(str(now.root), str(old.root))
    newest = later[-1].version if later else since.version.name
    return Added(indexes=tuple(indexes), version=replace(since.version, name=newest, timestamp_ms=None))


def _index_of(
    new: PinnedFiles,
    place: object,
    since: TableIndex,
    *,
    uri: str,
    storage_options: Mapping[str, Any] | None,
    threads: int,
) -> TableIndex:
    if new.version.table_id != since.version.table_id:
        raise TableError(
            f"the table {uri!r} was dropped and made anew: its id was {since.version.table_id}, and is "
            f"{new.version.table_id}. Begin a new run"
        )
    here = None
    if new.root is None:
        text = str(place)
        here = Found(storage=open_root(text, storage_options), uri=redact_uri(text), files=(), place=text)
    found = listed(here, new, storage_options=storage_options, threads=threads)
    _check_place(found.uri, uri)
    summaries = summarize_all(found.storage, found.files, threads=threads, progress=None)
    return index_of_version(found.files, summaries, new)


def runs_of_appends(
    later: Sequence[Change], since: str, uri: str, *, ignore_deletes: bool
) -> Iterator[tuple[str, str]]:
    """Yield (the version before, the last version) of each run of consecutive appends among ``later`` versions.

    Raises `TableRewritten` for a version that deletes rows, unless deletes are ignored, or writes rows again.
    """
    before, upto = since, ""
    for change in later:
        if change.kind == "append":
            upto = change.version
            continue
        if upto:
            yield before, upto
        if change.kind == "rewrite" or (change.kind == "delete" and not ignore_deletes):
            what = "deletes rows" if change.kind == "delete" else "writes rows again, or replaces them"
            ignoring = "Follow(ignore_deletes=True) ignores it. " if change.kind == "delete" else ""
            raise TableRewritten(
                f"version {change.version} of {uri!r} {what}, and a table that is followed is only appended to. "
                f"{ignoring}{_ADVICE}"
            )
        before, upto = change.version, ""
    if upto:
        yield before, upto


def _check_place(now: str, before: str) -> None:
    if now != before:
        raise TableError(
            f"the folder that holds all files of the table {before!r} is {now!r} now, and paths differ: begin a new run"
        )
