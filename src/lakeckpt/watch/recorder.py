"""This module reads the flight recorder of torch in another process, by the socket that the process serves.

The trainer serves it (`lakeckpt.checkpoint.faults.marks`). The handler is C++: it answers also if a call in C keeps the
interpreter's lock, but not if the process is stopped. An answer takes about 15 ms. The recorder of gloo does not say
which ranks a group has: only those of the default group are known, and ``members`` is empty in another one. The module
imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

from lakeckpt.watch.looks import Collective

__all__ = ["collectives_of", "recorded_at", "socket_path"]

_TIMEOUT_S = 1.0
_ORDER = "/handler/fr_trace_json"
_DEFAULT = "default_pg"


def socket_path(page_path: str) -> str:
    """Return where the rank with this page serves its recorder."""
    return f"{page_path.removesuffix('.beat')}.sock"


def recorded_at(path: str, world: int) -> tuple[Collective, ...]:
    """Return the newest collective of each group of the process that serves at ``path``; empty if it does not answer.
    ``world``: ranks of its default group."""
    connection = _Connection(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
        connection.request("POST", _ORDER)
        answer = connection.getresponse()
        if answer.status == http.client.OK:
            return collectives_of(json.loads(answer.read()), world)
    connection.close()
    return ()


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket of this machine."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def collectives_of(trace: dict[str, Any], world: int) -> tuple[Collective, ...]:
    """Return the newest collective of each group of a trace. Sends and receives do not count.

    >>> entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 4, "is_p2p": False, "retired": False,
    ...          "profiling_name": "gloo:all_reduce", "input_sizes": [[7]]}
    >>> status = {"0": {"last_completed_collective": "3", "last_enqueued_collective": "4"}}
    >>> one = collectives_of({"entries": [entry], "pg_status": status}, 2)[0]
    >>> one.members, one.number, one.completed, one.operation, one.sizes
    ((0, 1), 4, 3, 'all_reduce', '[[7]]')
    """
    newest: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries", ()):
        group = entry["process_group"][0]
        if not entry["is_p2p"] and entry["collective_seq_id"] >= newest.get(group, entry)["collective_seq_id"]:
            newest[group] = entry
    found = []
    for group, entry in sorted(newest.items()):
        number = int(entry["collective_seq_id"])
        status = trace.get("pg_status", {}).get(group, {})
        config = trace.get("pg_config", {}).get(group, {})
        members = tuple(json.loads(config.get("ranks") or "[]"))
        completed = number if entry["retired"] else number - 1
        found.append(
            Collective(
                group=group,
                members=members or (tuple(range(world)) if entry["process_group"][1] == _DEFAULT else ()),
                number=number,
                completed=max(0, min(number, int(status.get("last_completed_collective", completed)))),
                operation=entry["profiling_name"].rpartition(":")[2],
                sizes=json.dumps(entry.get("input_sizes", [])),
            )
        )
    return tuple(found)
