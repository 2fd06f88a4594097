"""This module runs ``lakeckpt explain RUN --step K``: it prints the rows of an optimizer step, rank by rank.

With ``--table`` it prints the documents of packed sequences, which it reads from the table.
"""

from __future__ import annotations

import argparse

from lakeckpt.checkpoint.ledger.document_finder import DocumentFinder
from lakeckpt.checkpoint.ledger.explain import MicroBatch, RankRows, ReaderStep, StepExplained, explain
from lakeckpt.cli.output import TextTable, format_count, format_rows, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run, options_of
from lakeckpt.errors import ConfigError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.progress import progress_bar

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt explain``."""
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, metavar="K", help="which optimizer step, counted from 1")
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="only this rank (may be repeated)")
    parser.add_argument("--rows", action="store_true", help="every row, in the order in which it was read")
    parser.add_argument("--table", metavar="TABLE", help="name the documents of packed sequences, read from this table")
    parser.add_argument("--table-options", metavar="JSON", help="for the store of the table, as fsspec takes them")
    parser.add_argument("--reader", metavar="NAME", help="with --table: the reader of it, if several are packed")
    parser.add_argument("--column", default="tokens", metavar="C", help="with --table: as pack(column=…) (tokens)")
    for side in ("before", "after"):
        parser.add_argument(f"--{side}", default="", metavar="T,…", help=f"with --table: as pack({side}=…) (none)")
    parser.add_argument("--tip", type=int, metavar="SLOT", help="in the history of this checkpoint, not the newest")


def run(args: argparse.Namespace) -> int:
    """Explain and print. Returns 0."""
    storage, _ = open_run(args)
    documents = None if args.table is None else _documents(args)
    found = explain(storage, args.step, tip=args.tip, ranks=args.rank, documents=documents)
    if args.rows and any(reader.order.unit > 1 for reader in found.readers):
        raise ConfigError(
            "--rows cannot name the documents of packed sequences: only the table has their lengths. Give --table "
            "instead of --rows. With neither, the tokens of the windows that hold the sequences are named"
        )
    if args.json:
        print_json(found.to_plain(every_row=args.rows))
    else:
        _show(found, every_row=args.rows)
    return 0


def _documents(args: argparse.Namespace) -> DocumentFinder:
    with progress_bar("footers", show=not args.json) as progress:
        table = open_table(args.table, storage_options=options_of(args.table_options), progress=progress)
    before, after = _tokens("--before", args.before), _tokens("--after", args.after)
    return DocumentFinder(table, column=args.column, before=before, after=after, reader=args.reader)


def _tokens(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(",") if text)
    except ValueError:
        raise ConfigError(f"{option} takes tokens with commas between them, such as 1,2, got {text!r}") from None


def _show(found: StepExplained, *, every_row: bool) -> None:
    print(f"step {found.step:,}  recorded by the checkpoint in slot {found.slot} (attempt {found.attempt})")
    for reader in found.readers:
        print()
        epochs = ", ".join(map(str, reader.epochs)) or "none"
        print(
            f"{reader.reader}  {format_count(reader.rows, reader.order.unit_name)} of epoch {epochs}, "
            f"{len(reader.ranks)} of {format_count(reader.world_size, 'rank')}"
        )
        for one in reader.left_out:
            rows = format_count(sum(each.size for each in one.positions.values()), reader.order.unit_name)
            had = "" if one.steps is None else f", which the steps {one.steps[0]:,} to {one.steps[1] - 1:,} had used"
            print(f"left the deal before this step ({one.reason}): {rows}{had}")
        if any(rank.documents is not None for rank in reader.ranks):
            print(_document_tokens(reader))
        else:
            print(_every_row(reader) if every_row else _row_groups(reader))


def _row_groups(reader: ReaderStep) -> object:
    table = TextTable(">rank", "micro-batches", "file", ">row group", ">count", "rows")
    for rank in reader.ranks:
        head: tuple[str | int, str] = rank.rank, _micro_batches(rank)
        for one in rank.where:
            rows = format_rows(one.rows.pairs(), of=one.of) + one.how_counted
            table.add_row(*head, one.file, one.row_group, one.rows.size, rows)
            head = ("", "")
        if not rank.where:
            table.add_row(*head, "", "", 0, "")
    return table


def _every_row(reader: ReaderStep) -> object:
    table = TextTable(">rank", ">nth", "file", ">row group", ">row")
    for rank in reader.ranks:
        for number, table_row in enumerate(rank.table_rows.tolist()):
            file, row_group, row = reader.order.place(table_row)
            kept = "" if reader.order.is_stored(table_row) else " of the kept"
            table.add_row(rank.rank, number, file, row_group, f"{row}{kept}")
    return table


def _document_tokens(reader: ReaderStep) -> object:
    table = TextTable(">rank", ">epoch", ">sequence", "file", ">row group", ">row", "tokens")
    for rank in reader.ranks:
        for one in rank.documents or ():
            tokens = f"{one.start:,}–{one.stop - 1:,}"
            table.add_row(rank.rank, one.epoch, one.sequence, one.file, one.row_group, one.row, tokens)
    return table


def _micro_batches(rank: RankRows) -> str:
    return ", ".join(map(_micro_batch, rank.micro_batches[:4])) + (", …" if len(rank.micro_batches) > 4 else "")


def _micro_batch(one: MicroBatch) -> str:
    excluded = f", excluded: {one.excluded}" if one.excluded else ""
    return f"{one.number} (lane {one.lane}{excluded})" if one.lane >= 0 else f"{one.number} (the rest{excluded})"
