"""This module starts the ranks of a job on this node as torchrun does, but from a process that has imported torch.

`lakeckpt run` takes torchrun's options, and torchrun's own agent starts, watches and restarts the ranks. *Warm* ranks
are forked from a server that has imported what training scripts import (`lakeckpt.cli.launch.warm`), so a restart takes
tenths of a second instead of the seconds of these imports. *Cold* ranks are started as torchrun starts them: with
``--cold``, if the command is no Python script, if the server cannot be forked safely, and after two deaths in a row
without progress, so that a damaged driver or library shows.

If no rank begins an attempt of its run (`lakeckpt.checkpoint.ranks.note_begun`), a restart does not mend the cause,
such as an import error: after three of these attempts the launcher ends with the script's own exit status. If a restore
finds that no restart helps (status 93), or that this node leaves the job (94), the launcher ends with that status. It
notes the exit status of each rank that failed beside the rank's page. The module starts no threads.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from lakeckpt.checkpoint.ranks import LAUNCH, MIN_NODES
from lakeckpt.cli.launch.attempts import ATTEMPTS_WITHOUT_BEGIN, WARM_DEATHS, Attempts
from lakeckpt.errors import ConfigError, CrashLoop, NodeLeaves
from lakeckpt.recovery.progress import LEAVES

__all__ = ["PRELOAD", "parse"]

PRELOAD = "LAKECKPT_PRELOAD"
"""The environment variable with modules that the fork server imports for the user, separated by commas."""

_MAX_RESTARTS = 1000
_LAST_CALL_S = 5


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of ``lakeckpt run``, which are torchrun's and two more; ``run`` carries them out."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.description = "lakeckpt run", __doc__.partition("\n\n")[0]
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="import it before ranks start")
    parser.add_argument("--cold", action="store_true", help="start each rank as torchrun does")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error of the launcher")
    changed = _change_defaults(parser)
    args = parser.parse_args(argv)
    if not (args.module or args.no_python or Path(args.training_script).is_file()):
        parser.error(f"there is no script {args.training_script!r} in {os.getcwd()}")
    args.changed, args.run = changed, _run
    return args


def _change_defaults(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Change defaults that torchrun's environment variables (``PET_…``) do not set. Returns what they were."""
    changed = {}
    for name, value in (("rdzv_backend", "c10d"), ("max_restarts", _MAX_RESTARTS)):
        if f"PET_{name.upper()}" not in os.environ:
            changed[name] = str(parser.get_default(name))
            parser.set_defaults(**{name: value})
    return changed


def _run(args: argparse.Namespace) -> int:
    """Run the job on this node. Returns the exit status: 0, or that of the rank that failed first."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api
    from torch.distributed.run import config_from_args

    _say_defaults(args)
    config, command, arguments = config_from_args(_rendezvous(args))
    config.rdzv_configs.setdefault("last_call_timeout", _LAST_CALL_S)
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[PRELOAD] = ",".join(_found(args.preload))
    os.environ[MIN_NODES] = str(config.min_nodes)
    with tempfile.TemporaryDirectory(prefix="lakeckpt-run-") as folder:
        os.environ[LAUNCH] = folder
        attempts = Attempts(folder)
        agent = _agent_class(attempts, _Ways(args, command, arguments))
        with mock.patch.object(api, "LocalElasticAgent", agent):
            try:
                api.elastic_launch(config=config, entrypoint=command)(*arguments)
            except ChildFailedError as error:
                print(error, file=sys.stderr)
                return attempts.ends or _status(error)
            except SignalException as ended:
                return attempts.ends or 128 + int(ended.sigval)
    return 0


def _say(words: str) -> None:
    print(f"lakeckpt run: {words}", file=sys.stderr, flush=True)


def _say_defaults(args: argparse.Namespace) -> None:
    """Print each default that differs from torchrun's and holds."""
    now = {name: str(getattr(args, name)) for name in args.changed}
    said = [f"--{name.replace('_', '-')}={now[name]} ({was})" for name, was in args.changed.items() if now[name] != was]
    if "last_call_timeout" not in args.rdzv_conf:
        said.append(f"--rdzv-conf=last_call_timeout={_LAST_CALL_S} (30)")
    if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
        said.append("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (0)")
    if not args.cold:
        said.append("ranks start warm (--cold)")
    _say(f"differs from torchrun, whose default is in brackets: {', '.join(said)}")


def _rendezvous(args: argparse.Namespace) -> argparse.Namespace:
    """Give the c10d rendezvous the address that torchrun's options name, or one on this node if there is one node."""
    if args.rdzv_backend == "static":
        _say("with --rdzv-backend=static a lost rank of another node is not replaced in minutes: c10d is meant for it")
    elif args.rdzv_backend == "c10d" and not args.rdzv_endpoint:
        if args.standalone or args.nnodes in ("1", "1:1"):
            args.rdzv_endpoint, args.rdzv_id = "localhost:0", str(uuid.uuid4())
        elif args.master_addr != "127.0.0.1":
            args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 29500}"
        else:
            raise ConfigError(
                f"a job on {args.nnodes} nodes needs a place to meet: give --rdzv-endpoint=HOST[:PORT] of one of them, "
                "the same on each node"
            )
    if args.master_port is None:
        args.master_port = 29500
    return args


def _found(modules: Sequence[str]) -> list[str]:
    """Refuse modules that are not there."""
    for name in modules:
        try:
            missing = importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            raise ConfigError(
                f"--preload names {name!r}, and there is no such module: {sys.executable} does not find it"
            )
    return list(modules)


def _status(error: Any) -> int:
    """Return the exit status of the rank that failed first, as a shell gives it."""
    _, first = error.get_first_failure()
    return int(first.exitcode) if first.exitcode >= 0 else 128 - int(first.exitcode)


class _Ways:
    """How ranks are started: (entry point, its arguments), as torch's agent takes them."""

    def __init__(self, args: argparse.Namespace, command: Any, arguments: list[str]) -> None:
        self._args, self._command, self._arguments = args, command, arguments
        self._is_checked = False
        self._why_cold = "--cold was given" if args.cold else self._no_script()

    def _no_script(self) -> str:
        if self._args.no_python or self._args.run_path:
            return "--no-python or --run-path was given"
        if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
            return f"PYTHON_EXEC names another Python, {os.environ['PYTHON_EXEC']}"
        return ""

    def next(self, *, stuck: bool) -> tuple[Any, tuple[Any, ...]]:
        """Return how the next attempt is started; ``stuck``: the last ones died without progress."""
        if not self._why_cold and not self._is_checked:
            self._why_cold, self._is_checked = _server_fault(), True
        if self._why_cold or stuck:
            _say(f"ranks start cold: {self._why_cold or f'{WARM_DEATHS} deaths in a row without progress'}")
            return self._command, tuple(self._arguments)
        return _enter, (self._args.training_script, self._args.module, *self._args.training_script_args)


def _server_fault() -> str:
    """Start the fork server, and return why it cannot be forked; '' if it can be."""
    import torch._dynamo  # noqa: F401  # torch's logging of a failed rank imports it: here, before all ranks wait

    multiprocessing.set_forkserver_preload(["lakeckpt.cli.launch.warm"])
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe(duplex=False)
    probe = context.Process(target=_probe, args=(its,))
    try:
        probe.start()
        its.close()
        fault = mine.recv()
        probe.join()
    except (EOFError, OSError) as error:
        return f"the fork server ended while it imported modules ({type(error).__name__}: its output is above)"
    return str(fault)


def _probe(answer: Any) -> None:
    """Say, in a process that the server forked, why it should not have been."""
    import torch

    warm, fault = sys.modules.get("lakeckpt.cli.launch.warm"), ""  # it is there if the server imported it
    if warm is None:
        fault = "the fork server could not import lakeckpt.cli.launch.warm"
    elif warm.added:
        fault = f"a module of --preload has started {warm.added} threads, which a forked process would not have"
    elif torch.cuda._is_in_bad_fork():
        fault = "a module of --preload has initialized CUDA, which does not work in a forked process"
    answer.send(fault)


def _enter(script: str, is_module: bool, *arguments: str) -> None:
    """Run the training script, in a process that was forked for a rank."""
    import numpy as np

    np.random.seed()  # the server has seeded it once for all
    sys.argv = [script, *arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    with _ended():
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """End as Python does: print what was raised, and call the functions of atexit, which multiprocessing does not."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (CrashLoop, NodeLeaves) as error:  # rank 0 has said why
        sys.exit(error.code)
    except Exception:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _agent_class(attempts: Attempts, ways: _Ways) -> Callable[..., Any]:
    """Return torch's agent, which asks ``ways`` how to start ranks, and tells ``attempts`` how they ended."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            spec = worker_group.spec
            spec.entrypoint, spec.args = ways.next(stuck=attempts.is_stuck)
            self._start_method = "forkserver"
            pids: dict[int, Any] = super()._start_workers(worker_group)
            return pids

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                local = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
                failures = {local[rank]: failure for rank, failure in (result.failures or {}).items()}
                attempts.failed(worker_group.spec.max_restarts - self._remaining_restarts, failures)
                if attempts.ends == LEAVES:
                    _say("this node leaves the job, and the others go on")
                    # At any other end the agent closes the rendezvous, and the launchers of the others end, too.
                    raise SignalException("this node leaves the job", signal.SIGTERM)
                if attempts.ends:
                    self._remaining_restarts = 0
                elif attempts.is_hopeless and self._remaining_restarts:
                    _say(f"{ATTEMPTS_WITHOUT_BEGIN} attempts failed before the run began: this is the end")
                    self._remaining_restarts = 0
            return result

    return Agent
