"""Commits that deltalake cannot write, by the Delta protocol: deletion vectors, column mapping, other features.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Deletion Vectors" (format and descriptors) and "Table
Features". The bitmaps themselves are pyroaring's. It knows nothing of lakeckpt.
"""

from __future__ import annotations

import base64
import json
import struct
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

MAGIC = 1681511377
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85 = bytes.maketrans(_B85, _Z85)
Kind = Literal["inline", "relative", "absolute"]


def z85(data: bytes) -> str:
    assert len(data) % 4 == 0
    return base64.b85encode(data).translate(_TO_Z85).decode()


def versions(root: Path) -> list[int]:
    return sorted(int(p.stem) for p in (root / "_delta_log").glob("*.json") if p.stem.isdigit())


def commit(root: Path, actions: Iterable[dict[str, Any]]) -> int:
    """Write the next version of a table; returns its number."""
    number = max(versions(root), default=-1) + 1
    log = root / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"commitInfo": {"timestamp": 1_700_000_000_000 + number, "operation": "TEST"}})]
    (log / f"{number:020}.json").write_text("\n".join([*lines, *map(json.dumps, actions)]) + "\n")
    return number


def vector(root: Path, rows: Iterable[int], kind: Kind, *, magic: int = MAGIC, broken: bool = False) -> dict[str, Any]:
    """The descriptor of a deletion vector of these rows, whose file is written where it has one."""
    bitmap = BitMap64(rows)
    data = struct.pack("<i", magic) + bitmap.serialize()
    found = {"sizeInBytes": len(data), "cardinality": len(bitmap)}
    if kind == "inline":
        return {"storageType": "i", "pathOrInlineDv": z85(data + bytes(-len(data) % 4)), **found}
    name, prefix = uuid.uuid4(), "ab" if kind == "relative" else ""
    path = root / prefix / f"deletion_vector_{name}.bin"
    path.parent.mkdir(exist_ok=True)
    checksum = zlib.crc32(data) ^ broken
    path.write_bytes(b"\1" + struct.pack(">i", len(data)) + data + struct.pack(">I", checksum))
    if kind == "relative":
        return {"storageType": "u", "pathOrInlineDv": prefix + z85(name.bytes), "offset": 1, **found}
    return {"storageType": "p", "pathOrInlineDv": path.as_uri(), "offset": 1, **found}


def upgrade(*features: str) -> dict[str, Any]:
    """The protocol action of a table that needs these features to be read."""
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": list(features),
            "writerFeatures": list(features),
        }
    }


def adds(root: Path) -> dict[str, dict[str, Any]]:
    """The add actions of the newest version by path, read from the JSON commits."""
    found: dict[str, dict[str, Any]] = {}
    for number in versions(root):
        for line in (root / "_delta_log" / f"{number:020}.json").read_text().splitlines():
            action = json.loads(line)
            if "remove" in action:
                found.pop(action["remove"]["path"], None)
            if "add" in action:
                found[action["add"]["path"]] = action["add"]
    return found


def delete_rows(root: Path, rows: dict[str, Iterable[int]], kind: Kind = "relative", **how: Any) -> int:
    """Delete rows of files (by their path in the log) by deletion vectors that stand for any that they had."""
    active, actions = adds(root), []
    for path, ordinals in rows.items():
        add = active[path]
        old = {"path": path, "deletionTimestamp": 1, "dataChange": True}
        if add.get("deletionVector"):
            old["deletionVector"] = add["deletionVector"]
        actions += [{"remove": old}, {"add": {**add, "deletionVector": vector(root, ordinals, kind, **how)}}]
    return commit(root, actions)


def write_mapped(
    root: Path, mode: Literal["name", "id"], schema: list[dict[str, Any]], files: list[tuple[str, pa.Table, dict]]
) -> int:
    """A table with column mapping: fields of its schema, and (path, contents, partition values) of its files."""
    root.mkdir(exist_ok=True)
    partitions = list(files[0][2]) if files else []
    logical = {f["metadata"]["delta.columnMapping.physicalName"]: f["name"] for f in schema}
    actions: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": schema}),
                "partitionColumns": [logical[name] for name in partitions],
                "configuration": {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "99"},
                "createdTime": 1,
            }
        },
    ]
    return commit(root, [*actions, *(add_file(root, path, table, values) for path, table, values in files)])


def add_file(root: Path, path: str, table: pa.Table, values: dict[str, str | None]) -> dict[str, Any]:
    """Write a data file, and return its add action."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / path)
    return {
        "add": {
            "path": path,
            "partitionValues": values,
            "size": (root / path).stat().st_size,
            "modificationTime": 1,
            "dataChange": True,
            "stats": json.dumps({"numRecords": table.num_rows}),
        }
    }
