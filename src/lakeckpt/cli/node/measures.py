"""This module measures a node: matrix products, copies, writes to a disk, and a test of memory.

A `Meter` measures one rate for a third of a second. That is far longer than a time slice of the scheduler, so a process
that takes a share of the core lowers every measurement. `best_rates` measures all of them in turn and keeps the best:
what disturbs the node for a moment then names no node. The products are compared bit by bit with the first one, because
a device may err without a word. The module starts no threads of its own; torch starts those of its products.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lakeckpt.cli.node.report import NodeCheck
from lakeckpt.cli.output import format_bytes, format_count

__all__ = ["Disk", "HostCopy", "Matmul", "Meter", "best_rates", "device_meters", "memory_test"]

_BURST_S = 0.3
_BLOCK_BYTES = 16 * 2**20
_DEVICE_COPY_BYTES = 64 * 2**20
_COPY_BYTES = 256 * 2**20
"""Far more than a last-level cache: with 64 MiB, and 32 MiB of cache, the rate was 13 to 19 GB/s, by what others left
in the cache; with 256 MiB it is 14.5 to 14.8."""
_DISK_BYTES = 32 * 2**20
_FILL_LEFT = 0.75
"""The share of the time of the memory test that is left for reading, and for the other patterns."""
_PATTERNS = (0x5555555555555555, 0xAAAAAAAAAAAAAAAA)
_NO_DIRECT = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class Meter:
    """Measures one rate: ``once`` does ``work`` units of it, and is called for a third of a second."""

    name, unit, work = "", "", 0.0

    def __init__(self) -> None:
        self.fault = ""
        self.text = ""

    def once(self) -> None:
        """Do the work once; its time is measured."""
        raise NotImplementedError

    def inspect(self) -> None:
        """Look at the result of `once`; this time is not measured."""

    def rate(self) -> float:
        """Return the rate of one burst."""
        spent, count = 0.0, 0
        while spent < _BURST_S:
            begin = time.perf_counter()
            self.once()
            spent += time.perf_counter() - begin
            count += 1
            self.inspect()
        return self.work * count / spent

    def close(self) -> None:
        """Free what the meter holds."""

    def check(self, rates: dict[str, float]) -> NodeCheck:
        """Return the check of this meter, with its rate in ``rates``."""
        return NodeCheck(name=self.name, value=rates.get(self.name), unit=self.unit, text=self.text, fault=self.fault)


class Matmul(Meter):
    """Multiplies two matrices that never change, and compares every product with the first."""

    unit = "GFLOP/s"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        size = 768 if device == "cpu" else 8192
        self.name, self.work = "matmul" if device == "cpu" else "matmul on the GPU", 2e-9 * size**3
        source = torch.Generator().manual_seed(35)
        self._left, self._right = (torch.randn(size, size, generator=source).to(device) for _ in range(2))
        self._is_host = device == "cpu"
        self._product = torch.empty_like(self._left)
        self.once()
        self._first = self._product.clone()

    def once(self) -> None:
        """Multiply."""
        torch.matmul(self._left, self._right, out=self._product)
        if not self._is_host:
            torch.cuda.synchronize()

    def inspect(self) -> None:
        """Compare the product with the first, bit by bit."""
        if not torch.equal(self._product.view(torch.int32), self._first.view(torch.int32)):
            wrong = int((self._product.view(torch.int32) != self._first.view(torch.int32)).sum())
            where = format_count(wrong, "element")
            self.fault = f"a matrix product differs from its first result in {where}: the node errs silently"


class HostCopy(Meter):
    """Copies memory of the host to memory of the host."""

    name, unit, work = "host copy", "GB/s", 1e-9 * _COPY_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._source, self._target = (np.full(_COPY_BYTES // 8, 7, np.uint64) for _ in range(2))

    def once(self) -> None:
        """Copy."""
        np.copyto(self._target, self._source)


class _DeviceCopy(Meter):
    """Copies pinned memory of the host to the device."""

    name, unit, work = "copy to the GPU", "GB/s", 1e-9 * _DEVICE_COPY_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._source = torch.ones(_DEVICE_COPY_BYTES // 4, dtype=torch.float32).pin_memory()
        self._target = torch.empty_like(self._source, device="cuda")

    def once(self) -> None:
        """Copy."""
        self._target.copy_(self._source, non_blocking=True)
        torch.cuda.synchronize()


class Disk(Meter):
    """Writes a file past the page cache, in a folder; the file has no name, so that none is left."""

    name, unit, work = "disk write", "GB/s", 1e-9 * _DISK_BYTES

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._data = mmap.mmap(-1, _DISK_BYTES)  # begins at a page, as direct writes need
        self._data.write(np.random.default_rng(35).bytes(_DISK_BYTES))
        self.text, self._descriptor = folder, -1
        try:
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600)
            os.pwrite(self._descriptor, memoryview(self._data)[:4096], 0)
        except OSError as error:
            self.close()
            if error.errno not in _NO_DIRECT:
                self.text = f"{folder} cannot be written: {error.strerror}"
            else:
                self.text = f"{folder} has no direct writes: name another folder by --disk"

    @property
    def can_write(self) -> bool:
        """Whether the file system of the folder has direct writes."""
        return self._descriptor >= 0

    def once(self) -> None:
        """Write, and wait until the disk has it."""
        view, done = memoryview(self._data), 0
        while done < _DISK_BYTES:
            done += os.pwrite(self._descriptor, view[done:], done)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, which removes it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def device_meters(index: int) -> list[Meter]:
    """Return the meters of the GPU ``index``; none if there is no GPU."""
    if not torch.cuda.is_available():
        return []
    torch.cuda.set_device(index % torch.cuda.device_count())
    return [Matmul("cuda"), _DeviceCopy()]


def best_rates(
    meters: Sequence[Meter], seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> dict[str, float]:
    """Measure all rates in turn, at least three times, until the time is up. Returns the best of each."""
    best: dict[str, float] = {}
    until, rounds = clock() + seconds, 0
    while rounds < 3 or clock() < until:
        for meter in meters:
            best[meter.name] = max(best.get(meter.name, 0.0), meter.rate())
        rounds += 1
    return best


def memory_test(
    most_bytes: int, seconds: float, *, clock: Callable[[], float] = time.monotonic, block_bytes: int = _BLOCK_BYTES
) -> NodeCheck:
    """Fill free memory with patterns that differ at each address, and read it again.

    At most ``most_bytes`` are filled, and fewer if the time is up; at least one block. All memory is freed at the end.
    """
    until = clock() + seconds
    addresses = np.arange(block_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = np.empty_like(addresses)
    blocks: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
    while not blocks or (len(blocks) * block_bytes < most_bytes and clock() < until - _FILL_LEFT * seconds):
        np.bitwise_xor(addresses, np.uint64(_PATTERNS[0] + len(blocks)), out=(block := np.empty_like(addresses)))
        blocks.append(block)
    wrong, passes = 0, 0
    for pattern in _PATTERNS:
        for at, block in enumerate(blocks if passes else ()):
            np.bitwise_xor(addresses, np.uint64(pattern + at), out=block)
        for at, block in enumerate(blocks):
            np.bitwise_xor(addresses, np.uint64(pattern + at), out=expected)
            wrong += int(np.count_nonzero(block != expected))
        passes += 1
        if clock() > until:
            break
    size = format_bytes(len(blocks) * block_bytes)
    fault = f"{wrong:,} words of {size} of memory did not keep what was written" if wrong else ""
    return NodeCheck(name="memory test", text=f"{size}, {format_count(passes, 'pattern')}", fault=fault)
