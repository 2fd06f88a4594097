"""What does one measured process read, and how?  A `Case`: plain values, so that it crosses to another interpreter."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One reader, one data set, one way to read it."""

    reader: str
    """Name in `benchmarks.readers.registry`."""
    table: str
    """Name of the data set, for tables and pictures."""
    folder: str
    """The data set: a folder of Parquet files with a column ``row``, int64, that numbers the rows 0, 1, 2, …"""
    rows: int
    row_bytes: float
    """Bytes of a row's values, as delivered: the same for every reader."""
    batch_size: int
    workers: int = 0
    """Worker processes, or threads where the reader has no processes of its own."""
    shuffle: bool = False
    seed: int = 7
    rank: int = 0
    world_size: int = 1
    length: int = 0
    """Documents are packed into sequences of so many tokens, which ``batch_size`` counts; 0: rows as they are."""
    sources: int = 0
    """So many tables are mixed, without an end (`benchmarks.readers.streams.sources`); 0: this one, by epochs."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.batch_size < 1 or self.workers < 0 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"not a case: {asdict(self)}")
        if self.length < 0 or self.sources < 0:
            raise ValueError(f"not a case: {asdict(self)}")

    @property
    def files(self) -> list[Path]:
        """The Parquet files, in the table's order."""
        return sorted(Path(self.folder).glob("*.parquet"))

    def converted(self, reader_format: str) -> Path:
        """Where the same rows lie in a format of a reader's own, beside the Parquet files; made by `Reader.prepare`."""
        folder = Path(self.folder)
        return folder.parent / f"{folder.name}.{reader_format}"

    @property
    def name(self) -> str:
        """How the case is called in logs."""
        order = "shuffled" if self.shuffle else "in order"
        stream = f", sequences of {self.length}" * bool(self.length) + f", {self.sources} sources" * bool(self.sources)
        return f"{self.table}, batch {self.batch_size}, {self.reader}, {self.workers} workers, {order}{stream}"

    def to_json(self) -> str:
        """The case as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case that `to_json` wrote."""
        return cls(**json.loads(text))
