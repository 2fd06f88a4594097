"""This module runs ``lakeckpt faults RUN``: why attempts died, what each fault cost, and the account of the run."""

from __future__ import annotations

import argparse

from lakeckpt.checkpoint.faults.records import faults_of
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.cli.output import TextTable, format_bytes, format_count, format_time, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.recovery.account import Account
from lakeckpt.recovery.faults import PHASES, Fault

__all__ = ["add_arguments", "run", "say_account"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt faults``."""
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the faults. Returns 0, whatever they are."""
    storage, place = open_run(args)
    faults, account = faults_of(storage, read_run(storage))
    if args.json:
        print_json({"faults": [one.to_plain() for one in faults], "account": account.to_plain()})
        return 0
    print(f"{place}: {format_count(len(faults), 'fault')}")
    if faults:
        print(_table(faults))
        print(_phases(faults))
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


def _phases(faults: list[Fault]) -> TextTable:
    table = TextTable(">attempt", *(f">{name}" for name in PHASES), ">steps again", title="\nSeconds of each phase")
    for one in faults:
        seconds = (f"{one.phases[name]:.2f}" if name in one.phases else "-" for name in PHASES)
        table.add_row(one.first.attempt, *seconds, f"{one.steps_again * one.first.step_s:.2f}")
    return table


def say_account(account: Account) -> str:
    """Return the account of a run, for people."""
    parts = (
        f"perception {account.perception_s:.1f}, scheduling {account.scheduling_s:.1f}, initialization "
        f"{account.initialization_s:.1f}, recompute {account.recompute_s:.1f}, blocked by saving {account.saving_s:.1f}"
    )
    return (
        f"Effective training time: {100 * account.effective:.2f} % of {account.elapsed_s:,.0f} s. Invalid: "
        f"{account.invalid_s:.1f} s ({parts})"
    )
