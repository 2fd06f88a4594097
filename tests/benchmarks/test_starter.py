"""What a measured process inherits from the one that only imports."""

from __future__ import annotations

import gc
import io

import pytest

from benchmarks.readers import starter


def test_what_imports_left_is_no_reader_s_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["starter", "row-group"])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("sys.stdout", io.StringIO())
    gc.unfreeze()  # what the tests have set aside
    try:
        starter.main()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.freeze()
