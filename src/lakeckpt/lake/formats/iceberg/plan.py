"""This module plans an Iceberg snapshot: its data files, and the delete files that apply to each.

pyiceberg reads the manifests; what applies to what is decided here, by the format's specification ("Scan Planning"),
because pyiceberg's own plan leaves out what deletion vectors need: the data file that one is for, and where in its
Puffin file it lies.

- A deletion vector applies to the data file that it names, if it is not older; if one applies, position deletes do
  not: it contains them.
- Position deletes apply to data files of their partition (or to the one that they name) that are not newer.
- Equality deletes apply to data files of their partition (or to all, if their partitioning has no fields) that are
  older: a file added together with them is not touched.

Refused by name, because they cannot be read exactly: files that are not Parquet, encrypted files, a file listed twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.avro.file import AvroFile
from pyiceberg.conversions import from_bytes
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DATA_FILE_TYPE,
    MANIFEST_ENTRY_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.types import StringType

from lakeckpt.errors import TableError

__all__ = ["Entry", "PlannedFile", "plan_files"]

PATH_FIELD_ID = 2147483546
_PLACE = {field.name: place for place, field in enumerate(DATA_FILE_TYPE[3].fields)}
_Partition = tuple[int, tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One live entry of a manifest: a data file or a delete file of the snapshot."""

    sequence: int
    partition: _Partition
    file: DataFile

    @property
    def location(self) -> str:
        return self.file.file_path

    @property
    def count(self) -> int:
        """The rows of a data file, or the rows or values that a delete file lists."""
        return self.file.record_count

    @property
    def equality_ids(self) -> tuple[int, ...]:
        """The columns that equality deletes compare, by field id."""
        return tuple(self.file.equality_ids or ())

    def get(self, name: str) -> Any:
        """Return a property of the file by its name in the specification."""
        return self.file[_PLACE[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One data file and what deletes rows of it.

    ``constants`` are the values of its identity partitions by the field id of the column: those of a column that the
    file itself lacks. ``vector`` excludes ``positions``.
    """

    location: str
    size_bytes: int
    rows: int
    constants: dict[int, Any] = field(default_factory=dict)
    vector: Entry | None = None
    positions: tuple[Entry, ...] = ()
    equalities: tuple[Entry, ...] = ()
    file: DataFile = field(repr=False, compare=False)


def plan_files(
    manifests: Sequence[ManifestFile], io: FileIO, specs: dict[int, PartitionSpec], *, threads: int
) -> list[PlannedFile]:
    """Return the data files of a snapshot with what deletes rows of them, sorted by location.

    Raises `TableError` if a file cannot be read exactly, or manifests contradict each other.
    """
    for manifest in manifests:
        if manifest.key_metadata is not None:
            raise _encrypted(manifest.manifest_path)
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(manifests)))) as pool:
        entries = [entry for found in pool.map(lambda one: _live_entries(one, io), manifests) for entry in found]
    data = [entry for entry in entries if entry.file.content == DataFileContent.DATA]
    # Partitioned by nothing any more, as by nothing ever: what such a spec deletes by value, it deletes everywhere.
    whole = {key for key, spec in specs.items() if all(isinstance(one.transform, VoidTransform) for one in spec.fields)}
    deletes = _Deletes.of((entry for entry in entries if entry.file.content != DataFileContent.DATA), whole)
    seen: set[str] = set()
    for entry in data:
        if entry.file.file_path in seen:
            raise TableError(
                f"the snapshot lists the data file {entry.file.file_path!r} twice: its rows would count twice. "
                "Remove the second listing (it was added by add_files without a check for duplicates)"
            )
        seen.add(entry.file.file_path)
    planned = [_planned(entry, deletes, specs[entry.partition[0]]) for entry in data]
    return sorted(planned, key=lambda one: one.location)


def _planned(entry: Entry, deletes: _Deletes, spec: PartitionSpec) -> PlannedFile:
    path = entry.file.file_path
    if entry.file.file_format != FileFormat.PARQUET:
        raise TableError(
            f"the data file {path!r} is {entry.file.file_format.value}: only Parquet is read here. "
            "Write it again as Parquet (write.format.default), then rewrite the table's data files"
        )
    vector = deletes.vector(entry)
    return PlannedFile(
        location=path,
        size_bytes=entry.file.file_size_in_bytes,
        rows=entry.file.record_count,
        constants={
            one.source_id: entry.file.partition[place]
            for place, one in enumerate(spec.fields)
            if isinstance(one.transform, IdentityTransform) and entry.file.partition[place] is not None
        },
        vector=vector,
        positions=() if vector is not None else deletes.positions(entry),
        equalities=deletes.equalities(entry),
        file=entry.file,
    )


def _live_entries(manifest: ManifestFile, io: FileIO) -> list[Entry]:
    """Return the entries of a manifest that are not deleted, sequence numbers and partitioning inherited."""
    entries = []
    with AvroFile[ManifestEntry](
        io.new_input(manifest.manifest_path),
        MANIFEST_ENTRY_SCHEMAS[3],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as reader:
        for entry in reader:
            if entry.status == ManifestEntryStatus.DELETED:
                continue
            file = entry.data_file
            if file.key_metadata is not None:
                raise _encrypted(file.file_path)
            file.spec_id = manifest.partition_spec_id
            sequence = manifest.sequence_number if entry.sequence_number is None else entry.sequence_number
            partition = tuple(_comparable(file.partition[i]) for i in range(len(file.partition)))
            entries.append(Entry(sequence=sequence, partition=(manifest.partition_spec_id, partition), file=file))
    return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deletes:
    """The delete files of a snapshot, by what they can apply to."""

    vectors: dict[str, list[Entry]]
    positions_of_file: dict[str, list[Entry]]
    positions_of_partition: dict[_Partition, list[Entry]]
    equalities_of_partition: dict[_Partition, list[Entry]]
    equalities_of_all: list[Entry]
    whole: set[int]
    """The partitionings that have no fields: one partition is the whole table."""

    @classmethod
    def of(cls, entries: Iterable[Entry], whole: set[int]) -> _Deletes:
        made = cls(
            vectors=defaultdict(list),
            positions_of_file=defaultdict(list),
            positions_of_partition=defaultdict(list),
            equalities_of_partition=defaultdict(list),
            equalities_of_all=[],
            whole=whole,
        )
        for entry in entries:
            made._add(entry)
        return made

    def _add(self, entry: Entry) -> None:
        file = entry.file
        only = _only_file(entry)
        if file.content == DataFileContent.EQUALITY_DELETES:
            if entry.partition[0] in self.whole:
                self.equalities_of_all.append(entry)
            else:
                self.equalities_of_partition[entry.partition].append(entry)
        elif file.content != DataFileContent.POSITION_DELETES:
            raise TableError(f"{file.file_path!r} is of an unknown content ({file.content}): upgrade lakeckpt")
        elif file.file_format == FileFormat.PUFFIN:
            if only is None or entry.get("content_offset") is None or entry.get("content_size_in_bytes") is None:
                raise TableError(
                    f"the deletion vector in {file.file_path!r} does not name its data file, or where it "
                    "lies: write the deletes again"
                )
            self.vectors[only].append(entry)
        else:
            self.positions_of_partition[entry.partition].append(entry)
            if only is not None:
                self.positions_of_file[only].append(entry)

    def vector(self, data: Entry) -> Entry | None:
        path = data.file.file_path
        found = [one for one in self.vectors.get(path, ()) if one.sequence >= data.sequence]
        if len(found) > 1:
            raise TableError(
                f"the data file {path!r} has {len(found)} deletion vectors ({found[0].file.file_path!r}, "
                f"{found[1].file.file_path!r}): a snapshot has one at most. Write the deletes again"
            )
        return found[0] if found else None

    def positions(self, data: Entry) -> tuple[Entry, ...]:
        path = data.file.file_path
        candidates = [*self.positions_of_file.get(path, ()), *self.positions_of_partition.get(data.partition, ())]
        applying = (one for one in candidates if one.sequence >= data.sequence and _may_hold(one, path))
        return tuple({one.location: one for one in applying}.values())

    def equalities(self, data: Entry) -> tuple[Entry, ...]:
        candidates = [*self.equalities_of_all, *self.equalities_of_partition.get(data.partition, ())]
        return tuple(one for one in candidates if one.sequence > data.sequence)


def _only_file(entry: Entry) -> str | None:
    """Return the one data file that all deletes of a file are for, if its manifest names it."""
    named = entry.get("referenced_data_file")
    if named is not None:
        return str(named)
    lower, upper = _path_bounds(entry)
    return lower if lower is not None and lower == upper else None


def _may_hold(entry: Entry, path: str) -> bool:
    """Return whether the bounds of the paths in a delete file include ``path``; bounds of long paths are cut."""
    lower, upper = _path_bounds(entry)
    return (lower is None or lower <= path) and (upper is None or path <= upper or path.startswith(upper))


def _path_bounds(entry: Entry) -> tuple[str | None, str | None]:
    lower = (entry.file.lower_bounds or {}).get(PATH_FIELD_ID)
    upper = (entry.file.upper_bounds or {}).get(PATH_FIELD_ID)
    try:
        return tuple(None if one is None else from_bytes(StringType(), one) for one in (lower, upper))  # type: ignore[return-value]
    except UnicodeDecodeError:  # cut inside a character
        return None, None


def _comparable(value: object) -> object:
    """Return a partition's value that equals itself: NaN does not."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _encrypted(location: str) -> TableError:
    return TableError(
        f"{location!r} is encrypted (it has key metadata): encrypted Iceberg tables are not read. "
        "Copy the rows to a table without encryption"
    )
