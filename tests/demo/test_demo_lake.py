"""The demo's lake: real text in documents of uneven lengths, a number for each token, the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lakeckpt.demo.lake import build_lake, lake_numbers
from lakeckpt.demo.scenario import LENGTH
from lakeckpt.errors import ConfigError

SEQUENCES = {"code": 100}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    root.mkdir()
    paragraphs = [bytes(33 + (i * 7 + j * 13) % 90 for j in range(3 + i * 37 % 150)) for i in range(120)]
    (root / "b.py").write_bytes(b"\n\n\n".join(paragraphs[60:]))
    (root / "a.py").write_bytes(b"\n\n".join(paragraphs[:60]))
    (root / "a.txt").write_text("no Python")
    return root


def documents(folder: Path) -> list[bytes]:
    table = pq.ParquetDataset(folder).read()
    return [bytes(token & 0xFF for token in row) for row in table.column("tokens").to_pylist()]


def test_documents_are_the_paragraphs_of_the_sources_in_the_order_of_their_paths(library: Path, tmp_path: Path) -> None:
    build_lake(tmp_path / "lake", SEQUENCES, library=library)
    text = b"\n\n".join((library / name).read_bytes().replace(b"\n\n\n", b"\n\n") for name in ("a.py", "b.py"))
    paragraphs = [one + b"\n" for one in text.split(b"\n\n")]
    *whole, last = documents(tmp_path / "lake" / "code")
    assert whole == paragraphs[: len(whole)]
    assert last and paragraphs[len(whole)].startswith(last)
    assert len({len(one) for one in whole}) > 10


def test_a_table_has_a_whole_number_of_sequences_and_each_token_its_own_number(library: Path, tmp_path: Path) -> None:
    build_lake(tmp_path / "lake", {"code": 60, "prose": 40}, library=library)
    numbers = [lake_numbers(tmp_path / "lake" / source) for source in ("code", "prose")]
    assert [len(one) for one in numbers] == [60 * LENGTH, 40 * LENGTH]
    assert np.array_equal(np.concatenate(numbers), np.arange(100 * LENGTH))


def test_prose_is_text_in_words(tmp_path: Path) -> None:
    build_lake(tmp_path / "lake", {"prose": 100})
    assert b" the " in b"".join(documents(tmp_path / "lake" / "prose"))


def test_files_and_row_groups_are_several_and_uneven(library: Path, tmp_path: Path) -> None:
    build_lake(tmp_path / "lake", SEQUENCES, library=library)
    files = [pq.read_metadata(path) for path in sorted((tmp_path / "lake" / "code").iterdir())]
    groups = [file.row_group(number).num_rows for file in files for number in range(file.num_row_groups)]
    assert len(groups) > len(files) >= 5
    assert min(groups) < max(groups)


def test_one_library_gives_one_lake_byte_for_byte(library: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build_lake(tmp_path / name, SEQUENCES, library=library)
    for path in sorted((tmp_path / "one").rglob("*.parquet")):
        assert path.read_bytes() == (tmp_path / "two" / "code" / path.name).read_bytes()


@pytest.mark.parametrize("sequences", [{"code": 1_000_000}, {"code": 100, "prose": 1_000_000}])
def test_a_python_with_too_little_text_is_an_error(sequences: Mapping[str, int], library: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than 64,000,000 bytes of"):
        build_lake(tmp_path / "lake", sequences, library=library)
