"""This module reads signals of this process from a pipe, so that a thread can wait for them.

A Python handler of a signal runs on the main thread, and only between two of its bytecodes: never while the main thread
waits in a collective or computes in C. The interpreter's part of a handler runs at once, on any thread, and writes the
number of the signal to the *wakeup descriptor* of the process. `Signals` makes that descriptor a pipe of its own.

The handlers do nothing else. A forked child gets the handlers of before, so that its signals do not reach the pipe of
its parent. Worker processes of a `LakeLoader` ignore the signals (`lakeckpt.data.workers.signals`). The module starts
no threads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection
from types import FrameType

from lakeckpt.data.workers.signals import KNOWN, ignore_in_workers
from lakeckpt.errors import ConfigError

__all__ = ["Signals", "check_handlers", "checked_signals"]

_END = 0
"""The byte that is written to the pipe to end the wait. No signal has this number."""
_installed: Signals | None = None
_has_hook = False


def _handle(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number to the wakeup descriptor."""


class Signals:
    """Takes over the signals ``numbers`` of this process until `close`. Made and closed on the main thread.

    Raises `ConfigError` as `check_handlers` does, and if a library has set the wakeup descriptor of the process.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        global _installed
        check_handlers(numbers)
        self._numbers, self._process = frozenset(numbers), os.getpid()
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        taken = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if taken >= 0:
            signal.set_wakeup_fd(taken)
            self._close_pipe()
            raise ConfigError(
                "save_on needs the wakeup descriptor of this process (signal.set_wakeup_fd), and a library has set it, "
                "as an event loop of asyncio with add_signal_handler does: train outside of the loop, or make the "
                "manager without save_on and let the loop call manager.save()"
            )
        for number in self._numbers:
            signal.signal(number, _handle)
            signal.siginterrupt(number, False)
        _installed = self
        _restore_in_children()
        ignore_in_workers(self._numbers)

    @property
    def is_own(self) -> bool:
        """True if this is the process that has taken the signals over, and no fork of it."""
        return os.getpid() == self._process

    def wait(self) -> int | None:
        """Wait for one of the signals and return its number; None after `end`. One thread calls it.

        A signal whose handler was replaced meanwhile belongs to whoever replaced the handler, and is ignored.
        """
        while True:
            for number in os.read(self._reads, 1):
                if number == _END:
                    return None
                if number in self._numbers and signal.getsignal(number) is _handle:
                    return number

    def pretend(self, number: int) -> None:
        """Have `wait` return ``number``, as if this process had got the signal. Any thread may call it."""
        os.write(self._writes, bytes([number]))

    def end(self) -> None:
        """End the wait of the other thread."""
        os.write(self._writes, bytes([_END]))

    def close(self) -> None:
        """Bring back the handlers of before, if nobody has replaced ours. No thread may `wait` any more."""
        global _installed
        _check_thread()
        self.restore()
        ignore_in_workers(())
        _installed = None
        self._close_pipe()

    def restore(self) -> None:
        """Bring back the handlers of before, and no wakeup descriptor."""
        for number, before in self._before.items():
            if signal.getsignal(number) is _handle:
                signal.signal(number, before)
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, self._writes):
            signal.set_wakeup_fd(now)

    def _close_pipe(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


def checked_signals(save_on: Collection[str] | str) -> tuple[signal.Signals, ...]:
    """Return the signals that ``save_on`` names. `ConfigError` for a name of no signal that can be taken over."""
    names = (save_on,) if isinstance(save_on, str) else tuple(save_on)
    known = {one.name: one for one in KNOWN}
    for name in names:
        if name not in known:
            raise ConfigError(f"save_on names signals, some of {', '.join(known)}, got {name!r}")
    return tuple(one for name, one in known.items() if name in names)


def check_handlers(numbers: Collection[int]) -> None:
    """Raise `ConfigError` unless this is the main thread, and nobody else handles the signals ``numbers``."""
    if numbers:
        _check_thread()
    for number in numbers:
        found = signal.getsignal(number)
        if found not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            owner = "another CheckpointManager" if found is _handle else repr(found)
            raise ConfigError(
                f"save_on names {signal.Signals(number).name}, and this process has a handler for it already: {owner}. "
                f"Remove the handler (signal.signal(signal.{signal.Signals(number).name}, signal.SIG_DFL)), or name "
                "other signals and call manager.save() from your own code"
            )


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "with save_on, the manager is made, restored and closed on the main thread: only there can Python handle "
            f"signals. This is thread {threading.current_thread().name!r}. Make it without save_on here"
        )


def _restore_in_children() -> None:
    global _has_hook
    if not _has_hook:
        _has_hook = True
        os.register_at_fork(after_in_child=_restore_in_child)


def _restore_in_child() -> None:
    global _installed
    if _installed is not None:
        _installed.restore()
        _installed = None
