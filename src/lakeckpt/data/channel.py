"""How do the main process and a worker talk?  Messages over a pair of sockets, until one of the two is gone.

A message is bytes, and small: micro-batches themselves lie in a slot memory. Whoever waits to send reads meanwhile,
so that two who send to each other never wait for ever. That the other process is gone shows by a descriptor of it
(pidfd) even where strangers have inherited the socket by a fork; where the system has no such descriptors, every few
seconds.

It starts no thread, and never interprets a message.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Channel", "PeerGone"]

_HEAD = struct.Struct("<Q")
_LOOK_EVERY_S = 5.0
_ERRORS = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerGone(Exception):
    """The other process is gone, or has closed its end."""


class Channel:
    """One end. For one thread at a time."""

    def __init__(self, end: socket.socket, peer: int, is_alive: Callable[[], bool]) -> None:
        """``end`` is the channel's from now on; ``peer`` is the process at the other, asked after by ``is_alive``."""
        end.setblocking(False)
        self._end, self._is_alive = end, is_alive
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._over = False
        self._peer: int | None = None
        try:
            self._peer = os.pidfd_open(peer)
        except (AttributeError, OSError):
            pass
        self._polls: dict[int, select.poll] = {}
        """By the events that are waited for."""
        self._woken: socket.socket | None = None
        self._waker: socket.socket | None = None

    def send(self, message: bytes) -> None:
        """Send ``message``; PeerGone where nobody will read it."""
        left = memoryview(_HEAD.pack(len(message)) + message)
        while left:
            try:
                left = left[self._end.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if self._wait(select.POLLOUT | select.POLLIN, None) & select.POLLIN:
                    self._read()
                if self._over:  # the socket may not show it: a forked worker has the other end itself
                    raise PeerGone from None
            except OSError as error:
                raise PeerGone from error

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Return the next message; None where there is none within ``timeout_s`` (None: it waits for ever), or where
        it was woken meanwhile (`waker`).

        Raises PeerGone once the other process is gone, and all that it had sent has been returned.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            if self._over:
                raise PeerGone
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait(select.POLLIN, left):
                return None
            self._read()
        return self._messages.popleft()

    def waker(self) -> Callable[[], None]:
        """Return what makes `receive` return while it waits, or at its next call: for any thread, at any time."""
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._polls.clear()
        return self._wake

    def _wake(self) -> None:
        assert self._waker is not None
        with contextlib.suppress(OSError):  # it has been woken often enough, or is closed
            self._waker.send(b"w", socket.MSG_NOSIGNAL)

    def close(self, last: bytes | None = None) -> None:
        """Let go of both descriptors, which the other end sees; ``last`` is sent if that needs no waiting."""
        self._over = True
        if last is not None:
            with contextlib.suppress(OSError):
                self._end.send(_HEAD.pack(len(last)) + last, socket.MSG_NOSIGNAL)
        for end in (self._end, self._woken, self._waker):
            if end is not None:
                end.close()
        if self._peer is not None:
            os.close(self._peer)
            self._peer = None

    def _read(self) -> None:
        try:
            found = self._end.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        if not found:
            self._over = True
        self._received += found
        start, held = 0, self._received
        while len(held) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(held, start)
            stop = start + _HEAD.size + size
            if len(held) < stop:
                break
            self._messages.append(bytes(held[start + _HEAD.size : stop]))
            start = stop
        del held[:start]

    def _wait(self, events: int, timeout_s: float | None) -> int:
        """Wait for ``events`` of the socket, and return those that came; 0 after ``timeout_s``, or when woken."""
        own, poll = self._end.fileno(), self._polls.get(events)
        if poll is None:
            poll = self._polls[events] = select.poll()
            poll.register(own, events)
            if self._peer is not None:
                poll.register(self._peer, select.POLLIN)
            if self._woken is not None and events == select.POLLIN:  # who sends is not to be woken
                poll.register(self._woken, select.POLLIN)
        if timeout_s == 0 and not poll.poll(0):  # asked after each micro-batch
            return 0
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LOOK_EVERY_S if deadline is None else min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
            found = dict(poll.poll(left * 1000))
            if own in found:
                # What the other one had sent before it ended is read first: the end shows when there is no more.
                return found[own] | (select.POLLIN if found[own] & _ERRORS else 0)
            if self._woken is not None and self._woken.fileno() in found:
                self._woken.recv(4096)
                return 0
            if found or not self._is_alive():
                self._over = True
                return select.POLLIN
            if deadline is not None and time.monotonic() >= deadline:
                return 0
