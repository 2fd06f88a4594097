"""This module reads how busy the GPUs of this node are, by ``nvidia-smi``, which asks NVML.

A kernel of a collective that waits for others shows as full use, and a rank that has not begun to compute as none. So
the use of a GPU is evidence that people read, and no rule of the verdict. A driver that hangs holds up whoever asks it
for ever; that is why a process asks, which is left to itself after a second. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping

from lakeckpt.watch.looks import GpuLook

__all__ = ["gpu_of", "look_at_gpus", "parsed"]

_PATIENCE_S, _KILLED_S = 1.0, 0.1
_COMMAND = ("--query-gpu=index,uuid,utilization.gpu,power.draw", "--format=csv,noheader,nounits")
_PROC = "/proc"


def look_at_gpus() -> Mapping[str, GpuLook]:
    """Return the GPUs of this node, each by its index and by its UUID; empty if there is no ``nvidia-smi``, or it does
    not answer within a second."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    try:
        process = subprocess.Popen(
            [command, *_COMMAND], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return {}
    assert process.stdout is not None
    with process.stdout:
        try:
            said, _ = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it: it is not waited for
                process.wait(_KILLED_S)
            return {}
    return parsed(said.decode(errors="replace")) if process.returncode == 0 else {}


def parsed(said: str) -> dict[str, GpuLook]:
    """Return the GPUs in the lines of ``nvidia-smi``, each by its index and by its UUID.

    >>> found = parsed("0, GPU-1f, 100, 88.31\\n1, GPU-2a, [N/A], [N/A]\\n")
    >>> str(found["0"]), str(found["GPU-2a"])
    ('GPU 0 is used at 100 %, with 88 W', 'GPU 1 is not measured')
    """
    found: dict[str, GpuLook] = {}
    for line in said.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[0].isdigit():
            look = GpuLook(index=int(words[0]), use_percent=_number(words[2]), watts=_number(words[3]))
            found |= {words[0]: look, words[1]: look}
    return found


def gpu_of(pid: int, gpus: Mapping[str, GpuLook]) -> GpuLook | None:
    """Return the GPU of a trainer: the one of its local rank among those that it may see, as scripts do it. None: it
    has opened none, or its launcher has not told it a local rank."""
    try:
        if not gpus or not _has_opened_one(pid):
            return None
        with open(f"{_PROC}/{pid}/environ", "rb") as environ:
            pairs = (one.partition(b"=") for one in environ.read().split(b"\0"))
            environment = {name: value.decode(errors="replace") for name, _, value in pairs}
    except OSError:
        return None
    local_rank = environment.get(b"LOCAL_RANK", "")
    visible = environment.get(b"CUDA_VISIBLE_DEVICES", "")
    names = [one.strip() for one in visible.split(",")] if visible else sorted(filter(str.isdigit, gpus), key=int)
    if len(names) == 1:
        return gpus.get(names[0])
    return gpus.get(names[int(local_rank)]) if local_rank.isdigit() and int(local_rank) < len(names) else None


def _has_opened_one(pid: int) -> bool:
    folder = f"{_PROC}/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith("/dev/nvidia"):
                return True
    return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
