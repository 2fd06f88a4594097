"""This module runs ``lakeckpt doctor --node``: it checks this node, and says whether a job should avoid it.

Exit status 0: the node is well; 75 (EX_TEMPFAIL): a job should avoid it; 2: the check could not be made. If torchrun
started several ranks, each of them runs the command, and they compare themselves. A check that is slow is measured
once more before it names the node. The module starts no threads.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from lakeckpt.cli.node.facts import limit_checks, nvml_checks, version_checks
from lakeckpt.cli.node.history import keep, others, own_history
from lakeckpt.cli.node.report import NodeCheck, NodeReport
from lakeckpt.cli.node.tools import tool_checks
from lakeckpt.cli.node.verdict import NodeFinding, findings, slow_checks
from lakeckpt.cli.output import TextTable, format_time, print_json
from lakeckpt.cli.run_arguments import options_of
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.reading.memory import available_bytes
from lakeckpt.watch.avoid import read_avoid

__all__ = ["AVOID", "add_arguments", "run"]

AVOID = os.EX_TEMPFAIL
_SECONDS = 12.0
_AGAIN_SHARE, _MEMORY_SHARE, _TOOLS_SHARE = 0.6, 0.2, 0.5
_MEMORY_PART = 4
"""At most the fourth part of the free memory is tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A node that was checked, by one of its ranks."""

    report: NodeReport
    found: tuple[NodeFinding, ...]

    @property
    def reasons(self) -> list[str]:
        return [one.fault for one in self.found if one.fault]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a check of the node."""
    group = parser.add_argument_group("with --node")
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        help=f"how long to measure (default: {_SECONDS:g}); what is slow is measured once more",
    )
    length.add_argument("--minutes", type=float, help="the same in minutes, for a node that comes back")
    group.add_argument("--peers", metavar="RUN", help="compare with the nodes and earlier checks kept in this run")
    group.add_argument("--name", help="the name of this node (default: the host's name)")
    group.add_argument("--disk", metavar="FOLDER", help="which disk to write to (default: that of temporary files)")
    group.add_argument("--storage-options", metavar="JSON", help="for the store of RUN, as fsspec takes them")


def run(args: argparse.Namespace) -> int:
    """NodeCheck the node, and print. Returns the exit status."""
    seconds = args.seconds if args.minutes is None else 60 * args.minutes
    if not 0 < seconds < 86_400:
        raise ConfigError(f"--seconds must be above 0 and at most a day, got {seconds:g}")
    if args.disk is not None and not os.path.isdir(args.disk):
        raise ConfigError(f"there is no folder {args.disk!r}: name one on the disk to write to as --disk")
    node = args.name or socket.gethostname()
    storage = open_storage(args.peers, storage_options=options_of(args.storage_options)) if args.peers else None
    mark = read_avoid(storage, node) if storage is not None else None
    if mark is not None and not _is_job():
        reason = f"{mark.by} wrote on {format_time(mark.at_s)} that jobs avoid this node: {mark.reason}"
        return _end(node, [], [reason], as_json=args.json)
    marks = (
        [] if mark is None else [NodeCheck(name="mark", fault=f"{mark.by}, {format_time(mark.at_s)}: {mark.reason}")]
    )
    with _joined(3 * seconds + 300) as group:
        rank = 0 if group is None else int(os.environ["RANK"])
        seen = _checked(node, rank, seconds, args.disk or tempfile.gettempdir(), storage, group, marks)
        mine = seen[rank if group is not None else 0]
        if storage is not None and _is_first():
            bad = any(one.reasons for one in seen if one.report.node == node)
            history = own_history(storage, node)
            clock = keep(storage, history, [replace(mine.report, is_named=bad)])
            mine = replace(mine, found=(*mine.found, NodeFinding(check=clock)))
        reasons = [reason for one in seen if one.report.node == node for reason in one.reasons]
        if rank != 0:
            return AVOID if reasons else 0
        if group is not None:
            reasons_of = {one.report.node: one.reasons for one in seen if one.reasons}
            return _end(node, mine.found, reasons, as_json=args.json, job=reasons_of, ranks=len(seen))
        return _end(node, mine.found, reasons, as_json=args.json)


def _checked(
    node: str,
    rank: int,
    seconds: float,
    disk: str,
    storage: Storage | None,
    group: ModuleType | None,
    marks: Sequence[NodeCheck],
) -> list[_Seen]:
    """Measure this node, and compare. Returns what was seen of each rank of the job; of this node only, if no job."""
    import torch

    from lakeckpt.cli.node import measures

    meters = measures.device_meters(int(os.environ.get("LOCAL_RANK", "0")))
    written = measures.Disk(disk) if _is_first() else None
    if _is_first():
        meters += [measures.Matmul(), measures.HostCopy()]
    if written is not None and written.can_write:
        meters.append(written)
    rates = measures.best_rates(meters, seconds) if meters else {}
    checks = [*marks, *(meter.check(rates) for meter in meters)]
    if written is not None and not written.can_write:
        checks.append(written.check({}))
    if _is_first():
        most = available_bytes() // _MEMORY_PART
        checks.append(measures.memory_test(most, seconds * _MEMORY_SHARE))
        checks += [*limit_checks(), *nvml_checks()]
        gpus = torch.cuda.device_count()
        checks += tool_checks(gpus, timeout_s=max(5.0, seconds * _TOOLS_SHARE))
    checks += version_checks(torch)
    report = NodeReport(node=node, rank=rank, at_s=time.time(), checks=tuple(checks))
    if group is not None and rank == 0:
        report = replace(report, checks=(*report.checks, *group.sweep()))
    elif group is not None:
        group.sweep()
    seen = _compared(report, storage, group)
    slow = {name for one in seen for name in slow_checks(one.found)}
    if slow:  # all ranks of a job come here, as all of them saw the same
        again = [meter for meter in meters if meter.name in slow]
        rates = measures.best_rates(again, seconds * _AGAIN_SHARE) if again else {}
        faults = {meter.name: meter.fault for meter in meters}
        report = report.with_better(rates)
        checks = [replace(one, fault=one.fault or faults.get(one.name, "")) for one in report.checks]
        seen = _compared(replace(report, checks=tuple(checks)), storage, group)
    for meter in meters:
        meter.close()
    return seen


def _compared(report: NodeReport, storage: Storage | None, group: Any) -> list[_Seen]:
    if group is not None:
        reports = group.gathered(report)
        return [
            _Seen(report=one, found=findings(one, [peer for peer in reports if peer is not one], is_one_job=True))
            for one in reports
        ]
    if storage is None:
        return [_Seen(report=report, found=findings(report, []))]
    earlier = own_history(storage, report.node).reports
    return [_Seen(report=report, found=findings(report, others(storage, report.node), earlier))]


@contextmanager
def _joined(timeout_s: float) -> Iterator[ModuleType | None]:
    """Join the other ranks, and yield the module `group`; None if there are no other ranks."""
    if not _is_job():
        yield None
        return
    from lakeckpt.cli.node import group

    with group.job(timeout_s):
        yield group


def _is_job() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _is_first() -> bool:
    """Whether this rank measures what the ranks of its node have in common."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _end(
    node: str,
    found: Sequence[NodeFinding],
    reasons: Sequence[str],
    *,
    as_json: bool,
    job: dict[str, list[str]] | None = None,
    ranks: int = 1,
) -> int:
    """Print what was found. Returns the exit status."""
    status = AVOID if reasons else 0
    if as_json:
        said: dict[str, Any] = {"node": node, "avoid": bool(reasons), "reasons": list(reasons)}
        if job is not None:
            said |= {"ranks": ranks, "nodes_to_avoid": job}
        print_json({**said, "checks": [_plain(one) for one in found]})
        return status
    table = TextTable("check", ">value", ">median", "verdict")
    for one in found:
        value = "" if one.check.value is None else f"{one.check.value:.4g} {one.check.unit}"
        middle = "" if one.median is None else f"{one.median:.4g}"
        table.add_row(one.check.name, value, middle, _verdict(one))
    if found:
        print(table)
    for name, causes in (job or {}).items():
        for cause in causes:
            print(f"✗ {name}: {cause}")
    for reason in reasons if job is None else ():
        print(f"✗ {reason}")
    print(f"AVOID  {node}: exit status {AVOID}" if reasons else f"WELL  {node}")
    return status


def _verdict(one: NodeFinding) -> str:
    if one.fault:
        return f"✗ {one.fault}"
    if one.bound is not None:
        return f"well, of {one.of}" + (f"; {one.check.text}" if one.check.text else "")
    if one.check.value is not None:
        return "nothing to compare with" + (f"; {one.check.text}" if one.check.text else "")
    return one.check.text


def _plain(one: NodeFinding) -> dict[str, Any]:
    return {
        "name": one.check.name,
        "value": one.check.value,
        "unit": one.check.unit,
        "text": one.check.text,
        "median": one.median,
        "bound": one.bound,
        "of": one.of,
        "fault": one.fault,
    }
