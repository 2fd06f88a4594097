"""A process that measures something and dies says how."""

from __future__ import annotations

import pytest

from benchmarks.children import ChildFailed, told_by


def test_what_a_child_prints_is_returned() -> None:
    assert told_by(["-c", "print('all of it')"]) == "all of it\n"


def test_a_child_that_fails_shows_what_it_said_and_its_code() -> None:
    with pytest.raises(ChildFailed, match=r"with 3:\nhalf a table$"):
        told_by(["-c", "import sys; print('half a table', file=sys.stderr); sys.exit(3)"])


def test_a_child_that_is_aborted_shows_where() -> None:
    with pytest.raises(ChildFailed, match=r"(?s)by SIGABRT:\n.*in broken_invariant") as failed:
        told_by(["-c", "import os\ndef broken_invariant(): os.abort()\nbroken_invariant()"])
    assert "Fatal Python error: Aborted" in str(failed.value)
