"""This module reports the rows that one rank excluded, and merges the reports of all ranks at a commit.

Each rank excludes rows of its own micro-batches, and has them in its pending records. Its part of a save holds all of
them since the newest commit that it knows. The committer takes those of the steps that its commit records. Ranks that
read the same rows report the same, which counts once. The module is pure, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.format.manifest import Excluded, ReaderRecord
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.values import pack, unpack

__all__ = ["excluded_of", "with_excluded"]

_Excluded = Mapping[str, tuple[Excluded, ...]]


def excluded_of(readers: Mapping[str, Sequence[PendingRecord]]) -> bytes:
    """Return the report of all that the pending records of ``readers`` exclude; empty if they exclude nothing."""
    found = {name: tuple(each for one in pending for each in one.record.excluded) for name, pending in readers.items()}
    found = {name: each for name, each in found.items() if each}
    return bytes(pack(to_plain(found, _Excluded))) if found else b""


def with_excluded(
    readers: Mapping[str, ReaderRecord], reports: Iterable[bytes], *, after: int, upto: int
) -> dict[str, ReaderRecord]:
    """Return the records of ``readers`` with what all ranks excluded in the steps from ``after`` + 1 to ``upto``."""
    every: dict[str, list[Excluded]] = {name: [] for name in readers}
    for data in filter(None, reports):
        found: _Excluded = from_plain(_Excluded, unpack(data, what="a report"), "the excluded rows of a rank")
        for name, each in found.items():
            every[name] += [one for one in each if after < one.step <= upto and one not in every[name]]
    for of_reader in every.values():
        of_reader.sort(key=lambda one: (one.step, one.rank, one.source or ""))
    return {name: replace(record, excluded=tuple(every[name])) for name, record in readers.items()}
