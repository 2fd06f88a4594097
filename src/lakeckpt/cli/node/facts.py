"""This module reads facts of a node: shared memory, limits of processes, versions, and what NVML says of its GPUs.

NVML is asked if a package with the module ``pynvml`` is installed. The module imports without torch, and starts no
threads.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import resource
from typing import Any

import lakeckpt
from lakeckpt.cli.node.report import NodeCheck
from lakeckpt.cli.output import format_bytes

__all__ = ["limit_checks", "nvml_checks", "version_checks"]

_LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
_LOCKED = resource.RLIMIT_MEMLOCK
_DRIVER = "/proc/driver/nvidia/version"
_SLOWED = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}


def limit_checks(shared: str = "/dev/shm") -> list[NodeCheck]:
    """Return the size of shared memory, and the limits of this process."""
    try:
        found = os.statvfs(shared)
        free, size = (format_bytes(count * found.f_frsize) for count in (found.f_bavail, found.f_blocks))
        text = f"{free} free of {size}"
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    limits = [f"{name} {_said(resource.getrlimit(limit)[0])}" for name, limit in _LIMITS.items()]
    locked = resource.getrlimit(_LOCKED)[0]
    limits.append(f"locked memory {'unlimited' if locked == resource.RLIM_INFINITY else format_bytes(locked)}")
    return [NodeCheck(name=shared, text=text), NodeCheck(name="limits", text=", ".join(limits))]


def version_checks(torch: Any) -> list[NodeCheck]:
    """Return the versions that must be alike on all ranks. ``torch``: the module."""
    nccl = ""
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    texts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lakeckpt": lakeckpt.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": nccl,
        "driver": _driver(),
    }
    return [NodeCheck(name=name, text=text or "absent", is_alike=True) for name, text in texts.items()]


def nvml_checks() -> list[NodeCheck]:
    """Return what NVML says of each GPU; one check that says so if NVML is not there."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return [NodeCheck(name="NVML", text="absent: no package has the module pynvml")]
    except Exception as error:  # a class of NVML's own
        return [NodeCheck(name="NVML", text=f"absent: {error}")]
    try:
        return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception as error:
        return [NodeCheck(name="NVML", text=f"failed: {error}")]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> NodeCheck:
    """Return the facts of a GPU. What the GPU or the driver does not support is left out."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    errors = _ask(nvml, "nvmlDeviceGetTotalEccErrors", gpu, 1, 0)  # uncorrected, since the driver was loaded
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", gpu)
    slowed = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
    degrees = _ask(nvml, "nvmlDeviceGetTemperature", gpu, 0)
    faults, texts = [], [f"{degrees} °C" if degrees is not None else ""]
    if errors is not None:
        texts.append(f"{errors} uncorrected errors of memory")
        faults += [texts[-1]] if errors else []
    if rows is not None:
        texts.append(f"{rows[1]} rows remapped after uncorrected errors")
        faults += ["a remap of rows failed"] if rows[3] else []
        faults += ["a remap of rows waits for a reset of the GPU"] if rows[2] else []
    texts += [name for bit, name in _SLOWED.items() if (slowed or 0) & bit]
    fault = f"GPU {index}: {', '.join(faults)}" if faults else ""
    return NodeCheck(name=f"GPU {index}", text=", ".join(filter(None, texts)) or "nothing is known", fault=fault)


def _ask(nvml: Any, name: str, *args: Any) -> Any:
    with contextlib.suppress(Exception):
        return getattr(nvml, name)(*args)
    return None


def _driver() -> str:
    try:
        with open(_DRIVER, encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _said(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
