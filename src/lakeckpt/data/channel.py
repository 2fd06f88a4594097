"""How do the main process and a worker talk?  Messages over a pair of sockets, until one of the two is gone.

A message is bytes, and small: micro-batches themselves lie in a slot memory. Nobody waits to send: what the socket does
not take (the other one is busy for long) goes later, with the next message or while one is waited for. That the other
process is gone shows by a descriptor of it (pidfd) even where strangers have inherited the socket by a fork; where the
system has no such descriptors, every few seconds. A process that is forked has none of the channels: messages are for
one reader.

It starts no thread, and never interprets a message.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable

__all__ = ["Channel", "PeerGone"]

_HEAD = struct.Struct("<Q")
_LOOK_EVERY_S = 5.0
_ERRORS = select.POLLHUP | select.POLLERR | select.POLLNVAL

_CHANNELS: weakref.WeakSet[Channel] = weakref.WeakSet()


class PeerGone(Exception):
    """The other process is gone, or has closed its end."""


class Channel:
    """One end. For one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        """``end`` is the channel's from now on."""
        end.setblocking(False)
        self._end = end
        self._is_alive: Callable[[], bool] = lambda: True
        self._received = bytearray()
        self._unsent = bytearray()
        self._messages: deque[bytes] = deque()
        self._over = False
        self._peer: int | None = None
        self._polls: dict[int, select.poll] = {}
        """By the events that are waited for."""
        self._woken: socket.socket | None = None
        self._waker: socket.socket | None = None
        _CHANNELS.add(self)

    def attend(self, peer: int, is_alive: Callable[[], bool]) -> None:
        """Notice when ``peer``, the process at the other end, is gone; where need be, by asking ``is_alive``."""
        self._is_alive = is_alive
        with contextlib.suppress(AttributeError, OSError):  # a system without, or it is gone already
            self._peer = os.pidfd_open(peer)
        self._polls.clear()

    def send(self, message: bytes) -> None:
        """Send ``message``, now or later, without waiting; PeerGone where it shows that nobody will read it."""
        self._unsent += _HEAD.pack(len(message)) + message
        try:
            self._send_more()
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
            found = self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), left)
            if not found:
                return None
            if found & select.POLLOUT:
                with contextlib.suppress(OSError):  # what it had sent comes first; then the end shows
                    self._send_more()
            if found & select.POLLIN:
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
        if last is not None and not self._unsent:  # else it would be taken for a part of another message
            with contextlib.suppress(OSError):
                self._end.send(_HEAD.pack(len(last)) + last, socket.MSG_NOSIGNAL)
        for end in (self._end, self._woken, self._waker):
            if end is not None:
                end.close()
        if self._peer is not None:
            os.close(self._peer)
            self._peer = None

    def _send_more(self) -> None:
        while self._unsent:
            try:
                sent = self._end.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            del self._unsent[:sent]

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
            if self._woken is not None:
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


def _close_all() -> None:
    for channel in tuple(_CHANNELS):
        channel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
