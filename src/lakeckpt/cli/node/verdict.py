"""This module decides whether a node is to be avoided: a pure function of its report and the reports of others.

A rate is slow below ``median - max(10 %, 4 MAD)`` of all nodes of the job, this node among them (MAD: the median of the
distances from the median); a disk, which others often share, below ``median - max(30 %, 4 MAD)``. With fewer than three
nodes nobody can tell which one is slow, and the rate is compared with at least three earlier rates of this node. A
median and a MAD are not moved by the slow node, as a mean would be. The module never measures and starts no threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lakeckpt.cli.node.report import NodeCheck, NodeReport

__all__ = ["NodeFinding", "findings", "slow_checks"]

_LEAST = 3
_SHARE, _MADS = 0.10, 4.0
_SHARES = {"disk write": 0.30}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """What a check says of the node, compared with others."""

    check: NodeCheck
    median: float | None = None
    bound: float | None = None
    """A rate below it is slow."""
    of: str = ""
    """With what the rate was compared."""
    fault: str = ""
    """Why the node is to be avoided; empty if the check is well."""

    @property
    def is_slow(self) -> bool:
        """Whether the rate is below the bound."""
        return self.bound is not None and self.check.value is not None and self.check.value < self.bound


def findings(
    own: NodeReport, peers: Sequence[NodeReport], earlier: Sequence[NodeReport] = (), *, is_one_job: bool = False
) -> tuple[NodeFinding, ...]:
    """Return what each check of ``own`` says.

    ``peers``: reports of other nodes, one for each; ``earlier``: of this node. ``is_one_job``: the peers run beside
    this node now, so that versions must be alike.
    """
    return tuple(_finding(check, own, peers, earlier, is_one_job) for check in own.checks)


def slow_checks(found: Sequence[NodeFinding]) -> list[str]:
    """Return the names of the checks that are measured once more before the node is named."""
    return [one.check.name for one in found if one.is_slow]


def _finding(
    check: NodeCheck, own: NodeReport, peers: Sequence[NodeReport], earlier: Sequence[NodeReport], is_one_job: bool
) -> NodeFinding:
    if check.fault:
        return NodeFinding(check=check, fault=check.fault)
    if check.is_alike and is_one_job:
        return NodeFinding(check=check, fault=_unlike(check, [own, *peers]))
    if check.value is None:
        return NodeFinding(check=check)
    rates, of = [check.value, *_rates(check.name, peers)], "nodes"
    if len(rates) < _LEAST:
        rates, of = _rates(check.name, earlier), "earlier checks of this node"
    if len(rates) < _LEAST:
        return NodeFinding(check=check)
    middle = median(rates)
    spread = median(abs(rate - middle) for rate in rates)
    bound = middle - max(_SHARES.get(check.name, _SHARE) * middle, _MADS * spread)
    of = f"{len(rates)} {of}"
    if check.value >= bound:
        return NodeFinding(check=check, median=middle, bound=bound, of=of)
    fault = (
        f"{check.name} is slow: {check.value:.3g} {check.unit}, measured twice, and the median of {of} is {middle:.3g}"
    )
    return NodeFinding(check=check, median=middle, bound=bound, of=of, fault=fault)


def _rates(name: str, reports: Sequence[NodeReport]) -> list[float]:
    found = (one.rate(name) for one in reports if not one.is_named)
    return [rate for rate in found if rate is not None]


def _unlike(check: NodeCheck, reports: Sequence[NodeReport]) -> str:
    """Return why the node is to be avoided if most reports have another text, else an empty string."""
    texts = Counter(one.text for report in reports for one in report.checks if one.name == check.name)
    text, count = texts.most_common(1)[0]
    if text == check.text or 2 * count <= texts.total():
        return ""
    return f"{check.name} is {check.text or 'absent'}, and {text or 'absent'} on {count} of {texts.total()} ranks"
