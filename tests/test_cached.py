"""A forked process computes its own values, whatever the threads of its parent were computing."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from lakeckpt.cached import cached_property
from tests.patience import PATIENCE_S


class Slow:
    """Has a value that is ready when ``goes_on`` is set; ``begun`` is set when a thread has begun to compute it."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    @cached_property
    def value(self) -> object:
        self.begun.set()
        self.goes_on.wait()
        return object()


def ask_another() -> None:
    other = Slow()
    other.goes_on.set()
    assert other.value is other.value


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_was_forked_during_a_computation_computes_another() -> None:
    slow = Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.begun.wait(PATIENCE_S)
    forked = multiprocessing.get_context("fork").Process(target=ask_another)
    forked.start()
    forked.join(PATIENCE_S)
    ended = forked.exitcode
    forked.kill()
    slow.goes_on.set()
    thread.join(PATIENCE_S)
    assert ended == 0
    assert slow.value is slow.value
