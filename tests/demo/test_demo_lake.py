"""The demo's lake: real text, every byte of it, cut unevenly, the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lakeckpt.demo.lake import build_lake, lake_ids
from lakeckpt.errors import ConfigError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for name, size in (("b.py", 3000), ("a/x.py", 7777), ("a/empty.py", 0), ("a.txt", 50), ("site-packages/c.py", 999)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(32 + (len(name) * 7 + i * 13) % 90 for i in range(size)))
    return root


def test_the_lake_holds_the_joined_text_of_the_sources_in_the_order_of_their_paths(
    library: Path, tmp_path: Path
) -> None:
    rows = build_lake(tmp_path / "lake", block=64, source=library)
    table = pq.ParquetDataset(tmp_path / "lake").read()
    text = (library / "a/x.py").read_bytes() + (library / "b.py").read_bytes()
    held = b"".join(bytes(row) for row in table.column("tokens").to_pylist())
    assert held == text.ljust(len(held), b"\n")
    assert rows == len(table) == -(-len(text) // 64)


def test_ids_count_the_rows(library: Path, tmp_path: Path) -> None:
    build_lake(tmp_path / "lake", block=64, source=library)
    table = pq.ParquetDataset(tmp_path / "lake").read()
    assert table.column("id").to_pylist() == list(range(len(table)))
    assert np.array_equal(lake_ids(tmp_path / "lake"), np.arange(len(table)))


def test_files_and_row_groups_are_several_and_uneven(library: Path, tmp_path: Path) -> None:
    rows = build_lake(tmp_path / "lake", block=64, source=library)
    groups = [
        pq.read_metadata(path).row_group(group).num_rows
        for path in sorted((tmp_path / "lake").iterdir())
        for group in range(pq.read_metadata(path).num_row_groups)
    ]
    files = len(list((tmp_path / "lake").iterdir()))
    assert len(groups) > files >= 5
    assert sum(groups) == rows
    assert min(groups) < max(groups)


def test_one_library_gives_one_lake_byte_for_byte(library: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build_lake(tmp_path / name, block=64, source=library)
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_max_rows_takes_the_first_rows(library: Path, tmp_path: Path) -> None:
    build_lake(tmp_path / "all", block=64, source=library)
    assert build_lake(tmp_path / "some", block=64, source=library, max_rows=100) == 100
    everything = pq.ParquetDataset(tmp_path / "all").read()
    assert pq.ParquetDataset(tmp_path / "some").read().equals(everything.slice(0, 100))


def test_a_python_without_its_source_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="at least 64 are needed"):
        build_lake(tmp_path / "lake", source=tmp_path / "none")
