"""This module makes nodes of this machine: network namespaces that virtual cables connect, with an address each.

Only processes that a `Node` started are killed: those of its namespace. Root and Debian's iproute2 are needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_SYSTEM_PATH = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


class Node:
    """A network namespace ``name`` that reaches its peer; ``address`` is its own."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> None:
        """Start ``command`` on this node, in ``folder``; what it writes is appended to ``node.log``."""
        own = {**environment, "GLOO_SOCKET_IFNAME": "cable"}
        with (folder / "node.log").open("ab") as log:
            one = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=own,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(one)

    def move(self, address: str) -> None:
        """Give this node another address."""
        _ip("-n", self.name, "address", "delete", f"{self.address}/24", "dev", "cable")
        self.address = address
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "cable")

    def cut_off(self) -> None:
        """Cut the cable: nothing that the nodes send arrives, and nobody is told."""
        _ip("-n", self.name, "link", "set", "cable", "down")

    def stop(self) -> None:
        """SIGSTOP every process of this node."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGSTOP)

    def statuses(self) -> list[int | None]:
        """Return the exit statuses of what was started; None for what runs."""
        return [process.poll() for process in self._started]

    def kill(self) -> None:
        """SIGKILL every process of this node, as a loss of power does."""
        while pids := _ip("netns", "pids", self.name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            self.statuses()  # collects the children
        for process in self._started:
            process.wait()


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Make two nodes, and remove them with all that runs there."""
    nodes = [Node(f"lakeckpt-{os.getpid()}-{number}", f"10.254.0.{number}") for number in (1, 2)]
    for node in nodes:
        _ip("netns", "add", node.name)
    try:
        one, other = nodes
        ends = [["cable", "netns", node.name] for node in nodes]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for node in nodes:
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", node.name, "link", "set", device, "up")
        yield one, other
    finally:
        for node in nodes:
            node.kill()
            _ip("netns", "delete", node.name)


@contextmanager
def several_nodes(count: int) -> Iterator[tuple[Node, ...]]:
    """Make so many nodes, which a switch of its own namespace connects, and remove them with all that runs there."""
    nodes = tuple(Node(f"lakeckpt-{os.getpid()}-{number}", f"10.254.0.{number}") for number in range(1, count + 1))
    hub = f"lakeckpt-{os.getpid()}-hub"
    names = [hub, *(node.name for node in nodes)]
    for name in names:
        _ip("netns", "add", name)
    try:
        _ip("-n", hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", hub, "link", "set", "switch", "up")
        for number, node in enumerate(nodes):
            port = f"port{number}"
            _ip("link", "add", "cable", "netns", node.name, "type", "veth", "peer", "name", port, "netns", hub)
            _ip("-n", hub, "link", "set", port, "master", "switch", "up")
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
        for name in names:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], env=_SYSTEM_PATH, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
