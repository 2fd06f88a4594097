"""How do credentials reach the client of a store, and nothing else?

`Secrets` holds texts that must not be seen: its ``repr`` names them, `Secrets.scrub` takes them out of texts that
clients wrote, and a pickle of it holds a random ticket instead of the values. The values lie in a sealed file in memory
(a memfd, which has no name). Who unpickles the ticket gets them

- in the same process, and in what was forked from it since: from memory;
- in a process that ``multiprocessing`` is starting (spawn, forkserver): from the file, whose descriptor it inherits;
- in another process of the same user on the same machine, while the first one lives (a pool's, which gets the pickle
  through a pipe): from the file, by way of ``/proc``, where the system allows that;
- anywhere else: not at all. Using them raises `ConfigError`, which says to open the table or the run again there.

So a pickle in a file, a queue or a log holds none. Credentials of the environment need none of this: each process
finds them by itself. Never writes a secret to a disk, never logs, never unpickles.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import context, reduction
from typing import Any
from urllib.parse import quote

from lakeckpt.errors import ConfigError

__all__ = ["Secrets", "silent"]

_KEPT: dict[str, Secrets] = {}
_FILES: dict[str, tuple[int, int]] = {}  # ticket: (process, descriptor)
_QUIET = threading.local()
MOST_BYTES = 1 << 20
LEAST_TEXT = 4
"""Shorter texts are not scrubbed: they are in every message."""


class Secrets:
    """Values that are shown nowhere, by name. ``names`` may be shown; ``take()`` gives the values to a client."""

    __slots__ = ("_ticket", "_values", "names")

    def __init__(self, values: Mapping[str, str]) -> None:
        self.names = tuple(sorted(values))
        self._values: dict[str, str] | None = dict(values)
        self._ticket: str | None = None

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self.names)})"

    def __bool__(self) -> bool:
        return bool(self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.names or self._values is None:
            return (_received, (self._ticket or "", self.names, None))
        if self._ticket is None:
            self._ticket = secrets.token_hex(16)
            _KEPT[self._ticket] = self
        return (_received, (self._ticket, self.names, _passed(self._ticket, self._values)))

    def take(self) -> dict[str, str]:
        """A copy of the values. `ConfigError` in a process that they did not reach."""
        if self._values is None:
            raise ConfigError(
                f"the credentials ({', '.join(self.names)}) do not travel in a pickle, and this process cannot get "
                "them from the one that pickled it: open the table or the run here with storage_options, or keep "
                "credentials in the environment"
            )
        return dict(self._values)

    def scrub(self, text: str) -> str:
        """``text`` with ``***`` in place of every secret in it, as it is or as a URL shows it."""
        for secret in sorted({s for s in (self._values or {}).values() if len(s) >= LEAST_TEXT}, key=len, reverse=True):
            for shown in (secret, quote(secret, safe=""), quote(secret)):
                text = text.replace(shown, "***")
        return text


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep botocore's signer from logging, in this thread: at DEBUG level it writes session tokens."""
    _QUIET.depth = getattr(_QUIET, "depth", 0) + 1
    try:
        yield
    finally:
        _QUIET.depth -= 1


def _audible(record: logging.LogRecord) -> bool:
    return not getattr(_QUIET, "depth", 0)


logging.getLogger("botocore.auth").addFilter(_audible)


def _passed(ticket: str, values: Mapping[str, str]) -> tuple[int, int, Any]:
    """This process, the descriptor of the file, and the means to inherit it for the process that is being started."""
    known = _FILES.get(ticket)
    if known is None or known[0] != os.getpid():
        descriptor = os.memfd_create("lakeckpt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(descriptor, json.dumps({"ticket": ticket, "values": dict(values)}).encode())
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        _FILES[ticket] = known = (os.getpid(), descriptor)
    return (*known, None if context.get_spawning_popen() is None else reduction.DupFd(known[1]))


def _received(ticket: str, names: tuple[str, ...], passed: tuple[int, int, Any] | None) -> Secrets:
    """The `Secrets` of a ticket, as far as this process may have them."""
    kept = _KEPT.get(ticket)
    if kept is not None:
        return kept
    found = Secrets(dict.fromkeys(names, ""))
    values = None if passed is None else _read(ticket, *passed)
    if names and (values is None or set(values) != set(names)):
        found._values = None
    elif values is not None:
        found._values, found._ticket = values, ticket
        _KEPT[ticket] = found
    return found


def _read(ticket: str, process: int, descriptor: int, inherited: Any) -> dict[str, str] | None:
    """What the file of this ticket holds; None where it cannot be had, or is another's."""
    try:
        opened = (
            os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if inherited is None
            else None
        )
        own = inherited.detach() if opened is None else opened
        try:
            if not stat.S_ISREG(os.fstat(own).st_mode):
                return None
            told = json.loads(os.pread(own, min(os.fstat(own).st_size, MOST_BYTES), 0))
        finally:
            os.close(own)
        return dict(told["values"]) if secrets.compare_digest(told["ticket"], ticket) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
