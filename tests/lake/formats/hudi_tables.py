"""Hudi tables for tests: crafted by the format's specification (table version 6), or those that Spark wrote.

https://hudi.apache.org/tech-specs: the timeline's files (``<instant>.commit`` of JSON), the names of base files
(``<file id>_<write token>_<instant>.parquet``) and Hudi's own columns. It knows nothing of lakeckpt.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hudi import HudiReadOptions, HudiTableBuilder

SPARK = Path(__file__).parent / "hudi_spark"
_AVRO: dict[str, Any] = {
    "int64": "long",
    "int32": "int",
    "string": "string",
    "double": "double",
    "float": "float",
    "bool": "boolean",
    "binary": "bytes",
    "date32[day]": {"type": "int", "logicalType": "date"},
    "timestamp[us, tz=UTC]": {"type": "long", "logicalType": "timestamp-micros"},
    "decimal128(8, 2)": {"type": "fixed", "name": "d", "size": 4, "logicalType": "decimal", "precision": 8, "scale": 2},
}


def avro(schema: pa.Schema) -> str:
    """The schema as commits write it."""
    fields = [{"name": f.name, "type": ["null", _avro_of(f.type, f.name)], "default": None} for f in schema]
    return json.dumps({"type": "record", "name": "row", "fields": fields})


def _avro_of(kind: pa.DataType, name: str) -> Any:
    if pa.types.is_list(kind):
        return {"type": "array", "items": ["null", _avro_of(kind.value_type, name + "_item")]}
    if pa.types.is_struct(kind):
        fields = [{"name": f.name, "type": ["null", _avro_of(f.type, f"{name}_{f.name}")]} for f in kind]
        return {"type": "record", "name": f"r_{name}", "fields": fields}
    if pa.types.is_map(kind):
        return {"type": "map", "values": ["null", _avro_of(kind.item_type, name + "_value")]}
    return _AVRO[str(kind)]


@dataclass
class Crafted:
    """A table; ``properties`` are added to those of a plain copy-on-write table."""

    root: Path
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = {
            "hoodie.table.name": "crafted",
            "hoodie.table.type": "COPY_ON_WRITE",
            "hoodie.table.version": "6",
            "hoodie.timeline.layout.version": "1",
            "hoodie.table.base.file.format": "PARQUET",
            "hoodie.table.recordkey.fields": "id",
            "hoodie.table.timeline.timezone": "UTC",
        }
        log = self.root / ".hoodie"
        log.mkdir(parents=True)
        lines = [f"{name}={value}\n" for name, value in {**told, **self.properties}.items()]
        (log / "hoodie.properties").write_text("".join(lines))

    def commit(
        self,
        instant: str,
        files: Mapping[tuple[str, str], pa.Table],
        *,
        action: str = "commit",
        replaced: Mapping[str, list[str]] | None = None,
        schema: pa.Schema | None = None,
        complete: bool = True,
        before: str = "null",
        **extra: str,
    ) -> None:
        """Write the files of an instant by (partition path, file id), then the instant, completed or not."""
        stats: dict[str, list[dict[str, Any]]] = {}
        for (partition, file_id), rows in files.items():
            path = self.base_file(partition, file_id, instant, rows)
            schema = rows.schema if schema is None else schema
            stats.setdefault(partition, []).append(
                {
                    "fileId": file_id,
                    "path": str(path.relative_to(self.root)),
                    "prevCommit": before,
                    "numWrites": rows.num_rows,
                    "partitionPath": partition,
                    "fileSizeInBytes": path.stat().st_size,
                }
            )
        told: dict[str, Any] = {"partitionToWriteStats": stats, "compacted": False, "operationType": "UPSERT"}
        told["extraMetadata"] = {**({} if schema is None else {"schema": avro(schema)}), **extra}
        if replaced is not None:
            told["partitionToReplaceFileIds"] = replaced
        log = self.root / ".hoodie"
        (log / f"{instant}.{action}.requested").touch()
        (log / f"{instant}.{'inflight' if action == 'commit' else action + '.inflight'}").touch()
        if complete:
            (log / f"{instant}.{action}").write_text(json.dumps(told))

    def base_file(self, partition: str, file_id: str, instant: str, rows: pa.Table) -> Path:
        folder = self.root / partition
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_id}_0-1-0_{instant}.parquet"
        count = rows.num_rows
        own = {
            "_hoodie_commit_time": [instant] * count,
            "_hoodie_commit_seqno": [f"{instant}_0_{row}" for row in range(count)],
            "_hoodie_record_key": [str(row) for row in range(count)],
            "_hoodie_partition_path": [partition] * count,
            "_hoodie_file_name": [path.name] * count,
        }
        own = {} if self.properties.get("hoodie.populate.meta.fields") == "false" else own
        columns = {name: pa.array(values, pa.string()) for name, values in own.items()}
        pq.write_table(pa.table(columns | dict(zip(rows.column_names, rows.columns, strict=True))), path)
        (folder / ".hoodie_partition_metadata").write_text(f"commitTime={instant}\npartitionDepth=1\n")
        return path


def written_by_spark(name: str, folder: Path) -> Path:
    """Unpack a table that Spark wrote; its root."""
    with zipfile.ZipFile(SPARK / f"{name}.zip") as packed:
        packed.extractall(folder)
    found = [path.parent.parent for path in folder.rglob("hoodie.properties") if "metadata" not in path.parts]
    return min(found, key=lambda path: len(path.parts))


def instants(root: Path) -> list[str]:
    """The completed instants of a table, oldest first, by the names of the timeline's files."""
    log = root / ".hoodie" / "timeline" if (root / ".hoodie" / "timeline").is_dir() else root / ".hoodie"
    done = [path for path in log.iterdir() if path.suffix in (".commit", ".deltacommit", ".replacecommit")]
    return sorted(path.stem.partition("_")[0] for path in done)


def theirs(root: Path | str, instant: str | None = None, **options: str) -> list[pa.RecordBatch]:
    """What hudi's own reader finds."""
    asked = HudiReadOptions() if instant is None else HudiReadOptions().with_as_of_timestamp(instant)
    return HudiTableBuilder.from_base_uri(str(root)).with_storage_options(options).build().read(asked)
