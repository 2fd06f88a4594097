"""A row that ends a job again and again leaves the deal, on any topology: every other row counts once, on record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.cli import launched
from tests.jobs import poisoned

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 ranks, then 4": (2, 4, {}),
    "4 ranks, then 1, without captures": (4, 1, {"captures": False}),
    "2 ranks, killed by a signal, with workers, then 3": (2, 3, {"workers": 1, "by": "SIGSEGV"}),
    "2 ranks, packed, then 4": (2, 4, {"packed": True}),
    "4 ranks, packed, without captures, then 2": (4, 2, {"packed": True, "captures": False}),
    "3 ranks, without captures, with workers, then 2": (3, 2, {"captures": False, "workers": 1}),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_a_row_that_ends_the_job_three_times_leaves_the_deal_on_any_topology(tmp_path: Path, case: str) -> None:
    first, second, options = CASES[case]
    poisoned.write_tables(tmp_path / "table")
    said = poisoned.run(tmp_path, ranks=first, steps=2, **options)
    assert "3 deaths in a row without progress" in said or "excluded" in said, said
    poisoned.run(tmp_path, ranks=second, **options)
    report = audit(open_storage(tmp_path / "run"))
    is_packed = options.get("packed", False)
    size = 5 if is_packed else 1
    counts, every = poisoned.keys(tmp_path), Counter(range(poisoned.ROWS * (3 if is_packed else 1)))
    missing = every - counts
    assert not counts - every and sum(missing.values()) == report.excluded * size == poisoned.BATCH * size
    assert {poisoned.POISON} & {key // 3 if is_packed else key for key in missing}
    assert report.verdict == "except", report
    sizes = [len(batch) for batches in poisoned.used(tmp_path).values() for batch in batches]
    assert all(sizes), "no batch is empty"


@pytest.mark.soak
@pytest.mark.parametrize("captures", [True, False])
def test_a_row_that_fails_two_times_of_three_is_not_named_and_nothing_is_excluded(
    tmp_path: Path, captures: bool
) -> None:
    poisoned.write_tables(tmp_path / "table")
    said = poisoned.run(tmp_path, ranks=2, times=2, captures=captures)
    assert f"the row {poisoned.POISON} is bad" in said, "the row has not failed"
    check_whole(tmp_path, said)


@pytest.mark.soak
def test_five_starts_by_hand_that_fail_name_no_row_and_roll_back_nothing(tmp_path: Path) -> None:
    poisoned.write_tables(tmp_path / "table")
    launch = ("--max-restarts=0", "--cold")
    said = [poisoned.run(tmp_path, *launch, ranks=1, status=1) for _ in range(5)]
    said.append(poisoned.run(tmp_path, *launch, ranks=1, times=0))
    back_to = [one["back_to"] for one in launched.faults_of_run(tmp_path)["faults"]]
    assert len(back_to) == 5 and len(set(back_to)) == 1 and back_to[0] > 0
    check_whole(tmp_path, "".join(said))


def check_whole(folder: Path, said: str) -> None:
    """Every row counts once, nothing was excluded, and no micro-batch was named."""
    assert "times in a row" not in said and "3 deaths in a row" not in said, said
    report = audit(open_storage(folder / "run"))
    assert (report.verdict, report.excluded) == ("proved", 0), report
    assert poisoned.keys(folder) == Counter(range(poisoned.ROWS))


@pytest.mark.soak
@pytest.mark.parametrize(("status", "options"), [(93, {"by": "SIGKILL,SIGSEGV,SIGBUS"}), (0, {"by": "SIGBUS"})])
def test_on_one_node_no_launcher_leaves_whatever_ends_its_ranks(
    tmp_path: Path, status: int, options: dict[str, Any]
) -> None:
    poisoned.write_tables(tmp_path / "table")
    said = poisoned.run(tmp_path, ranks=2, status=status, **options)
    assert "NodeLeaves" not in said and "most deaths lie on this node" not in said
