"""How does a skip list lie in a document?  As one row for each row group: the intervals packed, a few bytes each."""

from __future__ import annotations

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.skips import SkipList, SkippedGroup
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.varint import pack_intervals, unpack_intervals

__all__ = ["skips_from_wire", "skips_to_wire"]

_KINDS = [str, int, int, int, int, str, int, str, bytes]


def skips_to_wire(skips: SkipList) -> list[list[object]]:
    """Return [table, epoch, lanes, rotation, row group of the table, file, row group in it, reason, positions] rows."""
    return [
        [
            one.table,
            one.epoch,
            one.num_lanes,
            one.rotation,
            one.group,
            one.file,
            one.row_group,
            one.reason,
            pack_intervals(one.positions.pairs()),
        ]
        for one in skips
    ]


def skips_from_wire(value: object) -> SkipList:
    """Return the list that `skips_to_wire` made ``value`` of; WireDamaged where it is none."""
    if type(value) is not list:
        raise WireDamaged(f"a skip list is a list, got {value!r:.80}")
    return SkipList(_group(row) for row in value)


def _group(row: object) -> SkippedGroup:
    if type(row) is not list or [type(one) for one in row] != _KINDS or min(row[1:5] + row[6:7]) < 0:
        raise WireDamaged(f"a skipped row group is a row of {len(_KINDS)} values, got {row!r:.80}")
    table, epoch, num_lanes, rotation, group, file, row_group, reason, packed = row
    return SkippedGroup(
        table=table,
        epoch=epoch,
        num_lanes=num_lanes,
        rotation=rotation,
        group=group,
        file=file,
        row_group=row_group,
        reason=reason,
        positions=Intervals.of(unpack_intervals(packed)),
    )
