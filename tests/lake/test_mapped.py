"""Ranges of local files are mapped only while nobody can cut the file, and copied everywhere else."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from lakeckpt.lake import mapped
from lakeckpt.lake.mapped import LeasedFile
from lakeckpt.lake.ranges import MAPPED_BYTES, LocalBytes
from tests.patience import PATIENCE_S

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "file"
    place.write_bytes(CONTENT)
    return place


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def leased(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def test_a_mapping_has_the_bytes_and_its_file_a_lease_until_all_are_released(descriptor: int) -> None:
    file = LeasedFile(descriptor)
    first, second = file.map_ranges([(5, 100_000), (200_000, 300_000)]), file.map_ranges([(70_001, 70_002)])
    assert first is not None
    assert second is not None
    assert first.whole[5:100_000].to_pybytes() == CONTENT[5:100_000]
    assert first.whole[200_000:300_000].to_pybytes() == CONTENT[200_000:300_000]
    assert second.whole[70_001:70_002].to_pybytes() == CONTENT[70_001:70_002]
    assert leased(descriptor)
    first.release()
    first.release()
    assert leased(descriptor)
    del second
    assert not leased(descriptor)


def test_a_lease_is_kept_while_its_file_is_mapped_and_no_other_files_is_given_up(path: Path, tmp_path: Path) -> None:
    """The number of a descriptor is another file's as soon as it was closed."""
    opened = os.open(path, os.O_RDONLY)
    file = LeasedFile(opened)
    mapping = file.map_ranges([(0, 100_000)])
    assert mapping is not None
    file.close()
    os.close(opened)
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    assert file.map_ranges([(0, 10)]) is None
    others = [tmp_path / f"other {number}" for number in range(4)]
    held = []
    for other in others:
        other.write_bytes(CONTENT)
        held.append(os.open(other, os.O_RDONLY))
        fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_RDLCK)
    mapping.release()
    assert all(map(leased, held))
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    for one in held:
        os.close(one)


def test_files_that_are_let_go_of_leave_no_descriptor(path: Path, descriptor: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for closes in (True, False):
        file = LeasedFile(descriptor)
        mapping = file.map_ranges([(0, 100_000)])
        if closes:
            file.close()
        del file, mapping
        assert set(os.listdir("/proc/self/fd")) == before


def test_bytes_that_are_closed_leave_no_descriptor_though_somebody_has_them_still(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    source = LocalBytes(pa.OSFile(str(path)))
    arriving = source.begin([(0, MAPPED_BYTES)])
    assert arriving.wait()[0].to_pybytes() == CONTENT[:MAPPED_BYTES]
    arriving.abandon()
    del arriving
    source.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_who_cuts_a_mapped_file_waits_until_it_is_released_and_finds_no_other_mapping_begun(
    path: Path, descriptor: int
) -> None:
    file = LeasedFile(descriptor)
    mapping = file.map_ranges([(0, len(CONTENT))])
    assert mapping is not None
    thread = threading.Thread(target=os.truncate, args=(path, 10))
    thread.start()
    while leased(descriptor):  # until the lease is being broken
        pass
    assert file.map_ranges([(0, 10)]) is None
    assert os.path.getsize(path) == len(CONTENT)
    assert mapping.whole.to_pybytes() == CONTENT
    mapping.release()
    thread.join()
    assert os.path.getsize(path) == 10


def test_what_lies_beyond_the_end_of_a_file_is_not_mapped(path: Path, descriptor: int) -> None:
    os.truncate(path, 10)
    assert LeasedFile(descriptor).map_ranges([(0, 10)]) is not None
    assert LeasedFile(descriptor).map_ranges([(0, 11)]) is None


def test_a_file_that_is_open_for_writing_is_not_mapped(path: Path, descriptor: int) -> None:
    with path.open("r+b"):
        assert LeasedFile(descriptor).map_ranges([(0, 10)]) is None
    assert LeasedFile(descriptor).map_ranges([(0, 10)]) is not None


def test_pages_that_cannot_be_had_and_other_machines_files_are_not_mapped(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_POPULATE_READ", 9999)  # as a system that does not know it
    assert LeasedFile(descriptor).map_ranges([(0, 10)]) is None
    assert not leased(descriptor)
    monkeypatch.undo()
    monkeypatch.setattr(mapped, "_file_system", lambda _: "nfs4")
    assert LeasedFile(descriptor).map_ranges([(0, 10)]) is None


def test_a_forked_process_copies_and_leaves_the_lease_to_its_parent(descriptor: int) -> None:
    file = LeasedFile(descriptor)
    mapping = file.map_ranges([(0, 10)])
    assert mapping is not None
    child = os.fork()
    if not child:
        refused = file.map_ranges([(0, 10)]) is None
        mapping.release()
        os._exit(not refused)
    assert os.waitpid(child, 0)[1] == 0
    assert leased(descriptor)
    mapping.release()


def test_ranges_read_from_a_file_hold_its_lease_until_they_are_abandoned(path: Path) -> None:
    opened = pa.OSFile(str(path))
    small, large = (3, 50), (100, 100 + MAPPED_BYTES)
    arriving = LocalBytes(opened).begin([small, large])
    assert not leased(opened.fileno())
    assert [one.to_pybytes() for one in arriving.wait()] == [CONTENT[slice(*small)], CONTENT[slice(*large)]]
    assert leased(opened.fileno())
    arriving.abandon()
    assert not leased(opened.fileno())


HELD_TO_THE_END = """
import os, sys
import torch
from lakeckpt.lake import blocks, deferring, mapped
torch.kept = [blocks, deferring, mapped]  # emptied before torch is, which was loaded sooner
descriptor = os.open(sys.argv[1], os.O_RDONLY)
file = mapped.LeasedFile(descriptor)
torch.kept += [blocks.read_block(descriptor, 0, 10), file, mapped.LeasedFile(descriptor)]
torch.kept += [file.map_ranges([(0, 10)])]
assert torch.kept[-1] is not None
"""


def test_bytes_that_are_held_when_the_interpreter_ends_are_let_go_of_without_a_word(path: Path) -> None:
    script = [sys.executable, "-c", HELD_TO_THE_END, str(path)]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")
