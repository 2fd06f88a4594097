"""``lakeckpt digest``: what it records is what reading compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from lakeckpt import open_table
from lakeckpt.cli.main import main
from lakeckpt.errors import DataFileDamaged
from lakeckpt.reading.decode import RowGroupDecoder
from tests.reading.cases import write_file
from tests.reading.damage import Damage


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    groups = [pa.table({"x": [1, 2, 3], "y": ["a", "b", "c"]})] * 2
    write_file(tmp_path / "lake" / "a.parquet", groups, compression="none", use_dictionary=False)
    return tmp_path / "lake"


def test_what_was_recorded_tells_damage_that_would_decode(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lake.parent / "run"
    assert main(["digest", str(lake), "--into", str(run), "--columns", "x", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["files"], told["chunks"]) == (1, 2) and (run / told["path"]).is_file()
    table = open_table(lake, digests=run)
    Damage(table).hurt("a.parquet", 1)
    assert RowGroupDecoder(open_table(lake)).decode(1, 0, 3).num_rows == 3  # wrong rows, without a word
    with pytest.raises(DataFileDamaged, match="column 'x' of row group 1"):
        RowGroupDecoder(table).decode(1, 0, 3)


def test_people_are_told_what_to_do_with_it(
    lake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["digest", str(lake), "--into", str(lake.parent / "run")]) == 0
    assert "4 column chunks of 1 file recorded by now in digests/" in capsys.readouterr().out


def test_a_damaged_table_is_not_recorded(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lake / "a.parquet"
    path.write_bytes(b"PAR1" + bytes(path.stat().st_size - 8) + b"PAR1")
    assert main(["digest", str(lake), "--into", str(lake.parent / "run")]) == 2
    assert "a.parquet" in capsys.readouterr().err and not (lake.parent / "run").exists()
