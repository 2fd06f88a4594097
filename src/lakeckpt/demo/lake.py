"""This module writes the tables that the demo trains on, from text that comes with Python.

``prose`` is the reference manual of the language, as Python's ``help()`` has it, and ``code`` the source text of the
standard library. A document is what stands between blank lines, so documents have between a few and some thousand
bytes. A row is one document: ``tokens``, a list of int32. The low byte of a token is a
byte of the text, which is what the model reads. The other bits are the token's *number*, which no other token of the
lake has. The verdict counts these numbers.

Each table has a whole number of sequences, so no sequence has tokens of two epochs. Files get uneven sizes by a fixed
rule, so one Python always gives one lake. The last row group of a file is smaller than the others.

`lake_numbers` reads a table with pyarrow alone, because the verdict is compared with these numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.demo.scenario import LENGTH
from lakeckpt.errors import ConfigError

__all__ = ["build_lake", "lake_numbers", "prose"]

_FILE_SHARES = (13, 5, 21, 8, 3, 17, 11, 22)
_GROUPS = 48


def build_lake(folder: Path, sequences: Mapping[str, int], *, library: Path | None = None) -> None:
    """Write one table for each source into ``folder``, which is made.

    Args:
        folder: where the tables go, each a folder of Parquet files.
        sequences: source → how many sequences of `LENGTH` tokens its table has.
        library: where the ``*.py`` files of ``code`` are; None: the standard library.

    Raises `ConfigError` if there is less text than that.
    """
    root = library or Path(sysconfig.get_path("stdlib"))
    first = 0
    for source, count in sequences.items():
        size = count * LENGTH
        documents = _first_documents(prose() if source == "prose" else _code(root), size)
        if sum(map(len, documents)) < size:
            raise ConfigError(
                f"the demo trains on text that comes with Python, and there are less than {size:,} bytes of {source} "
                f"in {root}: run it with a Python whose library is unpacked"
            )
        _write(folder / source, documents, first)
        first += size


def lake_numbers(folder: Path) -> npt.NDArray[np.int64]:
    """Return the number of every token of the table in ``folder``, int64[tokens], sorted, as pyarrow alone reads it."""
    tokens = pq.ParquetDataset(folder).read(columns=["tokens"]).column("tokens").combine_chunks().flatten()
    return np.sort(tokens.to_numpy().astype(np.int64) >> 8)


def prose() -> Iterator[bytes]:
    """Yield the help texts that come with Python, in UTF-8: English prose. Some Pythons have none."""
    with contextlib.suppress(ModuleNotFoundError):  # not every Python has it
        yield from (text.encode() for text in import_module("pydoc_data.topics").topics.values())


def _code(root: Path) -> Iterator[bytes]:
    return (path.read_bytes() for path in sorted(root.glob("*.py")))


def _first_documents(texts: Iterator[bytes], size: int) -> list[bytes]:
    """Return the first documents of ``texts``: ``size`` bytes together, the last one cut, or all that there are."""
    found: list[bytes] = []
    for document in (one for text in texts for one in text.split(b"\n\n") if one.strip()):
        found.append((document.strip(b"\n") + b"\n")[:size])
        size -= len(found[-1])
        if not size:
            break
    return found


def _write(folder: Path, documents: list[bytes], first: int) -> None:
    """Write ``documents`` as a table whose tokens are numbered from ``first``."""
    folder.mkdir(parents=True)
    text = np.frombuffer(b"".join(documents), np.uint8).astype(np.int32)
    tokens = (np.arange(first, first + len(text), dtype=np.int32) << 8) | text
    ends = np.cumsum([0, *map(len, documents)], dtype=np.int32)
    table = pa.table({"tokens": pa.ListArray.from_arrays(ends, tokens)})
    borders = np.cumsum([0, *_FILE_SHARES]) * len(documents) // sum(_FILE_SHARES)
    for number, (start, stop) in enumerate(itertools.pairwise(borders.tolist())):
        path = folder / f"part-{number:03d}.parquet"
        pq.write_table(table.slice(start, stop - start), path, row_group_size=-(-len(documents) // _GROUPS))
