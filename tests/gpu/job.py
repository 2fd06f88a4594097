"""A training script for one GPU such as a user writes, in several manners of training; run as real processes.

Each attempt appends what each optimizer step consumed to a file of its own, and, when it ends well, a digest of all
that the run came to: weights, moments, buffers, and the random numbers that would come next. Everything is
deterministic, so that a run that was killed and goes on can be compared bit by bit with one that was not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
from datetime import timedelta
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is used: makes its sums reproducible

import torch
import torch.distributed as dist
from torch import nn

import lakeckpt
import lakeckpt.bubbles

MANNERS = ("plain", "amp", "compiled", "graphs", "ddp", "fsdp", "watched", "accumulating")
WIDTH = 256


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("table", "run", "notes"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--arenas", help="capture every step into this folder")
    parser.add_argument("--manner", choices=MANNERS, default="plain")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int)
    return parser.parse_args()


class Net(nn.Module):
    """Weights that learn, running averages, and random numbers of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(WIDTH, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.inner(self.norm(self.first(features)).relu()).relu()))


def prepared(model: nn.Module, manner: str, device: str) -> Any:
    """The model that is called."""
    if manner == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if manner == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.inner:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if manner in ("compiled", "graphs"):
        return torch.compile(model, mode="reduce-overhead" if manner == "graphs" else None)
    return model


def digest_of(*objects: Any) -> str:
    """Of all tensors in the state dicts, and of the random numbers that come next."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    for one in objects:
        add(one.state_dict())
    return found.hexdigest()


def main() -> None:
    args = parse()
    torch.use_deterministic_algorithms(True)
    if args.manner in ("ddp", "fsdp"):
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{args.notes}/meet-{os.getpid()}", rank=0, world_size=1,
            timeout=timedelta(seconds=120),
        )  # fmt: skip
    torch.manual_seed(0)
    model = Net().to(args.device)
    called = prepared(model, args.manner, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.device == "cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler(args.device, enabled=args.manner == "amp")
    dataset = lakeckpt.LakeDataset(args.table, batch_size=16, columns=["id", "x"], shuffle=True, seed=5)
    loader = lakeckpt.LakeLoader(dataset, num_workers=args.workers, pin_memory=args.device == "cuda")
    state = {"model": called, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "reader": loader}
    how: dict[str, Any] = {"persist_every": args.every}
    if args.arenas:
        how |= {"capture_every": 1, "arenas": args.arenas}
    batches: Any = loader
    if args.manner == "watched":
        how["bubbles"] = bubbles = lakeckpt.bubbles.Bubbles(args.device)
        if args.device == "cuda":  # on the CPU it waits for nothing
            bubbles.watch(model)
        batches = bubbles.watch(loader)
    accumulate = 2 if args.manner == "accumulating" else 1
    casting = (
        torch.autocast(args.device, torch.float16 if args.device == "cuda" else torch.bfloat16)
        if args.manner == "amp"
        else contextlib.nullcontext()
    )
    with open(args.notes + f"/{os.getpid()}.jsonl", "a") as file, lakeckpt.CheckpointManager(
        args.run, state, **how
    ) as manager:  # fmt: skip
        done = manager.restore()
        print(json.dumps({"restored": done}), file=file, flush=True)
        used: list[tuple[int, int]] = []
        count = 0
        while done < args.steps:
            for batch in batches:
                features = batch["x"].to(args.device, non_blocking=True)[:, None] * torch.ones(4, device=args.device)
                with casting:
                    loss = called(features).float().square().mean() * batch.receipt.weight / accumulate
                scaler.scale(loss).backward()
                epochs = [span.epoch for span in batch.receipt.spans for _ in range(span.rows)]
                used += zip(epochs, batch["id"].tolist(), strict=True)
                count += 1
                if count % accumulate:
                    continue
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
                done += 1
                print(json.dumps({"step": done, "ids": used}), file=file, flush=True)
                used = []
                manager.step(batch)
                if args.arenas and args.die_at is not None and done == args.die_at - 1:
                    manager._saves._engine.wait()  # type: ignore[union-attr] # the next one is not left out
                if done == args.die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if done == args.steps:
                    break
        said = digest_of(model, optimizer, schedule, scaler)
        coming = torch.rand(3, device=args.device).tolist(), torch.rand(3).tolist()
        print(json.dumps({"finished": done, "digest": said, "coming": coming}), file=file, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
