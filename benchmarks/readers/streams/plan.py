"""This module lists what is measured of packed sequences and mixtures: `Job` values, in groups that are compared.

========= =============================================================================================================
packed    sequences of an epoch, in order and shuffled; beside them, of lakeckpt, as many tokens of unpacked documents
mixed     documents of one table and of eight, shuffled
both      sequences of one table and of eight, shuffled
total     tokens of one epoch of a small table, packed, counted by value; once
memory    documents and sequences of one source and of 64, weights down to 10⁻⁴, lakeckpt only: peak memory; once
resumed   sequences of eight tables: seconds to the first batch, fresh and at 90 % of an epoch, lakeckpt only
========= =============================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.readers.case import Case
from benchmarks.readers.plan import case_of
from benchmarks.readers.registry import STREAMS
from benchmarks.readers.tables import DataSet

__all__ = ["LENGTH", "MANY", "OURS", "PLACE", "SEQUENCES", "SOURCES", "Group", "Job", "documents", "jobs"]

Group = Literal["packed", "mixed", "both", "total", "memory", "resumed"]
OURS = "stream-lakeckpt"
LENGTH, SEQUENCES, SOURCES, MANY = 2048, 8, 8, 64
ENOUGH = 20_000 * LENGTH
"""Tokens after which a source with the least weight of `MANY` has been read."""
PLACE = 0.9
"""The part of an epoch after which the state is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One case and what its process does; ``save_at``: batches after which the state is saved that the task loads."""

    group: Group
    case: Case
    task: dict[str, Any]
    once: bool = False
    save_at: int = 0


def documents(table: DataSet) -> int:
    """Return how many documents have about the tokens of a batch of sequences."""
    return max(1, LENGTH * SEQUENCES // int((table.row_bytes - 12) // 4))  # less the id and an offset, int32 tokens


def jobs(table: DataSet, small: DataSet, readers: Sequence[str], seconds: float) -> Iterator[Job]:
    """Yield all jobs of ``readers``; those that are compared most lie next to each other."""
    flow = {"do": "flow", "seconds": seconds, "at_least": 0}
    for group, case in _flows(table, readers):
        yield Job(group=group, case=case, task=flow)
    for name in readers:
        case = _case(name, small, shuffle=name != "stream-bare")
        yield Job(group="total", case=case, task={"do": "tally"}, once=True)
    if OURS in readers:
        every = {"do": "flow", "seconds": seconds, "at_least": ENOUGH}
        for length in (0, LENGTH):
            for sources in (1, MANY):
                yield Job(
                    group="memory", case=_case(OURS, table, sources=sources, length=length), task=every, once=True
                )
        case = _case(OURS, table, sources=SOURCES)
        first = {"do": "resume", "state": None, "whole": False}
        batches = int(PLACE * table.rows / documents(table))
        yield Job(group="resumed", case=case, task=first)
        yield Job(group="resumed", case=case, task=first, save_at=batches)


def _flows(table: DataSet, readers: Sequence[str]) -> Iterator[tuple[Group, Case]]:
    for shuffle in (True, False):
        for name in readers:
            if name == OURS:
                yield "packed", _case(name, table, length=0, shuffle=shuffle)
            yield from (("packed", case) for case in _can(_case(name, table, shuffle=shuffle)))
    groups: tuple[tuple[Group, int], ...] = (("mixed", 0), ("both", LENGTH))
    for group, length in groups:
        for name in readers:
            for sources in (1, SOURCES):
                case = _case(name, table, length=length, sources=sources, shuffle=name != "stream-bare")
                yield from ((group, one) for one in _can(case))


def _can(case: Case) -> Iterator[Case]:
    if STREAMS[case.reader].load().refuses(case) is None:
        yield case


def _case(name: str, table: DataSet, *, length: int = LENGTH, sources: int = 0, shuffle: bool = True) -> Case:
    batch_size = SEQUENCES if length else documents(table)
    return case_of(name, table, batch_size=batch_size, shuffle=shuffle, length=length, sources=sources)
