"""Let the kernel fail every system call of the commit path in turn: nothing acknowledged is lost, nothing is torn.

strace makes the n-th call of a kind fail (EIO, ENOSPC) or kills the process there, for every n. It also shows that
the calls of a put come in the order that makes it durable.
"""

from __future__ import annotations

import errno
import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.lake.storage.local import LocalStorage
from tests.patience import PATIENCE_S
from tests.system.write_objects import PUTS

SCRIPT = Path(__file__).with_name("write_objects.py")
OBSERVED = "fsync,rename,link,mkdir,write,flock,unlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a writer said, how it ended, and which of the observed calls it made, in order."""

    status: int
    said: list[dict[str, Any]]
    calls: list[str]

    @property
    def returned(self) -> int:
        return sum("returned" in message for message in self.said)


def writer_under_strace(root: Path, *inject: str) -> Run:
    trace = root.with_name(f"{root.name}.strace")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={OBSERVED}"]
    for what in inject:
        command += ["-e", f"inject={what}"]
    command += [sys.executable, "-B", str(SCRIPT), str(root), str(theirs.fileno())]
    with ours, theirs:
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=PATIENCE_S)
        theirs.close()
        said = []
        while message := ours.recv(65536):
            said.append(json.loads(message))
    assert "Traceback" not in done.stderr, done.stderr
    return Run(status=done.returncode, said=said, calls=_calls_in(trace, root))


def _calls_in(trace: Path, root: Path) -> list[str]:
    """Every observed call as ``name path``; the path is that of a descriptor, with ROOT for the storage's root."""
    found = []
    for line in trace.read_text().splitlines():
        if match := re.match(r"\d+ +(\w+)\((.*)", line):
            name, rest = match.groups()
            path = re.search(r"<(/[^>]*)>", rest) or re.search(r'"(/[^"]*)"', rest)
            found.append(f"{name} {path.group(1) if path else ''}".replace(str(root), "ROOT"))
    return found


def what_is_wrong(root: Path, run: Run) -> list[str]:
    storage = LocalStorage(root)
    found = {info.path: storage.read(info.path).decode() for info in storage.list()}
    allowed: dict[str, set[str | None]] = {key: {None} for _, key, _ in PUTS}
    for i, (_, key, text) in enumerate(PUTS):
        if i < run.returned:
            allowed[key] = {text}
        elif i == run.returned:
            allowed[key] = allowed[key] | {text}
    wrong = [f"{key}: {str(found.get(key))[:20]}" for key, texts in allowed.items() if found.get(key) not in texts]
    return wrong + [f"{key}: nobody put it" for key in found if key not in allowed]


def test_a_put_is_written_synced_named_and_its_folder_synced_in_this_order(tmp_path: Path) -> None:
    run = writer_under_strace(tmp_path / "run")
    assert (run.status, run.returned) == (0, len(PUTS))
    calls = "\n".join(re.sub(r"\.lakeckpt-\w+\.tmp", "TEMPORARY", call) for call in run.calls)
    put = (
        r"write ROOT/objects/1/TEMPORARY\nfsync ROOT/objects/1/TEMPORARY\n"
        r"rename ROOT/objects/1/TEMPORARY\nfsync ROOT/objects/1\n"
    )
    put_new = r"write ROOT/log/TEMPORARY\nfsync ROOT/log/TEMPORARY\nlink ROOT/log/TEMPORARY\nfsync ROOT/log\n"
    made = r"mkdir [^\n]*\nfsync [^\n]*\n"
    lines = re.sub(r"flock [^\n]*\n|unlink [^\n]*\n", "", calls + "\n")
    assert len(re.findall(put, lines)) == 2, lines
    assert len(re.findall(put_new, lines)) == 2, lines
    assert len(re.findall(made, lines)) == 4, lines


CALLS = ["fsync", "rename", "link", "mkdir", "write", "flock", "unlink"]


def count_of(call: str, run: Run) -> int:
    return sum(made.split()[0] == call for made in run.calls)


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return writer_under_strace(tmp_path_factory.mktemp("sound") / "run")


@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC", "signal=SIGKILL"])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_at_any_call_loses_nothing_that_was_acknowledged(
    tmp_path: Path, sound_run: Run, call: str, fault: str
) -> None:
    times = count_of(call, sound_run)
    assert times > 0, f"{call} is not made at all: {sound_run.calls}"
    for n in range(1, times + 1):
        root = tmp_path / f"run-{n}"
        run = writer_under_strace(root, f"{call}:{fault}:when={n}")
        assert what_is_wrong(root, run) == [], (n, run)
        if fault == "signal=SIGKILL":
            assert run.status == -signal.SIGKILL or run.status == 128 + signal.SIGKILL, (n, run)
        elif run.status:
            assert run.said[-1]["errno"] in (errno.EIO, errno.ENOSPC), (n, run)
        else:
            assert run.returned == len(PUTS), (n, run)


@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC"])
def test_where_every_fsync_fails_nothing_is_acknowledged(tmp_path: Path, fault: str) -> None:
    run = writer_under_strace(tmp_path / "run", f"fsync:{fault}")
    assert run.returned == 0
    assert run.status == 3
    assert run.said[0]["failed"] == 0


def test_after_a_failed_fsync_the_file_is_never_synced_again(tmp_path: Path, sound_run: Run) -> None:
    order = [call for call in sound_run.calls if call.startswith("fsync")]
    n = next(i for i, call in enumerate(order, 1) if ".lakeckpt-" in call)
    run = writer_under_strace(tmp_path / "run", f"fsync:error=EIO:when={n}")
    assert (run.status, run.returned) == (3, 0)
    synced = [call for call in run.calls if call.startswith("fsync") and ".lakeckpt-" in call]
    assert len(synced) == 1
