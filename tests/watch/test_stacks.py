"""Stacks are read from what faulthandler and py-spy write, and a process writes its own on a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lakeckpt.watch.facts import children_of, look_at_process
from lakeckpt.watch.stacks import parse_pyspy, stacks_of, stacks_path, write_on_signal


def test_a_process_writes_its_stacks_on_a_signal_and_names_the_line_of_its_main_thread(tmp_path: Path) -> None:
    page = str(tmp_path / "run.0.1.beat")
    number = write_on_signal(stacks_path(page))
    assert signal.SIGRTMIN < number < signal.SIGRTMAX
    waits = threading.Event()
    other = threading.Thread(target=waits.wait, name="other")
    other.start()
    while other.ident is None or sys._current_frames()[other.ident].f_code.co_name != "wait":
        time.sleep(0.01)
    try:
        threads = stacks_of(os.getpid(), page, number)
    finally:
        faulthandler.unregister(number)
        waits.set()
        other.join()
    [main] = [one for one in threads if one.is_main]
    assert any(frame.function.startswith("test_a_process_writes") for frame in main.frames)
    assert any(frame.function == "wait" for one in threads if not one.is_main for frame in one.frames)


def test_what_py_spy_prints_is_read_with_the_thread_that_holds_the_interpreter() -> None:
    frame = {"name": "wait", "filename": "/a.py", "line": 3}
    threads = [
        {"thread_name": "MainThread", "os_thread_id": 7, "owns_gil": False, "frames": [frame]},
        {"thread_name": "reader", "os_thread_id": 8, "owns_gil": True, "frames": [frame]},
    ]
    main, reader = parse_pyspy(threads, 7)
    assert (main.is_main, main.owns_gil, str(main.frames[0])) == (True, False, "wait (/a.py:3)")
    assert (reader.is_main, reader.owns_gil, reader.name) == (False, True, "reader")


def test_a_process_that_is_gone_is_not_seen() -> None:
    assert look_at_process(2**22 + 1) is None and children_of(2**22 + 1) == ()
