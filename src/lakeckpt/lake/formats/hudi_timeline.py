"""This module reads from the timeline of a Hudi table which base files must be there at an instant.

hudi lists the base files that lie in the store: a file that the cleaner removed, or that was lost, is silently no part
of its answer, and an older one may stand in for it. The commits in the active timeline name the files that must be
there:

- of each file group, the file that was last written by then, unless the group was replaced by then;
- of a group whose last write before is archived, the file that the first write afterwards names as its origin, and some
  file at all if the group was replaced afterwards.

The module reads commits only, through hudi.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hudi import HudiInstant, HudiTable

__all__ = ["Commit", "FileGroup", "Written", "expected_files", "lost_groups", "read_commits"]

FileGroup = tuple[str, str]
"""A partition's path and a file id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A base file: its path in the table, its size (None: unknown), the instant of the one before (None: none)."""

    path: str
    size_bytes: int | None
    before: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Commit:
    """A completed instant: the base files that it wrote, the file groups that it replaced, its other metadata."""

    instant: HudiInstant
    files: Mapping[FileGroup, Written]
    replaced: frozenset[FileGroup]
    extra: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.instant.timestamp


def read_commits(table: HudiTable) -> list[Commit]:
    """Return the completed instants of the active timeline by the time that they were requested, oldest first.

    ``ValueError`` or ``TypeError`` if one is malformed, and what hudi raises.
    """
    timeline = table.get_timeline()
    found = {
        instant.timestamp: instant
        for some in (
            timeline.get_completed_commits(),
            timeline.get_completed_deltacommits(),
            timeline.get_completed_replacecommits(),
            timeline.get_completed_clustering_commits(),
        )
        for instant in some
    }
    return [_commit(found[name], timeline.get_instant_metadata_in_json(found[name])) for name in sorted(found)]


def _commit(instant: HudiInstant, text: str) -> Commit:
    metadata = json.loads(text)
    if not isinstance(metadata, dict):
        raise TypeError(f"the metadata of instant {instant.timestamp} are no object")
    files: dict[FileGroup, Written] = {}
    for partition, stats in (metadata.get("partitionToWriteStats") or {}).items():
        for stat in stats:
            path = stat.get("path")
            if path and path.endswith(".parquet"):  # log files, and writes of nothing, are no base files
                before, size = stat.get("prevCommit"), stat.get("fileSizeInBytes")
                files[partition, str(stat["fileId"])] = Written(
                    path=str(path),
                    size_bytes=size if type(size) is int and size > 0 else None,
                    before=None if before in (None, "", "null") else str(before),
                )
    gone = {(str(p), str(one)) for p, ids in (metadata.get("partitionToReplaceFileIds") or {}).items() for one in ids}
    return Commit(instant=instant, files=files, replaced=frozenset(gone), extra=metadata.get("extraMetadata") or {})


def expected_files(commits: Sequence[Commit], at: str) -> dict[FileGroup, Written]:
    """Return the base file of each file group at an instant, of those that the active timeline names."""
    current: dict[FileGroup, Written] = {}
    gone: set[FileGroup] = set()
    for commit in commits:
        if commit.name <= at:
            current |= commit.files
            gone |= commit.replaced
    return {group: written for group, written in current.items() if group not in gone}


def lost_groups(commits: Sequence[Commit], at: str, present: Mapping[FileGroup, str]) -> Iterator[str]:
    """Yield the files that must be there at an instant and are not, as texts.

    ``present`` is the base file of each group.
    """
    expected = expected_files(commits, at)
    for group, written in expected.items():
        if present.get(group) != written.path:
            yield written.path
    made: set[FileGroup] = {group for commit in commits if commit.name <= at for group in commit.files}
    for commit in commits:
        if commit.name <= at:
            continue
        for group in sorted(commit.replaced - made):
            if group not in present:
                yield f"{'/'.join(filter(None, group))}_…"
        for group, written in commit.files.items():
            if group not in made and written.before is not None and written.before <= at and group not in present:
                yield f"{'/'.join(filter(None, group))}_…_{written.before}.parquet"
        made |= set(commit.files) | commit.replaced
