"""Iceberg tables for tests: written by pyiceberg, and what it cannot write, by the format's specification.

`warehouse` is a SQL catalog on SQLite over a folder. Delete files, deletion vectors and manifests of them are made here
by hand: `position_deletes`, `equality_deletes` and `deletion_vectors` write files and tell their manifest entries,
`commit` adds a snapshot with such entries (through the catalog), `write_metadata` and `at_version_3` make metadata
files without one. They share no code with what reads them.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestListWriterV2,
    ManifestWriterV2,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Record
from pyiceberg.types import IntegerType, ListType, NestedField, StructType
from pyroaring import BitMap
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

PATH_ID, POS_ID = 2147483546, 2147483545


def warehouse(folder: Path, **properties: str) -> SqlCatalog:
    """A catalog named ``test`` with the namespace ``db``; its tables lie in ``folder/lake`` unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    place = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/lake"}
    catalog = SqlCatalog("test", **{**place, **properties})
    catalog.close()
    catalog.engine = create_engine(place["uri"], poolclass=NullPool)  # a pool would be left open
    catalog.create_namespace_if_not_exists("db")
    return catalog


@dataclass(frozen=True)
class Entry:
    """One file for a manifest: the properties of a manifest's ``data_file`` by their names in the specification."""

    content: DataFileContent
    location: str
    format: FileFormat
    rows: int
    size_bytes: int
    partition: tuple[Any, ...] = ()
    spec_id: int = 0
    sequence: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def write_bytes(table: Table, name: str, data: bytes) -> str:
    """Write a file beside the table's data; its location."""
    location = f"{table.location()}/data/{uuid.uuid4().hex}-{name}"
    with table.io.new_output(location).create(overwrite=False) as stream:
        stream.write(data)
    return location


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def with_ids(table: pa.Table, ids: Sequence[int]) -> pa.Table:
    """The table with Parquet field ids."""
    fields = [f.with_metadata({b"PARQUET:field_id": str(i).encode()}) for f, i in zip(table.schema, ids, strict=True)]
    return table.cast(pa.schema(fields))


def position_deletes(table: Table, rows: Sequence[tuple[str, int]], **more: Any) -> Entry:
    """A position delete file that lists (location, row)."""
    schema = pa.schema([pa.field("file_path", pa.string(), False), pa.field("pos", pa.int64(), False)])
    listed = pa.table({"file_path": [r[0] for r in rows], "pos": [r[1] for r in rows]}, schema=schema)
    data = parquet_bytes(with_ids(listed, [PATH_ID, POS_ID]))
    location = write_bytes(table, "deletes.parquet", data)
    content, kind = DataFileContent.POSITION_DELETES, FileFormat.PARQUET
    return Entry(content, location, kind, len(rows), len(data), **more)


def equality_deletes(table: Table, values: pa.Table, ids: Sequence[int], **more: Any) -> Entry:
    """An equality delete file: rows that equal a row of ``values`` in the columns of these field ids are deleted."""
    data = parquet_bytes(with_ids(values, ids))
    location = write_bytes(table, "eq-deletes.parquet", data)
    content, kind = DataFileContent.EQUALITY_DELETES, FileFormat.PARQUET
    told = {"equality_ids": list(ids), **more.pop("more", {})}
    return Entry(content, location, kind, values.num_rows, len(data), more=told, **more)


def vector_blob(rows: Sequence[int]) -> bytes:
    """A ``deletion-vector-v1`` blob."""
    by_key: dict[int, list[int]] = {}
    for row in sorted(rows):
        by_key.setdefault(row >> 32, []).append(row & 0xFFFFFFFF)
    vector = struct.pack("<Q", len(by_key))
    for key, low in sorted(by_key.items()):
        vector += struct.pack("<I", key) + BitMap(low).serialize()
    inner = b"\xd1\xd3\x39\x64" + vector
    return struct.pack(">I", len(inner)) + inner + struct.pack(">I", zlib.crc32(inner))


def deletion_vectors(table: Table, rows: Mapping[str, Sequence[int]], **more: Any) -> list[Entry]:
    """One Puffin file with a deletion vector for each location; an entry for each."""
    data, blobs, places = b"PFA1", [], []
    for location, deleted in rows.items():
        blob = vector_blob(deleted)
        places.append((location, len(deleted), len(data), len(blob)))
        blobs.append(
            {
                "type": "deletion-vector-v1",
                "fields": [2147483645],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(data),
                "length": len(blob),
                "properties": {"referenced-data-file": location, "cardinality": str(len(deleted))},
            }
        )
        data += blob
    footer = json.dumps({"blobs": blobs, "properties": {}}).encode()
    data += b"PFA1" + footer + struct.pack("<I", len(footer)) + bytes(4) + b"PFA1"
    puffin = write_bytes(table, "vectors.puffin", data)
    content, kind = DataFileContent.POSITION_DELETES, FileFormat.PUFFIN
    return [
        Entry(
            content,
            puffin,
            kind,
            count,
            len(data),
            more={"referenced_data_file": location, "content_offset": start, "content_size_in_bytes": size},
            **more,
        )
        for location, count, start, size in places
    ]


class _ManifestWriter(ManifestWriterV2):
    """Writes manifests of deletes too, and of version 3."""

    def __init__(self, of: ManifestContent, format_version: int, **more: Any) -> None:
        super().__init__(**more, avro_compression="null")
        self._of, self._format = of, format_version

    def content(self) -> ManifestContent:
        return self._of

    @property
    def version(self) -> Any:
        return self._format

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes" if self._of == ManifestContent.DELETES else "data"}

    def _with_partition(self, format_version: Any) -> Schema:
        """As the specification has it: pyiceberg takes field ids of equality deletes for longs."""
        whole = super()._with_partition(format_version)
        file = whole.find_field("data_file")
        equality_ids = NestedField(135, "equality_ids", ListType(136, IntegerType()), required=False)
        fields = [equality_ids if one.field_id == 135 else one for one in file.field_type.fields]
        made = NestedField(2, "data_file", StructType(*fields), required=True)
        return Schema(*(made if one.field_id == 2 else one for one in whole.fields))

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        return AvroOutputFile[ManifestEntry](
            output_file=self._output_file,
            file_schema=self._with_partition(self.version),
            record_schema=self._with_partition(self.version),
            schema_name="manifest_entry",
            metadata=self._meta,
        )


class _ManifestListWriter(ManifestListWriterV2):
    """Writes manifest lists of version 3."""

    def __init__(self, format_version: int, *rest: Any) -> None:
        super().__init__(*rest, "null")
        self._format_version = format_version
        self._meta["format-version"] = str(format_version)


def write_manifest(
    table: Table, snapshot_id: int, entries: Sequence[Entry], *, format_version: int = 2
) -> ManifestFile:
    """A manifest of files that are all data or all deletes, and of one partitioning."""
    deletes = entries[0].content != DataFileContent.DATA
    output = table.io.new_output(f"{table.location()}/metadata/{uuid.uuid4().hex}-m0.avro")
    spec = table.specs()[entries[0].spec_id]
    with _ManifestWriter(
        ManifestContent.DELETES if deletes else ManifestContent.DATA,
        format_version,
        spec=spec,
        schema=table.schema(),
        output_file=output,
        snapshot_id=snapshot_id,
    ) as writer:
        for entry in entries:
            file = DataFile.from_args(
                _table_format_version=format_version,
                content=entry.content,
                file_path=entry.location,
                file_format=entry.format,
                partition=Record(*entry.partition),
                record_count=entry.rows,
                file_size_in_bytes=entry.size_bytes,
                **entry.more,
            )
            file.spec_id = entry.spec_id
            status = ManifestEntryStatus.ADDED if entry.sequence is None else ManifestEntryStatus.EXISTING
            writer.add_entry(
                ManifestEntry.from_args(
                    _table_format_version=format_version,
                    status=status,
                    snapshot_id=snapshot_id,
                    sequence_number=entry.sequence,
                    file_sequence_number=entry.sequence,
                    data_file=file,
                )
            )
    return writer.to_manifest_file()


def snapshot_of(
    table: Table, manifests: Sequence[ManifestFile], snapshot_id: int, *, format_version: int = 2
) -> Snapshot:
    """A snapshot after the current one, that consists of these manifests; its manifest list is written."""
    current = table.current_snapshot()
    parent = current.snapshot_id if current else None
    location = f"{table.location()}/metadata/snap-{snapshot_id}.avro"
    sequence = table.metadata.last_sequence_number + 1
    output = table.io.new_output(location)
    with _ManifestListWriter(format_version, output, snapshot_id, parent, sequence) as writer:
        writer.add_manifests(list(manifests))
    return Snapshot(
        snapshot_id=snapshot_id,
        parent_snapshot_id=parent,
        sequence_number=sequence,
        timestamp_ms=table.metadata.last_updated_ms + 1,
        manifest_list=location,
        summary=Summary(Operation.OVERWRITE),
        schema_id=table.metadata.current_schema_id,
    )


def commit(table: Table, entries: Sequence[Entry], *, without: Sequence[ManifestFile] = ()) -> Table:
    """Commit a snapshot through the catalog: the current one's manifests (save ``without``), and ``entries``."""
    snapshot_id = uuid.uuid4().int >> 66
    current = table.current_snapshot()
    kept = [one for one in (current.manifests(table.io) if current else ()) if one not in without]
    snapshot = snapshot_of(table, [*kept, *_manifests(table, snapshot_id, entries, 2)], snapshot_id)
    main = SetSnapshotRefUpdate(
        ref_name="main",
        type="branch",
        snapshot_id=snapshot_id,
        max_ref_age_ms=None,
        max_snapshot_age_ms=None,
        min_snapshots_to_keep=None,
    )
    with table.transaction() as transaction:
        transaction._apply((AddSnapshotUpdate(snapshot=snapshot), main), ())
    return table


def _manifests(table: Table, snapshot_id: int, entries: Sequence[Entry], version: int) -> list[ManifestFile]:
    groups: dict[tuple[bool, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.content != DataFileContent.DATA, entry.spec_id), []).append(entry)
    return [write_manifest(table, snapshot_id, group, format_version=version) for group in groups.values()]


def at_version_3(table: Table, entries: Sequence[Entry]) -> str:
    """The table as version 3 of the format, with a snapshot that adds ``entries``: a metadata file, not committed."""
    snapshot_id = uuid.uuid4().int >> 66
    current = table.current_snapshot()
    kept = list(current.manifests(table.io)) if current else []
    manifests = [*kept, *_manifests(table, snapshot_id, entries, 3)]
    snapshot = snapshot_of(table, manifests, snapshot_id, format_version=3)
    told = json.loads(table.metadata.model_dump_json())
    return write_metadata(table, {**told, "format-version": 3, "next-row-id": 0}, [snapshot])


def write_metadata(table: Table, told: dict[str, Any], snapshots: Sequence[Snapshot] = (), name: str = "") -> str:
    """Write metadata (plain values) with these snapshots added, the last of them current; the file's location."""
    told = json.loads(json.dumps(told))
    for snapshot in snapshots:
        plain = json.loads(snapshot.model_dump_json())
        told.setdefault("snapshots", []).append(plain)
        told["current-snapshot-id"] = snapshot.snapshot_id
        told["last-sequence-number"] = snapshot.sequence_number
        told["last-updated-ms"] = snapshot.timestamp_ms
        told["refs"] = {**told.get("refs", {}), "main": {"snapshot-id": snapshot.snapshot_id, "type": "branch"}}
        entry = {"snapshot-id": snapshot.snapshot_id, "timestamp-ms": snapshot.timestamp_ms}
        told["snapshot-log"] = [*told.get("snapshot-log", []), entry]
    location = f"{table.location()}/metadata/{name or f'90000-{uuid.uuid4()}.metadata.json'}"
    with table.io.new_output(location).create(overwrite=True) as stream:
        stream.write(json.dumps(told).encode())
    return location


def data_files(table: Table) -> list[str]:
    """The locations of the current snapshot's data files, in the order of pyiceberg's plan."""
    return [task.file.file_path for task in table.scan().plan_files()]
