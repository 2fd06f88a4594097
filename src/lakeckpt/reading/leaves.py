"""Which columns of the lowest level make up the columns that are wanted of a file?

Asks a footer, and never a column chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.reading.pages import Leaf

__all__ = ["leaves_of"]


def leaves_of(metadata: pq.FileMetaData, schema: pa.Schema, columns: Sequence[str]) -> dict[int, Leaf]:
    """The columns of the lowest level of ``columns``, by their ordinal in the file."""
    counts = [_leaf_count(field.type) for field in schema]
    names = [name for name, count in zip(schema.names, counts, strict=True) for _ in range(count)]
    if len(names) != metadata.num_columns:  # types that pyarrow shows otherwise than they are stored
        names = [metadata.schema.column(leaf).path.split(".")[0] for leaf in range(metadata.num_columns)]
    wanted, dotted = set(columns), [name for name in columns if "." in name]
    found = {}
    for ordinal, name in enumerate(names):
        if name not in wanted and not dotted:
            continue  # asking pyarrow about each column of a wide file takes longer than decoding a few
        column = metadata.schema.column(ordinal)
        # pyarrow selects by path: a column called "a.b" comes with the field b of a struct a.
        also = next((one for one in dotted if f"{column.path}.".startswith(f"{one}.")), None)
        if name in wanted or also is not None:
            name = name if name in wanted else str(also)
            nested = column.max_repetition_level > 0
            found[ordinal] = Leaf(name=name, nested=nested, width=_width(column))
    return found


def _leaf_count(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _leaf_count(kind.value_type)
    if not kind.num_fields:
        return 0 if pa.types.is_struct(kind) else 1
    return sum(_leaf_count(kind.field(number).type) for number in range(kind.num_fields))


def _width(column: Any) -> int:
    """Bytes of one value of a type of fixed width, as Arrow holds it; 0: as its physical type says."""
    if column.logical_type.type == "DECIMAL":
        return 32 if column.precision > 38 else 16
    return int(column.length) if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0
