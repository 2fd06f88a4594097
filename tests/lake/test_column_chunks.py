"""Patterns and the walk say the same of column chunks, damaged ones too; and what writers write is regular."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.lake import column_chunks
from lakeckpt.lake.column_chunks import ChunkFacts, chunk_facts
from tests.lake.tables import footer_of

TABLE = pa.table(
    {
        "numbers": range(6),
        "short": ["a", None, "b", "c", "dd", ""],
        "long": ["y" * 200] * 6,
        "lists": [[1.5], [], None, [2.5, 3.5], [], []],
        "structs": [{"e": True, "f": b"x"}, None] * 3,
        "maps": pa.array([[("k", 1)], None] * 3, pa.map_(pa.string(), pa.int8())),
        "nothing": pa.nulls(6),
        "a name of more than sixty-three characters, which no pattern takes for a text": np.zeros(6, np.float32),
    }
)
WRITTEN: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "without dictionaries": {"use_dictionary": False, "compression": "none"},
    "with indexes and checksums": {"write_page_index": True, "write_page_checksum": True, "compression": "zstd"},
    "without statistics": {"write_statistics": False, "version": "1.0", "data_page_version": "2.0"},
    "of fifty row groups": {"row_group_size": 1},
}


def footer(**options: Any) -> bytes:
    out = io.BytesIO()
    table = pa.concat_tables([TABLE] * 9) if "row_group_size" in options else TABLE
    pq.write_table(table, out, **options)
    return footer_of(out.getvalue())


def told_by_pyarrow(encoded: bytes) -> list[list[list[int]]]:
    """Values, sizes and places of all column chunks."""
    whole = b"PAR1" + encoded + len(encoded).to_bytes(4, "little") + b"PAR1"
    metadata = pq.read_metadata(pa.BufferReader(whole))
    found = []
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(leaf) for leaf in range(metadata.num_columns)]
        found.append(
            [
                [
                    chunk.num_values,
                    chunk.total_uncompressed_size,
                    chunk.total_compressed_size,
                    chunk.data_page_offset,
                    chunk.dictionary_page_offset or -1,
                ]
                for chunk in chunks
            ]
        )
    return found


def facts_or_error(encoded: bytes, leaves: list[int]) -> Any:
    try:
        return chunk_facts(encoded, leaves).tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("how", WRITTEN)
def test_facts_are_those_of_pyarrow(how: str) -> None:
    encoded = footer(**WRITTEN[how])
    expected = np.array(told_by_pyarrow(encoded))
    for leaves in (list(range(expected.shape[1])), [5, 0, 3], []):
        found = chunk_facts(encoded, leaves)
        assert found.shape == (len(expected), len(leaves), len(ChunkFacts.__slots__))
        assert np.array_equal(found[:, :, 2:], expected[:, leaves])


@pytest.mark.parametrize("how", WRITTEN)
def test_most_that_writers_write_is_regular(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = footer(**WRITTEN[how])
    walked: list[str] = []
    for name in ("read_value", "skip_value"):
        inner = getattr(column_chunks, name)
        monkeypatch.setattr(
            column_chunks, name, lambda *args, name=name, inner=inner: walked.append(name) or inner(*args)
        )
    leaves = np.array(told_by_pyarrow(encoded)).shape[1]
    groups = len(chunk_facts(encoded, list(range(leaves))))
    assert len(walked) <= 2 * groups, "only the long name, and statistics of long texts, are walked"
    walked.clear()
    chunk_facts(encoded, [0])
    assert set(walked) <= {"skip_value"} and len(walked) <= 2 * groups


@pytest.mark.parametrize("how", WRITTEN)
def test_patterns_and_the_walk_agree_on_damaged_footers(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, draw, read = footer(**WRITTEN[how]), random.Random(3), 0
    leaves = [7, 0, 2, 4]
    for number in range(60):
        hurt = bytearray(encoded)
        for _ in range(draw.choice([0, 1, 2, 8]) if number else 0):
            hurt[draw.randrange(len(hurt))] = draw.randrange(256)
        found = facts_or_error(bytes(hurt), leaves)
        with monkeypatch.context() as patch:
            patch.setattr(column_chunks, "skipped", lambda data, at: None)
            patch.setattr(column_chunks, "taken", lambda data, at: None)
            assert facts_or_error(bytes(hurt), leaves) == found
        read += isinstance(found, list)
    assert read > 15


def test_a_row_group_that_lacks_a_column_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="row group 0 does not list the column chunks that its schema has"):
        chunk_facts(footer(), [99])
