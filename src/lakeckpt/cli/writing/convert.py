"""This module runs ``lakeckpt convert``: it writes a checkpoint in the format of others, or makes a run of theirs."""

from __future__ import annotations

import argparse
import dataclasses

from lakeckpt.cli.output import format_bytes, format_count, print_json
from lakeckpt.cli.run_arguments import options_of
from lakeckpt.errors import ConfigError

__all__ = ["add_arguments", "run"]

_KINDS = {
    "run": "a run's checkpoint",
    "torch": "a file of torch.save",
    "safetensors": "safetensors",
    "lightning": "a checkpoint of Lightning",
    "transformers": "a checkpoint of transformers' Trainer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt convert``."""
    parser.add_argument("source", metavar="SOURCE", help="a run, a file of torch.save, safetensors, a Trainer's folder")
    parser.add_argument("target", metavar="TARGET", help="a new folder, or a URL; a new file, for torch")
    parser.add_argument("--to", choices=["torch", "safetensors", "run"], required=True, help="the format to write")
    parser.add_argument("--item", metavar="NAME", help="write this part of the state alone, such as model")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint of this step (default: newest)")
    parser.add_argument("--rank", type=int, metavar="R", help="of a run: what this rank had (default: all ranks)")
    parser.add_argument(
        "--object",
        metavar="NAME=PART",
        action="append",
        default=[],
        help="to a run: an object, and the part of SOURCE that is its state, in place of all parts",
    )
    parser.add_argument("--steps-done", type=int, metavar="N", help="to a run: optimizer steps that SOURCE had done")
    parser.add_argument("--storage-options", metavar="JSON", help="for the source's store, as fsspec takes them")
    parser.add_argument("--target-options", metavar="JSON", help="for the target's store, likewise")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def run(args: argparse.Namespace) -> int:
    """Convert and print. Returns the exit status."""
    from lakeckpt.convert import convert_checkpoint

    done = convert_checkpoint(
        args.source,
        args.target,
        to=args.to,
        item=args.item,
        step=args.step,
        rank=args.rank,
        objects=_pairs("--object", args.object),
        steps_done=args.steps_done,
        storage_options=options_of(args.storage_options),
        target_options=options_of(args.target_options),
    )
    if args.json:
        print_json(dataclasses.asdict(done))
        return 0
    what = f"{format_count(done.tensors, 'tensor')} ({format_bytes(done.size_bytes)})"
    if done.values:
        what += f" and {format_count(done.values, 'other value')}"
    if done.steps_done is not None:
        print(f"{what} of {_KINDS[done.source]} are a run at step {done.steps_done} in {args.target}")
        print(f"its objects: {', '.join(done.objects)}. A loader joins it: manager.restore(allow_missing=('reader',))")
        return 0
    print(f"{what} of {_KINDS[done.source]} are {_KINDS[done.target]} in {args.target}")
    return 0


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Return name → value of texts like ``NAME=VALUE``. `ConfigError` for others."""
    pairs = [text.partition("=") for text in texts]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise ConfigError(f"{option} is NAME=VALUE, got {name + equals + value!r}")
    return {name: value for name, _, value in pairs}
