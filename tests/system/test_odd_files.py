"""Public collections of odd Parquet files, fetched with pip, as their authors published them.

* fastparquet 0.4.1: files of Impala, parquet-mr, Spark, Hive and old pandas (maps, decimals, 96-bit timestamps, pages
  that end inside of a row, no columns, no rows, 48 files in folders).
* awkward 1.10.5: files of parquet-avro and Arrow: lists of two levels, nested up to three deep, nullable everywhere.
* pyarrow's own, which are installed with it: files of its version 0.7.1.

Each is read as pyarrow reads it, or refused with an error of ours; and how many of each there are is known.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow.tests
import pytest

from tests.reading.same_rows import held_to_pyarrow

COLLECTIONS = {
    "fastparquet==0.4.1": "a6501352c875416471c875ace0ff702a7889e14eeda4c12eaaed8307fd485f6a",
    "awkward==1.10.5": "d5849850fdc1be00fd9b20b4420ab286517cf04427e0e0d20eca530dba568974",
}
EXPECTED = {
    "fastparquet==0.4.1": {"read": 69, "refused": 1},
    "awkward==1.10.5": {"read": 16, "refused": 1},
}


@pytest.mark.parametrize("package", COLLECTIONS)
def test_every_file_of_a_public_collection_is_read_as_pyarrow_reads_it_or_refused(package: str, tmp_path: Path) -> None:
    wanted = tmp_path / "requirements.txt"
    wanted.write_text(f"{package} --hash=sha256:{COLLECTIONS[package]}\n")
    options = [
        "--no-deps",
        "--no-binary",
        ":all:",
        "--require-hashes",
        "--no-build-isolation",
        "--quiet",
        "--disable-pip-version-check",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(wanted), "-d", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python has since 3.11.4
        packed.extractall(tmp_path / "files")
    files = [one for one in sorted((tmp_path / "files").rglob("*")) if one.suffix in (".parquet", ".parq")]
    assert Counter(held_to_pyarrow(path) for path in files if path.is_file()) == EXPECTED[package]


def test_files_of_old_arrow_are_read_as_pyarrow_reads_them() -> None:
    files = sorted((Path(pyarrow.tests.__file__).parent / "data" / "parquet").glob("*.parquet"))
    assert [held_to_pyarrow(path) for path in files] == ["read"] * len(files) and files
