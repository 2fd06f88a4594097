"""This module pins an instant of a Hudi table.

hudi replays the timeline and returns the file slices that were current at an instant. Each slice of a copy-on-write
table is one Parquet file, which holds all columns, partition columns and Hudi's own (``_hoodie_…``) included. hudi
lists the files that are there; `lakeckpt.lake.formats.hudi_timeline` finds out whether any is gone. A version is named
by its instant.

The schema is the one that the commit of the instant recorded, which hudi turns into Arrow's. Refused by name, because
they could not be read exactly: slices with log files (merge-on-read that was not compacted), base files that are not
Parquet, tables whose columns are found by ids (schema on read), bootstrapped tables, and what hudi itself does not
read. The module opens no data file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from hudi import HudiReadOptions, HudiTable, HudiTableBuilder

from lakeckpt.errors import (
    StorageError,
    TableError,
    TableNotFound,
    TableVersionGone,
)
from lakeckpt.lake.formats.clients import asking, is_of_the_store, object_store_options
from lakeckpt.lake.formats.hudi_timeline import Commit, expected_files, lost_groups, read_commits
from lakeckpt.lake.formats.pinned_files import PinnedFile, PinnedFiles
from lakeckpt.lake.storage.base import redact_uri
from lakeckpt.lake.table.version import TableVersion

__all__ = ["pin"]

_UTC = "utc"
_NO_COMMIT = "0"
"""Our name for the version of a table that has no completed instant yet."""
_META_FIELDS, _CREATED_AS = "hoodie.populate.meta.fields", "hoodie.table.create.schema"
_SCHEMA_ONLY = (
    "hoodie.table.name=schema\nhoodie.table.type=COPY_ON_WRITE\nhoodie.table.version=6\n"
    "hoodie.timeline.layout.version=1\n"
)


def pin(
    place: str, *, version: int | str | None, storage_options: Mapping[str, Any] | None, threads: int
) -> PinnedFiles:
    """Return what the instant ``version`` of the table at ``place`` consists of (`library.pin`)."""
    uri = redact_uri(place)
    with _asking(uri, "its properties and timeline"):
        builder = HudiTableBuilder.from_base_uri(place)
        table = builder.with_storage_options(object_store_options(place, storage_options)).build()
        options, zone, commits = table.hudi_options(), table.timezone, read_commits(table)
    _check_features(options, uri)
    chosen = _chosen(commits, version, uri)
    known = [] if chosen is None else [commit for commit in commits if commit.name <= chosen.name]
    return PinnedFiles(
        version=TableVersion(
            format="hudi",
            name=_NO_COMMIT if chosen is None else chosen.name,
            timestamp_ms=chosen.instant.epoch_mills if chosen is not None and zone == _UTC else None,
            table_id=table.table_name,
        ),
        files=() if chosen is None else _files(table, commits, chosen, uri),
        schema=_schema(table, options, known, uri),
    )


def _chosen(commits: list[Commit], version: int | str | None, uri: str) -> Commit | None:
    if version is None:
        return commits[-1] if commits else None
    named = [commit for commit in commits if commit.name == str(version)]
    if not named:
        raise TableNotFound(f"the Hudi table {uri!r} has no completed instant {version}: {_offer(commits)}")
    return named[0]


def _offer(commits: list[Commit]) -> str:
    if not commits:
        return "it has none yet"
    names = [commit.name for commit in commits[-5:]]
    return f"it has {', '.join(names)}{' and older ones' if len(commits) > 5 else ''}; those before were archived"


def _check_features(options: Mapping[str, str], uri: str) -> None:
    base = options.get("hoodie.table.base.file.format", "PARQUET")
    if base.upper() != "PARQUET":
        raise TableError(
            f"the base files of the Hudi table {uri!r} are {base}: only Parquet is read here. Make a copy in Parquet"
        )
    if options.get("hoodie.bootstrap.base.path"):
        raise TableError(
            f"the Hudi table {uri!r} was bootstrapped: columns of a row may lie in two files, which is not read. "
            "Rewrite it (full record bootstrap)"
        )


def _files(table: HudiTable, commits: list[Commit], chosen: Commit, uri: str) -> tuple[PinnedFile, ...]:
    with _asking(uri, f"its files at instant {chosen.name}"):
        slices = table.get_file_slices(HudiReadOptions().with_as_of_timestamp(chosen.name))
        unmerged = [one for one in slices if one.has_log_files() or not one.base_file_name]
        logs = [next(iter(one.log_file_names), one.file_id) for one in unmerged]
        found = {(one.partition_path, one.file_id): one.base_file_relative_path() for one in slices}
    if logs:
        raise TableError(
            f"at instant {chosen.name}, {len(logs)} of {len(slices)} file groups of the Hudi table {uri!r} have log "
            f"files that are not compacted ({logs[0]!r}): their base files alone are other rows. Run a compaction, "
            "then open its instant"
        )
    lost = tuple(dict.fromkeys(lost_groups(commits, chosen.name, found)))
    if lost:
        raise TableVersionGone(
            f"Hudi instant {chosen.name} of {uri!r} cannot be read: its base file {lost[0]!r} is gone"
            + (f", and so are {len(lost) - 1} more" if len(lost) > 1 else "")
            + ". The cleaner removes old ones (hoodie.clean.commits.retained): open an instant whose files are there",
            files=lost,
        )
    for path in found.values():
        if not path.endswith(".parquet"):
            raise TableError(f"the base file {path!r} of the Hudi table {uri!r} is not Parquet")
    sizes = {written.path: written.size_bytes for written in expected_files(commits, chosen.name).values()}
    return tuple(PinnedFile(path=path, size_bytes=sizes.get(path)) for path in found.values())


def _schema(table: HudiTable, options: Mapping[str, str], commits: list[Commit], uri: str) -> pa.Schema:
    """Return the columns of the newest of ``commits`` that records a schema."""
    with_meta = options.get(_META_FIELDS, "true").lower() != "false"
    known: str | None = None
    for commit in reversed(commits):
        if commit.extra.get("latest_schema"):
            raise TableError(
                f"the Hudi table {uri!r} evolves its schema on read: columns are found by ids that its files do not "
                "have. Rewrite its files (clustering), or make a copy"
            )
        known = commit.extra.get("schema")
        if known:
            break
    with _asking(uri, "its schema"):
        if not known:
            return pa.schema(table.get_schema_with_meta_fields() if with_meta else table.get_schema())
        with tempfile.TemporaryDirectory(prefix="lakeckpt-hudi-") as folder:
            # A table without a commit has the schema of its properties: so hudi makes Arrow's of Avro's.
            place = Path(folder, ".hoodie")
            place.mkdir()
            line = f"{_CREATED_AS}={json.dumps(json.loads(known))}\n"
            place.joinpath("hoodie.properties").write_text(_SCHEMA_ONLY + line)
            only = HudiTableBuilder.from_base_uri(folder).build()
            return pa.schema(only.get_schema_with_meta_fields() if with_meta else only.get_schema())


def _asking(uri: str, what: str) -> AbstractContextManager[None]:
    """Turn what hudi raises into our errors."""
    return asking(partial(_explained, uri, what))


def _explained(uri: str, what: str, error: BaseException, text: str) -> Exception:
    where = f"of the Hudi table {uri!r}, hudi cannot read {what} ({text})"
    if "nsupported" in text or "Only support" in text or "not supported" in text:
        return TableError(f"{where}: change what it names, or make a plain copy")
    if "not found" in text.lower():
        return TableNotFound(f"{where}: check the path, and that the table was not damaged")
    if is_of_the_store(error, text):
        return StorageError(f"{where}: check the store and the credentials, then try again")
    return TableError(f"{where}: the table's metadata are damaged, or of a writer that hudi does not know")
