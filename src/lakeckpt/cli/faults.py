"""This module runs ``lakeckpt faults RUN``: why attempts died, what each fault cost, and the account of the run."""

from __future__ import annotations

import argparse
from collections import Counter

from lakeckpt.checkpoint.faults.records import faults_of, stalls_of
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.cli.output import TextTable, format_bytes, format_count, format_time, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.recovery.account import Account
from lakeckpt.recovery.faults import PHASES, Fault
from lakeckpt.watch.looks import RankLook
from lakeckpt.watch.stalls import Stall
from lakeckpt.watch.system.explicit import fault_table, normalized, text_id

__all__ = ["add_arguments", "run", "say_account"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt faults``."""
    add_run_arguments(parser)
    parser.add_argument(
        "--watch-faults",
        metavar="FILE",
        default="",
        help="rows of your own, which explain faults before the table does",
    )
    parser.add_argument("--stacks", action="store_true", help="print the stacks of the ranks that held up a stall")
    parser.add_argument(
        "--unknown", action="store_true", help="list the texts that no row explains, normalized and counted"
    )


def run(args: argparse.Namespace) -> int:
    """Print the faults. Returns 0, whatever they are."""
    storage, place = open_run(args)
    table = fault_table(args.watch_faults) if args.watch_faults else None
    faults, account = faults_of(storage, read_run(storage), table)
    if args.unknown:
        return _say_unknown(faults, as_json=args.json)
    stalls = stalls_of(storage)
    if args.json:
        said = [stall.to_plain(path) for path, stall in stalls]
        print_json({"faults": [one.to_plain() for one in faults], "stalls": said, "account": account.to_plain()})
        return 0
    print(f"{place}: {format_count(len(faults), 'fault')}")
    if faults:
        print(_table(faults))
        print(_remedies(faults))
        print(_phases(faults))
    if stalls:
        print(_stalls(stalls, with_stacks=args.stacks))
    print(say_account(account))
    return 0


def _table(faults: list[Fault]) -> TextTable:
    table = TextTable(
        "when", ">attempt", ">rank", "node", "cause", "doing", ">step", ">back to", ">again", "from", "read"
    )
    for one in faults:
        note = one.first
        table.add_row(
            format_time(note.at_s),
            note.attempt,
            note.rank,
            note.node or "(gone)",
            f"{note.name}{': ' if note.text else ''}{' '.join(note.text.split())}"[:60],
            note.phase,
            note.step,
            one.step,
            one.steps_again,
            one.tier,
            format_bytes(one.bytes),
        )
    return table


def _remedies(faults: list[Fault]) -> TextTable:
    table = TextTable(">attempt", "because", "restart", "what to do", title="\nCauses and remedies")
    for one in faults:
        says = one.first.explicit
        unknown = "the stall below says why" if one.first.cause == "hang" else "no row knows it: see --unknown"
        rest = (says.restart, says.remedy) if says else ("-", unknown)
        table.add_row(one.first.attempt, one.first.because, *rest)
    return table


def _say_unknown(faults: list[Fault], *, as_json: bool) -> int:
    texts = [
        normalized(one.first.evidence) for one in faults if one.first.explicit is None or not one.first.explicit.is_sure
    ]
    counts = Counter(filter(None, texts)).most_common()
    if as_json:
        print_json({"unknown": [{"id": text_id(text), "count": count, "text": text} for text, count in counts]})
        return 0
    table = TextTable(">count", "id", "text", title="Texts that no row explains")
    for text, count in counts:
        table.add_row(count, text_id(text), text)
    print(table if counts else "Each fault with a text is explained by a row.")
    return 0


def _phases(faults: list[Fault]) -> TextTable:
    table = TextTable(">attempt", *(f">{name}" for name in PHASES), ">steps again", title="\nSeconds of each phase")
    for one in faults:
        seconds = (f"{one.phases[name]:.2f}" if name in one.phases else "-" for name in PHASES)
        table.add_row(one.first.attempt, *seconds, f"{one.steps_again * one.first.step_s:.2f}")
    return table


def _stalls(stalls: list[tuple[str, Stall]], *, with_stacks: bool) -> str:
    """Return the stalls for people: times in which all ranks stood still."""
    table = TextTable("when", ">attempt", "ranks", "kind", ">step", ">seconds", "then", "why", title="\nStalls")
    stacks = []
    for path, one in stalls:
        then = "the ranks were killed" if one.acted else "went on" if one.ended_s else one.remark or "-"
        ranks = ", ".join(map(str, one.verdict.ranks)) or "-"
        seconds = f"{one.length_s:.1f}"
        kind, reason = one.verdict.kind, one.verdict.reason
        table.add_row(format_time(one.began_s), one.attempt, ranks, kind, one.step, seconds, then, reason)
        stacks += [f"\n{path}: {line}" for look in one.looks for line in _stack(look) if look.rank in one.verdict.ranks]
        stacks += [f"\n{path}: {event}" for event in one.events]
    return f"{table}{''.join(stacks) if with_stacks else ''}"


def _stack(look: RankLook) -> list[str]:
    lines = [f"rank {look.rank} on {look.node}, process {look.pid}, in {look.phase} after step {look.step}"]
    for thread in look.threads:
        lines.append(f"  thread {thread.name or '-'}{' (holds the interpreter lock)' if thread.owns_gil else ''}")
        lines += [f"    {frame}" for frame in thread.frames]
    return lines


def say_account(account: Account) -> str:
    """Return the account of a run, for people."""
    parts = (
        f"perception {account.perception_s:.1f}, scheduling {account.scheduling_s:.1f}, initialization "
        f"{account.initialization_s:.1f}, recompute {account.recompute_s:.1f}, "
        f"blocked by saving {account.saving_s:.1f}, "
        f"stalls {account.stalled_s:.1f}"
    )
    causes = ", ".join(f"{cause} {count}" for cause, count in account.causes.items())
    return (
        f"Effective training time: {100 * account.effective:.2f} % of {account.elapsed_s:,.0f} s. Invalid: "
        f"{account.invalid_s:.1f} s ({parts}){'. Causes: ' + causes if causes else ''}"
    )
