"""This module asks the scheduler to start this job again. It starts no threads."""

from __future__ import annotations

import os
import shutil
import subprocess

from lakeckpt.errors import ConfigError

__all__ = ["check_requeue", "requeue_job"]

_TIMEOUT_S = 60.0


def check_requeue(requeue: object, *, is_used: bool) -> None:
    """Raise `ConfigError` unless ``requeue`` is None, or ``"slurm"`` in a job of Slurm of which signals are handled."""
    if requeue is None:
        return
    if requeue != "slurm":
        raise ConfigError(f"requeue is 'slurm' or None, got {requeue!r}")
    if not is_used:
        raise ConfigError("requeue='slurm' acts on a signal: name the signals, as by save_on=('SIGTERM', 'SIGUSR1')")
    if not os.environ.get("SLURM_JOB_ID"):
        raise ConfigError("requeue='slurm' needs SLURM_JOB_ID in the environment: start the job by sbatch or srun")
    if shutil.which("scontrol") is None:
        raise ConfigError("requeue='slurm' runs scontrol, which is not on the PATH here: install Slurm's commands")


def requeue_job() -> str:
    """Requeue this job of Slurm if it runs. Returns why it is not requeued; empty if Slurm has accepted it.

    Slurm has a job that is cancelled, or that it requeues itself, in another state than RUNNING when it sends the
    signal. `scontrol requeue` would then start a job again that its user has cancelled.
    """
    job = os.environ["SLURM_JOB_ID"]
    try:
        if "JobState=RUNNING" not in _scontrol("show", "job", job).split():
            return "Slurm itself ends the job: it is not requeued from here"
        _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        cause = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"scontrol requeue {job} failed: {cause}"
    return ""


def _scontrol(*arguments: str) -> str:
    done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout
