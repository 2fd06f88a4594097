"""Which cases make the benchmark?  All of every reader that is fast; the second batch size for a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.readers.case import Case
from benchmarks.readers.registry import READERS, Entry
from benchmarks.readers.tables import DataSet

__all__ = ["TRANSITIONS", "Topology", "case_of", "exact_cases", "resume_cases", "speed_cases"]

OTHER_BATCH = ("lakeckpt", "row-group", "iter-batches", "hand-written", "lance")
"""Readers that are measured with the other batch size, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks, and workers of each."""

    ranks: int
    workers: int

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.workers} workers"


def _change(ranks: int, workers: int, later_ranks: int, later_workers: int) -> tuple[Topology, Topology]:
    return Topology(ranks=ranks, workers=workers), Topology(ranks=later_ranks, workers=later_workers)


TRANSITIONS = (
    _change(1, 0, 1, 0),
    _change(1, 2, 1, 2),
    _change(1, 0, 1, 2),
    _change(1, 2, 1, 0),
    _change(1, 0, 2, 0),
    _change(2, 0, 1, 0),
)
"""(as saved, as resumed): the same twice, then other workers, then other ranks."""


def case_of(reader: str, table: DataSet, *, batch_size: int | None = None, workers: int = 0, shuffle: bool = False,
            rank: int = 0, world_size: int = 1, length: int = 0, sources: int = 0) -> Case:  # fmt: skip
    """The case of ``reader`` over ``table``."""
    return Case(
        reader=reader,
        table=table.name,
        folder=table.folder,
        rows=table.rows,
        row_bytes=table.row_bytes,
        batch_size=batch_size or table.batch_sizes[0],
        workers=workers,
        shuffle=shuffle,
        rank=rank,
        world_size=world_size,
        length=length,
        sources=sources,
    )


def _of_reader(name: str, entry: Entry, table: DataSet, batch_sizes: Sequence[int]) -> list[Case]:
    found = []
    for batch_size in batch_sizes:
        for shuffle in entry.orders:
            for workers in entry.workers:
                case = case_of(name, table, batch_size=batch_size, workers=workers, shuffle=shuffle)
                if entry.load().refuses(case) is None:
                    found.append(case)
    return found


def speed_cases(table: DataSet, part: DataSet, readers: Sequence[str], *, quick: bool) -> list[Case]:
    """Every case of ``table`` whose speed is measured; ``part`` is for those that are slow to convert."""
    found: list[Case] = []
    for name in readers:
        entry = READERS[name]
        if table.name not in entry.tables:
            continue
        if quick:  # one way in order, another shuffled
            of = table if entry.rows_at_most is None else part
            every = _of_reader(name, entry, of, table.batch_sizes[:1])
            found += every if len(every) < 3 else [every[0], every[-1]]
            continue
        sizes = table.batch_sizes if name in OTHER_BATCH else table.batch_sizes[:1]
        found += _of_reader(name, entry, table if entry.rows_at_most is None else part, sizes)
    return found


def exact_cases(table: DataSet, readers: Sequence[str], *, quick: bool) -> list[tuple[Case, Topology, Topology]]:
    """What is saved in mid-epoch and resumed, shuffled: (case of rank 0, as saved, as resumed)."""
    transitions = (TRANSITIONS[0], TRANSITIONS[4]) if quick else TRANSITIONS
    names = [name for name in readers if READERS[name].resumes]
    return [(case_of(name, table, shuffle=True), before, after) for before, after in transitions for name in names]


def resume_cases(table: DataSet, readers: Sequence[str]) -> list[Case]:
    """What is stopped at places of an epoch, shuffled: of tokens by all that can go on, of other tables by those of
    them that convert nothing and take no minutes."""
    return [
        case_of(name, table, shuffle=True)
        for name in readers
        if (entry := READERS[name]).resumes
        and table.name in entry.tables
        and (table.name == "tokens" or not (entry.slow or entry.prepares))
    ]
