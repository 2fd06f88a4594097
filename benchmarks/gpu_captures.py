"""What does a capture at every step cost on a GPU?  ``python -m benchmarks.gpu_captures [--json FILE] [--device D]``

A GPT of 354 M parameters (24 layers of width 1024) is trained with AdamW, in bfloat16 with float32 weights: 4.2 GB of
state. Ways of saving take turns, a block of iterations each, in one process: none at all; lakeckpt's capture at *every*
iteration; and once a block (they could not keep up with more) ``torch.save``, ``async_save`` of
torch.distributed.checkpoint as it comes and with pinned memory that is kept, and torch_checkpointing where it is
installed (``pip install torch_checkpointing``), as it comes and with pinned memory. Blocks are compared with the block
of no saving beside them; what a save costs is the difference, by the number of saves. Medians over the repetitions, and
their spread. Beside it stands what the machine can do: how fast bytes leave the device, and how fast they are summed.

An iteration has ``--accumulate`` backward passes of ``--batch`` times 1024 tokens: the whole state has to pass the link
within one. Where it does not, captures are left out; how many were is printed, and the cost is not that of a capture at
every one. With few tokens the host, not the GPU, is what training waits for, and whatever else the host does costs:
what the host takes to queue an iteration is printed beside.

``--device cpu --quick`` runs all but what needs CUDA, to see that everything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId


class GPT(nn.Module):
    """A decoder of ``layers`` layers."""

    def __init__(self, *, layers: int, width: int, words: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of foretelling each next token."""
        length = tokens.shape[1] - 1
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        inner = self.words(tokens[:, :-1]) + self.places.weight[:length]
        inner = self.layers(inner, mask=mask, is_causal=True)
        foretold = nn.functional.linear(inner, self.words.weight)
        return nn.functional.cross_entropy(foretold.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Job:
    """The training."""

    def __init__(self, device: str, *, quick: bool, accumulate: int, batch: int) -> None:
        torch.manual_seed(0)
        self.accumulate = accumulate
        self.device = torch.device(device)
        small = {"layers": 2, "width": 64, "words": 1000, "context": 64}
        large = {"layers": 24, "width": 1024, "words": 50304, "context": 1024}
        sizes = small if quick else large
        self.model = GPT(**sizes).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        self.tokens = torch.randint(sizes["words"], (batch, sizes["context"]), device=self.device)

    def iterate(self, updating: Callable[[], AbstractContextManager[object]]) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model(self.tokens) / self.accumulate
            loss.backward()
        with updating():
            self.optimizer.step()

    def wait(self) -> None:
        """Let the device finish what trains."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def state(self) -> dict[str, Any]:
        """What others save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@dataclass(slots=True, kw_only=True)
class Way:
    """A way of saving: at every iteration, or once a block."""

    name: str
    save: Callable[[int], None] = lambda step: None
    always: bool = False
    updating: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    settle: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    blocks_s: list[float] = field(default_factory=list)


class Timed(CaptureEngine):
    """Counts cuts, and times what the training thread spends in them and in fences."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cuts_s: list[float] = []
        self.fences_s: list[float] = []
        self.skipped = 0

    def cut(self, cut: CutId, **how: Any) -> bool:
        """See `CaptureEngine.cut`."""
        begin_s, fences = time.perf_counter(), len(self.fences_s)
        began = super().cut(cut, **how)
        del self.fences_s[fences:]  # that of the cut itself
        self.cuts_s.append(time.perf_counter() - begin_s)
        self.skipped += not began
        return began

    def fence(self) -> None:
        """See `CaptureEngine.fence`."""
        begin_s = time.perf_counter()
        super().fence()
        self.fences_s.append(time.perf_counter() - begin_s)


def _ours(job: Job, folder: ArenaFolder) -> tuple[Way, Timed]:
    objects = {"model": job.model, "optimizer": job.optimizer}
    engine = Timed(objects, ArenaIdentity(run=b"gpu benchmark...", rank=0, world=1), folder=folder)

    def settle() -> None:
        engine.wait()

    engine.cut(CutId(attempt=0, step=0), digest=bytes(16), must=True)
    engine.wait()

    def save(step: int) -> None:
        engine.cut(CutId(attempt=0, step=step), digest=bytes(16), common=engine.completed)

    return Way(name="lakeckpt, every iteration", always=True, save=save, settle=settle), engine


def _torch_save(job: Job, folder: Path) -> Way:
    return Way(name="torch.save", save=lambda step: torch.save(job.state(), folder / "state.pt"))


def _async_save(job: Job, name: str, folder: Path, *, pinned: bool) -> Way:
    options: dict[str, Any] = {}
    if pinned:
        options["async_stager"] = DefaultStager(StagingOptions(True, False, True, True))
    running: list[Any] = []

    def save(step: int) -> None:
        running.append(dcp.async_save(job.state(), checkpoint_id=folder, no_dist=True, **options))

    @contextlib.contextmanager
    def updating() -> Any:
        if pinned and running:
            running[-1].staging_completion.result()  # what is staged beside training must be before the update
        yield

    def settle() -> None:
        for one in running:
            (one.upload_completion if hasattr(one, "upload_completion") else one).result()
        running.clear()
        shutil.rmtree(folder, ignore_errors=True)

    return Way(name=name, save=save, updating=updating, settle=settle)


def _torch_checkpointing(job: Job, name: str, folder: Path, *, pinned: bool) -> Way | None:
    try:
        from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found,unused-ignore]
        from torch_checkpointing.staging import CheckpointStagerConfig  # type: ignore[import-not-found,unused-ignore]
        from torch_checkpointing.storage.filesystem import (  # type: ignore[import-not-found,unused-ignore]
            LocalFileSystemStorageConfig,
        )
    except ImportError:
        return None
    config = CheckpointManager.Config.with_async_save()
    # Its version 0.1.1 writes odd lengths to files that it opened with O_DIRECT, which Linux refuses on ext4.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    if pinned:
        config.save.staging_config = CheckpointStagerConfig(
            use_pinned_memory=True, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=True
        )
    manager = CheckpointManager(config)
    running: list[Any] = []

    def save(step: int) -> None:
        running.append(manager.save(str(folder / str(step)), job.state()))

    def settle() -> None:
        for one in running:
            one.result()
        running.clear()
        shutil.rmtree(folder, ignore_errors=True)

    return Way(name=name, save=save, updating=manager.lock, settle=settle, close=manager.close)


def _queued_s(job: Job) -> float:
    """How long the host takes to queue an iteration."""
    job.wait()
    began = time.perf_counter()
    job.iterate(contextlib.nullcontext)
    seconds = time.perf_counter() - began
    job.wait()
    return seconds


def _block(job: Job, way: Way, iterations: int, begin: int) -> float:
    """Seconds of a block of iterations; what is written to storage beside it is waited for outside."""
    job.wait()
    began = time.perf_counter()
    for step in range(begin, begin + iterations):
        job.iterate(way.updating)
        if way.always or step == begin:
            way.save(step)
    job.wait()
    seconds = time.perf_counter() - began
    way.settle()
    return seconds


def _limits(device: torch.device) -> tuple[float, float]:
    """GB/s of copies off the device, and of checksums by one thread: the best of five."""
    size = 2**30 if device.type == "cuda" else 2**26
    there = torch.ones(size, dtype=torch.uint8, device=device)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copies, sums = [], []
    for _ in range(5):
        began = time.perf_counter()
        here.copy_(there)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        xxhash.xxh3_128_digest(here.numpy())
        sums.append(time.perf_counter() - began)
    return size / min(copies) / 1e9, size / min(sums) / 1e9


def _row(way: Way, bare: Way, iterations: int) -> list[str]:
    saves = iterations if way.always else 1
    extra = [1e3 * (one - other) / saves for one, other in zip(way.blocks_s, bare.blocks_s, strict=False)]
    ratio = [
        (one - other) / other * (iterations / saves) for one, other in zip(way.blocks_s, bare.blocks_s, strict=False)
    ]
    return [
        way.name,
        f"{1e3 * statistics.median(way.blocks_s) / iterations:.1f}",
        f"{statistics.median(extra):.2f}",
        f"{min(extra):.2f} … {max(extra):.2f}",
        f"{100 * statistics.median(ratio):.2f} %",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=20, help="in a block")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes an iteration")
    parser.add_argument("--batch", type=int, default=16, help="rows of 1024 tokens a backward pass")
    parser.add_argument("--others", type=int, default=3, help="repetitions that the other ways of saving take part in")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _others(job: Job, folder: Path) -> list[Way]:
    """The other ways of saving that there are."""
    on_gpu = job.device.type == "cuda"
    ways = [_torch_save(job, folder), _async_save(job, "async_save", folder / "a", pinned=False)]
    if on_gpu:
        ways.append(_async_save(job, "async_save, pinned, kept", folder / "b", pinned=True))
    for name, pinned in (("torch_checkpointing", False), ("torch_checkpointing, pinned", True))[: 1 + on_gpu]:
        other = _torch_checkpointing(job, name, folder / name, pinned=pinned)
        ways += [] if other is None else [other]
    return ways


def _take_turns(job: Job, mine: list[Way], others: list[Way], options: argparse.Namespace) -> None:
    """Blocks of all ways, one after the other; the first turn of each is none that counts."""
    begin = 1
    for repetition in range(1 + (2 if options.quick else options.repetitions)):
        for way in [*mine, *(others if options.others and repetition <= options.others else ())]:
            try:
                seconds = _block(job, way, options.iterations, begin)
            except Exception as error:  # of another's: it is told, and does not take part any more
                if way in mine:
                    raise
                said = str(error).strip().splitlines() or [""]
                print(f"{way.name} cannot do it: {type(error).__name__}: {said[0][:200]}", flush=True)
                others.remove(way)
                continue
            begin += options.iterations
            if repetition:
                way.blocks_s.append(seconds)
            print(f"{repetition}: {way.name}: {1e3 * seconds / options.iterations:.1f} ms", flush=True)
    for way in others:
        way.close()


def _told_of_captures(engine: Timed) -> dict[str, Any]:
    """How many cuts were captured, and what they took by the host's clock (medians, seconds)."""
    return {
        "captured": len(engine.cuts_s) - engine.skipped,
        "skipped": engine.skipped,
        "a_capture_s": {"cut": statistics.median(engine.cuts_s), "fence": statistics.median(engine.fences_s)},
    }


def main() -> int:
    """Measure, print, and write what was measured."""
    options = _arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: nothing was measured")
        return 0
    warnings.filterwarnings("ignore", module="torch")
    if options.device == "cpu":
        torch.set_num_threads(1)
    job = Job(options.device, quick=options.quick, accumulate=options.accumulate, batch=options.batch)
    queues_s = min(_queued_s(job) for _ in range(3))
    with place_for_a_run("gpu") as folder, place_for_a_run("gpu", under=MEMORY) as arenas:
        ours, engine = _ours(job, ArenaFolder(arenas))
        bare, others = Way(name="no saving"), _others(job, folder)
        try:
            _take_turns(job, [bare, ours], others, options)
            captures = _told_of_captures(engine)
        finally:
            engine.close()
    parameters = sum(one.numel() for one in job.model.parameters())
    ways = [way for way in (bare, ours, *others) if way.blocks_s]
    show(
        f"a GPT of {parameters / 1e6:.0f} M parameters with AdamW: {12 * parameters / 1e9:.2f} GB to save",
        ("way", "iteration, ms", "a save costs, ms", "spread, ms", "of an iteration"),
        [_row(way, bare, options.iterations) for way in ways],
    )
    link, sums = _limits(job.device)
    spent = ", ".join(f"{what} {1e3 * one:.2f} ms" for what, one in captures["a_capture_s"].items())
    print(f"the host takes {1e3 * queues_s:.1f} ms to queue an iteration")
    print(f"a capture by the host's clock: {spent}")
    print("lakeckpt: {captured} cuts captured, {skipped} skipped".format(**captures))
    print(f"bytes leave the device at {link:.1f} GB/s into pinned memory; a thread sums them at {sums:.1f} GB/s")
    if options.json is not None:
        told = {
            "on": {"torch": torch.__version__, "machine": platform.machine(), "device": _named(job.device)},
            "parameters": parameters,
            **{name: getattr(options, name) for name in ("iterations", "accumulate", "batch")},
            "host_queues_s": queues_s,
            **captures,
            "link_gb_per_s": link,
            "checksums_gb_per_s": sums,
            "blocks_s": {way.name: way.blocks_s for way in ways},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(told, indent=1))
    return 0


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    sys.exit(main())
