"""Two processes talk until one of them is gone; then the other one hears of it, whatever it is at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from lakeckpt.data.channel import Channel, PeerGone


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_who_sends_to_a_process_that_is_gone_is_told_though_the_socket_stays_open(
    monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    mine, theirs = socket.socketpair()
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.setattr("lakeckpt.data.channel._LOOK_EVERY_S", 0.01)
    channel = Channel(mine, peer.pid, lambda: peer.poll() is None)
    peer.kill()
    peer.communicate()
    with pytest.raises(PeerGone):
        channel.send(bytes(1 << 24))  # more than a socket holds
    channel.close()
    theirs.close()


def test_who_waits_for_a_message_is_woken_by_any_thread_and_no_message_is_lost() -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine, os.getpid(), lambda: True)
    other = Channel(theirs, os.getpid(), lambda: True)
    wake = channel.waker()
    thread = threading.Thread(target=wake)
    thread.start()
    assert channel.receive(60) is None
    thread.join()
    for _ in range(100_000):  # more than it takes to be awake
        wake()
    other.send(b"message")
    while (message := channel.receive(60)) is None:
        pass
    assert message == b"message"
    channel.close()
    wake()
    other.close()
