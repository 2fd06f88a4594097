"""Which readers are there, where is each installed, and in which ways is it measured?

`READERS` deliver the rows of a table, `STREAMS` packed sequences and mixtures (`benchmarks.readers.streams`).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

from benchmarks.readers.reader import Reader

__all__ = ["ENTRIES", "READERS", "STREAMS", "Entry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A reader of the table."""

    label: str
    """What tables and pictures call it."""
    place: str
    """Module and class, below `benchmarks.readers.adapters`."""
    package: str
    """The distribution whose version is told."""
    kind: Literal["ours", "limit", "parquet", "converted"]
    """Bare pyarrow is a limit; peers read Parquet, or rows that were converted to a format of their own."""
    environment: Literal["peers", "older"] = "peers"
    workers: tuple[int, ...] = (0, 2)
    orders: tuple[bool, ...] = (False, True)
    """Whether it is measured in order, shuffled, or both."""
    threads: bool = False
    """Its workers are threads."""
    no_fork: bool = False
    """The package may not be imported before a fork."""
    slow: bool = False
    """It works row by row: timed to resume on the smallest data set only."""
    cleans_up: bool = False
    """What it starts or shares (semaphores of spawned workers) is removed as the interpreter ends, and by nothing
    else."""
    prepares: bool = False
    """Something has to be made once of a data set: an index, a copy in the reader's own format."""
    resumes: bool = False
    """It says that it can save a place in the midst of an epoch."""
    tables: tuple[str, ...] = ("tabular", "tokens", "images")
    """Data sets whose speed is measured."""
    rows_at_most: int | None = None
    """Of a data set that is slow to convert; speeds are rates."""
    why: str = ""
    """What it cannot do, and why, or what should be known of how it is measured."""

    def load(self) -> type[Reader]:
        """The class; it imports the measured package only when it is made."""
        module, _, name = self.place.partition(":")
        found: type[Reader] = getattr(importlib.import_module(f"benchmarks.readers.adapters.{module}"), name)
        return found


READERS: dict[str, Entry] = {
    "lakeckpt": Entry(
        label="lakeckpt", place="lake:Lake", package="lakeckpt", kind="ours", resumes=True,
    ),
    "row-group": Entry(
        label="pyarrow: read_row_group, one thread", place="bare:RowGroups", package="pyarrow", kind="limit",
        workers=(0,), orders=(False,), why="no shuffling, no ranks, no state: a limit",
    ),
    "row-group-threads": Entry(
        label="pyarrow: read_row_group, threads", place="bare:RowGroupsThreads", package="pyarrow", kind="limit",
        workers=(0,), orders=(False,), why="no shuffling, no ranks, no state: a limit",
    ),
    "iter-batches": Entry(
        label="pyarrow: iter_batches, threads, pre_buffer", place="bare:IterBatches", package="pyarrow", kind="limit",
        workers=(0,), orders=(False,), why="no shuffling, no ranks, no state: a limit",
    ),
    "scanner": Entry(
        label="pyarrow: dataset scanner", place="bare:Scanner", package="pyarrow", kind="limit",
        workers=(0,), orders=(False,), why="no shuffling, no ranks, no state: a limit",
    ),
    "hand-written": Entry(
        label="hand-written, DataLoader", place="hand_written:HandWritten", package="torch",
        kind="parquet", why="torch's DataLoader has no state: a resumed job begins the epoch again",
    ),
    "stateful": Entry(
        label="hand-written, StatefulDataLoader", place="hand_written:Stateful", package="torchdata", kind="parquet",
        resumes=True,
    ),
    "hf-arrow": Entry(
        label="HF datasets, Arrow format", place="hf:Arrow", package="datasets", kind="parquet", resumes=True,
    ),
    "hf-torch": Entry(
        label="HF datasets, torch format", place="hf:Torch", package="datasets", kind="parquet", slow=True,
        why="the format that its tutorials have for torch",
    ),
    "litdata": Entry(
        label="litdata, Parquet", place="litdata_streaming:Litdata", package="litdata", kind="parquet", prepares=True,
        no_fork=True, slow=True, cleans_up=True, resumes=True,
    ),
    "grain": Entry(
        label="grain", place="grain_parquet:Grain", package="grain", kind="parquet", no_fork=True,
        resumes=True, slow=True, cleans_up=True,
    ),
    "ray": Entry(
        label="Ray Data", place="ray_data:Ray", package="ray", kind="parquet", no_fork=True, workers=(2,),
        cleans_up=True, why="always in the processes of its cluster; no state inside of an epoch",
    ),
    "petastorm": Entry(
        label="petastorm", place="petastorm_reader:Petastorm", package="petastorm", kind="parquet",
        environment="older", workers=(2,), threads=True, tables=("tabular",),
        why="tensors of fixed-width columns only; no state",
    ),
    "spdl": Entry(
        label="SPDL", place="spdl_pipeline:Spdl", package="spdl", kind="parquet", workers=(2,), threads=True,
        why="a pipeline of threads around pyarrow; no state",
    ),
    "mosaic": Entry(
        label="MosaicML streaming, MDS", place="mosaic:Mosaic", package="mosaicml-streaming", kind="converted",
        environment="older", prepares=True, resumes=True, slow=True, cleans_up=True, rows_at_most=200_000,
    ),
    "lance": Entry(
        label="Lance", place="lance_format:Lance", package="pylance", kind="converted", prepares=True,
        no_fork=True, cleans_up=True,
        why="shuffled: whole batches, unless by workers, which take row by row; no state",
    ),
}  # fmt: skip

STREAMS: dict[str, Entry] = {
    "stream-lakeckpt": Entry(
        label="lakeckpt", place="streams.lake:Lake", package="lakeckpt", kind="ours", resumes=True,
        why="packs as it reads; with the tokens come positions, numbers of documents and a loss mask; any topology",
    ),
    "stream-bare": Entry(
        label="pyarrow and numpy", place="streams.bare:Bare", package="pyarrow", kind="limit", orders=(False,),
        why="concatenates and cuts the values of row groups in order; tokens only; no mixture, no state: a limit",
    ),
    "stream-grain": Entry(
        label="grain, ConcatThenSplit", place="streams.grain_streams:Grain", package="grain", kind="parquet",
        no_fork=True, cleans_up=True,
        why="packs as it reads; with the tokens come positions and numbers of documents; its state fits one topology",
    ),
    "stream-hf": Entry(
        label="HF datasets, Arrow, wrapped", place="streams.hf:Wrapped", package="datasets", kind="parquet",
        why="TRL's packing by offsets: one short sequence for each 1,000 documents; tokens only; its state loses what "
        "lies in buffers",
    ),
    "stream-hf-lists": Entry(
        label="HF datasets, group_texts", place="streams.hf:GroupTexts", package="datasets", kind="parquet",
        why="the packing of the run_clm example, by lists: the rest of each 1,000 documents is dropped; tokens only",
    ),
    "stream-mosaic": Entry(
        label="MosaicML streaming, documents", place="streams.mosaic:Documents", package="mosaicml-streaming",
        kind="converted", environment="older", prepares=True, cleans_up=True,
        why="documents converted to MDS, packed by a generator over StreamingDataset; tokens only; its state does not "
        "know what the generator holds",
    ),
    "stream-mosaic-cut": Entry(
        label="MosaicML streaming, sequences", place="streams.mosaic:Sequences", package="mosaicml-streaming",
        kind="converted", environment="older", prepares=True, cleans_up=True,
        why="packed at the conversion, as LLM Foundry's ConcatTokensDataset does: one length and one order of "
        "documents for ever, the rest of each table is dropped; reading is reading rows",
    ),
}  # fmt: skip

ENTRIES = {**READERS, **STREAMS}
