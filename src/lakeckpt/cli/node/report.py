"""This module defines what a check of a node found: values, and their document.

The classes are the format. The module is pure, imports without torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["NodeCheck", "NodeHistory", "NodeReport"]

_KIND, _VERSION = "node-checks", (1, 0)
_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """One check: a rate (``value`` in ``unit``, higher is better), or ``text``."""

    name: str
    value: float | None = None
    unit: str = ""
    text: str = ""
    fault: str = ""
    """Why the node is to be avoided, whatever other nodes have; empty if nothing is wrong."""
    is_alike: bool = False
    """Whether ``text`` must be the same on all nodes of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The checks of a node by one of its ranks."""

    node: str
    rank: Count
    at_s: float
    checks: tuple[NodeCheck, ...]
    is_named: bool = False
    """Whether the node was to be avoided. Such a report is no measure for others."""

    def rate(self, name: str) -> float | None:
        """Return the rate of the check ``name``, or None if the report has none."""
        return next((one.value for one in self.checks if one.name == name), None)

    def with_better(self, rates: dict[str, float]) -> NodeReport:
        """Return the report with the better one of two measurements of each check in ``rates``."""
        checks = (
            replace(one, value=max(one.value, rates.get(one.name, one.value))) if one.value is not None else one
            for one in self.checks
        )
        return replace(self, checks=tuple(checks))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """The newest reports of one node, oldest first."""

    reports: tuple[NodeReport, ...]

    def with_newest(self, reports: Iterable[NodeReport]) -> NodeHistory:
        """Return the history with more reports, and without the oldest."""
        return NodeHistory(reports=(*self.reports, *reports)[-_KEPT:])

    def to_bytes(self) -> bytes:
        """Return the document."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeHistory:
        """Read a document. Raises `WireError`."""
        found: NodeHistory = from_plain(cls, loads(data, kind=_KIND, supported=_VERSION), "the checks of a node")
        return found
