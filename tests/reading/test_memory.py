"""How much memory a process may take: the machine's, and what the control groups of the process allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakeckpt.reading.memory import available_bytes

GIB = 2**30


def system(root: Path, cgroup: str, files: dict[str, str], meminfo: str = "MemAvailable:    8388608 kB") -> int:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       99999999 kB\n{meminfo}\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "groups").mkdir()
    for name, text in files.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return available_bytes(str(root / "proc"), str(root / "groups"))


def group(limit: int | str, usage: int, inactive: int = 0, path: str = "") -> dict[str, str]:
    stat = f"anon 1\ninactive_file {inactive}\nactive_file 5"
    return {f"{path}memory.max": str(limit), f"{path}memory.current": str(usage), f"{path}memory.stat": stat}


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", {}) == 8 * GIB


def test_a_machine_that_does_not_say_has_any(tmp_path: Path) -> None:
    assert system(tmp_path, "", {}, meminfo="") > 2**60


@pytest.mark.parametrize("path", ["/", "/kubepods/of/outside"])
def test_a_container_has_what_its_group_has_left_and_cached_files_count_as_free(tmp_path: Path, path: str) -> None:
    assert system(tmp_path, f"0::{path}\n", group(4 * GIB, 3 * GIB, GIB // 2)) == GIB + GIB // 2


def test_every_group_above_counts_and_those_without_a_limit_do_not(tmp_path: Path) -> None:
    files = {**group("max", GIB, path="a/b/"), **group(2 * GIB, GIB, path="a/"), **group(3 * GIB, GIB)}
    assert system(tmp_path, "0::/a/b\n", files) == GIB


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(3 * GIB),
        "memory/job/memory.usage_in_bytes": str(2 * GIB),
        "memory/job/memory.stat": "total_inactive_file 0",
        "memory/other/memory.limit_in_bytes": "7",  # of a group of other processes
        "memory/other/memory.usage_in_bytes": "1",
    }
    assert system(tmp_path, "5:cpu,memory:/job\n2:pids:/other\n", files) == GIB


def test_a_group_that_tells_nothing_of_cached_files_has_what_it_has_left(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB)}) == GIB


def test_a_group_whose_use_is_not_told_does_not_count(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", {"memory.max": str(GIB)}) == 8 * GIB


def test_a_group_that_has_taken_more_than_it_may_leaves_nothing(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", group(GIB, 2 * GIB)) == 0
