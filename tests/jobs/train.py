"""A training script such as a user writes: run by the tests as real processes, which are killed at any moment.

Each rank appends what each optimizer step consumed to a file of its own, flushed line by line, so that what survives in
the history can be counted without any of lakeckpt's bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lakeckpt


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("table", "run", "notes"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--tail", default="short")
    parser.add_argument("--num-lanes", type=int)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--on-new-version", default="keep")
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pack", type=int, help="tokens of a sequence; documents are read then, not rows")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--capture-every", type=int)
    parser.add_argument("--mix", action="store_true", help="mix the tables that the table's folder holds")
    return parser.parse_args()


def yielded(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """None to three rows of a row."""
    for part in range(int(row["id"]) % 4):
        yield {"id": int(row["id"]) * 4 + part, "x": row["x"]}


WEIGHTS = ((0, (3.0, 1.0)), (6, (1.0, 1.0)), (14, (1.0, 3.0)))
"""(optimizer steps done, weights of the sources by name from there on)."""


def change_weights(loader: lakeckpt.LakeLoader, done: int) -> None:
    """Give the sources of a mixture the weights for what comes after ``done`` steps."""
    names, weights = loader.dataset.sources, [one for step, one in WEIGHTS if step <= done][-1]
    loader.set_weights(dict(zip(names, weights, strict=True)))


def epochs_of(batch: lakeckpt.Batch) -> list[int]:
    """The epoch of each position of the batch: in a mixture, of its source."""
    if "source" not in batch:
        return [span.epoch for span in batch.receipt.spans for _ in range(span.rows)]
    spans = [iter([span.epoch for span in mine for _ in range(span.rows)]) for _, mine in batch.receipt.spans]
    numbers = batch["source"].tolist()
    by_number = dict(zip(sorted(set(numbers)), spans, strict=True))
    return [next(by_number[number]) for number in numbers]


def contents(batch: lakeckpt.Batch) -> tuple[torch.Tensor, list[list[int]]]:
    """What the model gets, and the ids of each position: of its row, or the tokens of a packed sequence."""
    if "tokens" not in batch:
        return batch["x"], [[row] for row in batch["id"].tolist()]
    real = zip(batch["tokens"], batch["loss_mask"], strict=True)
    return batch["tokens"].float().mean(1), [tokens[mask].tolist() for tokens, mask in real]


def dataset_of(args: argparse.Namespace, table: Path) -> lakeckpt.LakeDataset:
    dataset = lakeckpt.LakeDataset(
        table,
        batch_size=args.batch_size,
        columns=None if args.pack else ["id", "x"],
        shuffle=args.shuffle,
        seed=5,
        options=lakeckpt.ReadOptions(num_lanes=args.num_lanes, on_new_version=args.on_new_version),
        drop_last=args.tail == "drop",
        endless=args.endless,
        follow=lakeckpt.Follow(poll_every_s=0.05, stop_after_idle_s=1.0) if args.follow else False,
        **({"transform": yielded, "rows": "many"} if args.many else {}),
    )
    return lakeckpt.pack(dataset, length=args.pack, labels=True) if args.pack else dataset


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    if world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    if args.mix:
        tables = sorted(one for one in Path(args.table).iterdir())
        sources = {one.name: (dataset_of(args, one), 1) for one in tables}
        dataset = lakeckpt.mix(sources, seed=3, num_lanes=args.num_lanes, source_column="source")
    else:
        dataset = dataset_of(args, Path(args.table))
    loader = lakeckpt.LakeLoader(dataset, num_workers=args.workers)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    notes = Path(args.notes) / f"{args.attempt:03d}-{rank}.jsonl"
    options: dict[str, Any] = {"persist_every": args.every, "keep": args.keep}
    if args.capture_every is not None:
        options |= {"capture_every": args.capture_every, "arenas": Path(args.notes).parent / "arenas"}
    with notes.open("a") as file, lakeckpt.CheckpointManager(args.run, state, **options) as manager:
        done = manager.restore()
        print(json.dumps({"restored": done}), file=file, flush=True)
        if args.mix:
            change_weights(loader, done)
        used: list[tuple[int, int]] = []  # (epoch, id)
        batches = 0
        once = args.follow or args.endless or args.mix
        for _ in range(1) if once else range(loader.epoch, args.epochs):
            for batch in loader:
                inputs, ids = contents(batch)
                rows = len(ids)
                outputs = model.eval()(inputs[:, None]) if rows < 2 else model.train()(inputs[:, None])
                (outputs.sum() / max(1, rows) * batch.receipt.weight).backward()
                epochs = [batch.receipt.epoch] * rows if args.many else epochs_of(batch)
                used += [(epoch, one) for epoch, mine in zip(epochs, ids, strict=True) for one in mine]
                batches += 1
                if batches % args.accumulate:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                print(json.dumps({"step": done, "ids": used}), file=file, flush=True)
                used = []
                manager.step(batch)
                if args.mix and done in dict(WEIGHTS):
                    change_weights(loader, done)
                if done >= args.steps:
                    break
        print(json.dumps({"finished": done}), file=file, flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
