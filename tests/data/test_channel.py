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
    channel = Channel(mine)
    channel.attend(peer.pid, lambda: peer.poll() is None)
    peer.kill()
    peer.communicate()
    channel.send(bytes(1 << 24))  # more than a socket holds
    with pytest.raises(PeerGone):
        channel.receive(60)
    channel.close()
    theirs.close()
    with pytest.raises(PeerGone):
        channel.send(b"x")


def test_who_sends_never_waits_and_what_the_other_one_did_not_take_goes_later() -> None:
    mine, theirs = socket.socketpair()
    channel, other = Channel(mine), Channel(theirs)
    messages = [bytes([number]) * (number << 14) for number in range(40)]
    for message in messages:
        channel.send(message)
        other.send(message)
    found: list[bytes] = []
    answers: list[bytes] = []
    for _ in range(10_000):
        for one, kept in ((other, found), (channel, answers)):
            if (message := one.receive(0)) is not None:
                kept.append(message)
    assert found == answers == messages
    channel.close(b"last")
    assert other.receive(60) == b"last"
    other.close()


def test_a_forked_process_has_no_end_that_would_keep_a_channel_open() -> None:
    mine, theirs = socket.socketpair()
    channel, other = Channel(mine), Channel(theirs)
    asks, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            channel.send(b"stolen")
        except PeerGone:
            os.read(asks, 1)
            os._exit(7)
        os._exit(1)
    channel.close()
    with pytest.raises(PeerGone):
        other.receive(60)
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for one in (asks, told):
        os.close(one)
    other.close()


def test_who_waits_for_a_message_is_woken_by_any_thread_and_no_message_is_lost() -> None:
    mine, theirs = socket.socketpair()
    channel, other = Channel(mine), Channel(theirs)
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
