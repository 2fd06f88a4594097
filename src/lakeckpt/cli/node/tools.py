"""This module runs the node checks of NVIDIA that it finds on PATH: dcgmi, ncclras, and all_reduce_perf of nccl-tests.

A tool that is not there is "absent", which is no fault. A tool that takes too long is killed, and that is no fault
either: it may wait for a service that does not run here. The module starts no threads; each tool is a child that has
ended, or was killed, when its check returns.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from lakeckpt.cli.node.report import NodeCheck

__all__ = ["tool_checks"]

_BANDWIDTH = re.compile(r"Avg bus bandwidth\s*:\s*([\d.]+)")
_FAILED = re.compile(r"\bfail(?:ed)?\b", re.IGNORECASE)
_SHOWN = 120


def tool_checks(gpus: int, *, timeout_s: float) -> list[NodeCheck]:
    """Run each tool for at most ``timeout_s``. ``gpus``: how many this node has."""
    return [_dcgmi(timeout_s), _ncclras(timeout_s), _nccl_tests(gpus, timeout_s)]


def _dcgmi(timeout_s: float) -> NodeCheck:
    name = "dcgmi diag -r 1"
    status, text = _run(["dcgmi", "diag", "-r", "1"], timeout_s)
    if status is None:
        return NodeCheck(name=name, text=text)
    said = next((line for line in text.splitlines() if _FAILED.search(line)), "")
    if status or said:
        return NodeCheck(
            name=name, fault=f"{name} ended with {status}: {' '.join((said or _last(text)).split())}"[:_SHOWN]
        )
    return NodeCheck(name=name, text="passed")


def _ncclras(timeout_s: float) -> NodeCheck:
    status, text = _run(["ncclras"], timeout_s)
    return NodeCheck(name="ncclras", text=text if status is None else _last(text)[:_SHOWN] or f"ended with {status}")


def _nccl_tests(gpus: int, timeout_s: float) -> NodeCheck:
    name = "all_reduce_perf"
    command = [name, "-b", "8M", "-e", "128M", "-f", "4", "-g", str(max(1, gpus))]
    status, text = _run(command, timeout_s)
    found = _BANDWIDTH.search(text)
    if status == 0 and found:
        return NodeCheck(name=name, value=float(found[1]), unit="GB/s")
    return NodeCheck(name=name, text=text if status is None else f"ended with {status}: {_last(text)}"[:_SHOWN])


def _run(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Return the exit status and the output; or None, and why there is no status."""
    if shutil.which(command[0]) is None:
        return None, "absent"
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return None, f"did not end within {timeout_s:.0f} s"
    except OSError as error:
        return None, f"cannot be run: {error.strerror}"
    return ran.returncode, ran.stdout.decode("utf-8", "replace")


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
