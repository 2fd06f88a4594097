"""This module defines how long ranks waited at a site, and how much of their captures moved meanwhile: `SiteWaits`.

The waits of a rank go into its part of a checkpoint, and those of the job into the manifest. No decision depends on
them: they are for people. The module imports without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from lakeckpt.wire.documents import as_row

__all__ = ["SiteWaits", "waits_of_job"]


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class SiteWaits:
    """The last waits at ``site``, such as ``pipeline``, ``ddp`` or ``data``."""

    site: str
    kind: Literal["bubble", "free"]
    """Whether the rank was idle, or computed while the link to the host was free."""
    median_s: float
    """The median length of a wait, in seconds."""
    share: float
    """The part of all captured bytes that moved in these waits."""


def waits_of_job(every: Sequence[Sequence[SiteWaits]]) -> tuple[SiteWaits, ...]:
    """Return the waits of a job from those of ``every`` rank: the median of the ranks that have the site, and the mean
    share of all ranks. The site in which most bytes moved comes first."""
    found: defaultdict[tuple[str, Literal["bubble", "free"]], list[SiteWaits]] = defaultdict(list)
    for one in (one for waits in every for one in waits):
        found[one.site, one.kind].append(one)
    waits = [
        SiteWaits(
            site=site,
            kind=kind,
            median_s=median(one.median_s for one in some),
            share=fmean([*(one.share for one in some), *[0.0] * (len(every) - len(some))]),
        )
        for (site, kind), some in found.items()
    ]
    return tuple(sorted(waits, key=lambda one: (-one.share, one.site)))
