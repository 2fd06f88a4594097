"""Parquet files that lie, are encrypted, or decode to far more than they are."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe


def varint(number: int) -> bytes:
    """A number as thrift's compact protocol writes integers."""
    number = (number << 1) ^ (number >> 63)
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def lie(path: Path, said: int, instead: int, *, field: int = 0x16, which: int = 0) -> Path:
    """Let the footer say ``instead`` where it says ``said`` in a field with the header byte ``field``."""
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[-8:-4])
    footer = content[-8 - length : -8]
    old, new = bytes([field]) + varint(said), bytes([field]) + varint(instead)
    at = -1
    for _ in range(which + 1):
        at = footer.index(old, at + 1)
    footer = footer[:at] + new + footer[at + len(old) :]
    path.write_bytes(content[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return path


class _Kms(pe.KmsClient):  # type: ignore[misc]
    def __init__(self, _config: Any) -> None:
        pe.KmsClient.__init__(self)

    def wrap_key(self, key_bytes: bytes, _master_key_identifier: str) -> bytes:
        return key_bytes

    def unwrap_key(self, wrapped_key: bytes, _master_key_identifier: str) -> bytes:
        return wrapped_key


def write_encrypted(path: Path, table: pa.Table, *, columns: list[str], plaintext_footer: bool) -> Path:
    """Write ``table`` with these columns encrypted by a key of their own."""
    factory = pe.CryptoFactory(_Kms)
    config = pe.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": columns}, plaintext_footer=plaintext_footer
    )
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return path


def write_two_level_list(path: Path, values: list[list[int]]) -> Path:
    """Write lists as old writers (parquet-avro, Hive) do: ``optional group x (LIST) { repeated int64 element }``.

    Levels are those of lists of three levels, so only the schema in the footer is another.
    """
    element = pa.field("element", pa.int64(), nullable=False)
    pq.write_table(pa.table({"x": pa.array(values, pa.list_(element))}), path, store_schema=False)
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[-8:-4])
    footer = content[-8 - length : -8]
    for old, new in [
        (b"\x19\x4c", b"\x19\x3c"),  # the schema has one element less:
        (b"\x35\x04\x18\x04list\x15\x02\x00", b""),
        (b"\x15\x04\x25\x00\x18\x07element", b"\x15\x04\x25\x04\x18\x07element"),  # required becomes repeated
    ]:
        assert footer.count(old) >= 1, f"another footer than pyarrow {pa.__version__} was known to write"
        footer = footer.replace(old, new, 1)
    path.write_bytes(content[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return path
