"""The benchmark of restoring runs, restores what it says, and counts rightly."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import restore
from benchmarks.restore import Case, Job, Peak, told


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_every_way_restores_every_byte(tmp_path: Path) -> None:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = tmp_path / "told.json"
        assert restore.main(["--quick", "--place", str(tmp_path), "--arenas", str(arenas), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [len(one["warm_s"]) for one in found["cases"]] == [1] * 14
    assert {"lakeckpt, from the arena", "the same, uncommitted", "lakeckpt", "bare read, 2 threads", "dcp.load"} <= {
        one["name"] for one in found["cases"]
    }
    assert set(tmp_path.iterdir()) == {arenas, path} and not any(arenas.iterdir())


def test_a_way_that_does_not_restore_is_told() -> None:
    job = Job(2**16)
    idle = Case(name="idle", run=lambda: None)
    with pytest.raises(AssertionError, match=r"idle: 0\.weight is not what was saved"):
        restore.check(job, [idle])


def test_ratios_are_to_the_fastest_bare_way(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        Case(name="ours", run=lambda: None, warm_s=[2.0, 4.0, 9.0]),
        Case(name="slow", run=lambda: None, warm_s=[8.0, 8.0, 8.0], bare=True),
        Case(name="fast", run=lambda: None, warm_s=[3.0, 1.0, 30.0], bare=True),
    ]
    assert told("a title", cases, 12 * 10**9, lambda case: case.warm_s) == 0.75
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "ours" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["ours", "4.000", "3.00", "1.33-6.00", "0.75", "0"]


def test_a_second_copy_is_seen() -> None:
    size, kept = 40 * 2**20, list[torch.Tensor]()
    with Peak() as peak:
        while peak.bytes < size and len(kept) < 10:  # the kernel may take pages away, and a look may have begun before
            kept.append(torch.ones(size, dtype=torch.uint8))
            peak.looked.clear()
            peak.looked.wait()
    assert size <= peak.bytes < size * (len(kept) + 1)
