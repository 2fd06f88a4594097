"""Reading ahead without workers: begun early, taken once, dropped with the iterator, and nobody else's in a fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, errors
from lakeckpt.core.order import Window
from lakeckpt.data.base.source import BatchSource
from lakeckpt.lake.parquet.prefetch import OpenedFile
from lakeckpt.reading.shared import Shared
from lakeckpt.reading.windows.cache import WindowCache
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.positions import PositionReader
from lakeckpt.reading.windows.threads import _Pools
from lakeckpt.reading.windows.window import DecodedWindow, WindowDecoder
from tests.data.reading import as_json, flat, ids, loader_of, some, until_error
from tests.lakes import LakeSpec
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 rows in 24 row groups."""
    return LakeSpec(files=((10,) * 6,) * 4).write(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The windows whose decoding was begun."""
    found: list[tuple[int, int]] = []
    inner = WindowCache._begin

    def begin(self: WindowCache, needed: Any) -> None:
        found.append((needed.layout.epoch, needed.window.start))
        inner(self, needed)

    monkeypatch.setattr(WindowCache, "_begin", begin)
    return found


def test_a_loader_that_is_started_has_begun_and_decodes_nothing_twice(
    folder: Path, decoded: list[tuple[int, int]]
) -> None:
    expected = ids(loader_of(folder))
    decoded.clear()
    loader = loader_of(folder)
    loader._reader.start()
    assert len(decoded) == 3  # the first one, and two ahead
    loader._reader.start()
    assert ids(loader) == expected
    assert len(decoded) == len(set(decoded)) == 6
    loader._reader.start()
    assert decoded[6][0] == 1
    assert sorted(flat(loader)) == list(range(240)) and len(decoded) == 12


@pytest.mark.parametrize("what", ["load", "rewind", "set_epoch", "delivered"])
def test_a_place_that_changes_after_the_start_is_read_as_it_is_then(folder: Path, what: str) -> None:
    whole = [ids(loader_of(folder)), []]
    loader = loader_of(folder)
    some(loader, 3)
    saved = as_json(loader.state_dict())
    some(loader, 4)
    loader._reader.start()
    if what == "load":
        loader.load_state_dict(saved)
        assert ids(loader) == whole[0][3:]
    elif what == "rewind":
        loader.rewind()
        assert ids(loader) == whole[0]
    elif what == "set_epoch":
        loader.set_epoch(5)
        other = loader_of(folder)
        other.set_epoch(5)
        assert ids(loader) == ids(other)
    else:
        assert ids(some(loader, 2)) == whole[0][7:9]
        assert ids(loader) == whole[0][9:]


def test_restoring_begins_to_read_before_models_are_loaded(
    folder: Path, tmp_path: Path, decoded: list[tuple[int, int]]
) -> None:
    begun: list[bool] = []

    class Model(torch.nn.Module):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            begun.append(bool(decoded))
            return super().load_state_dict(*args, **options)

    first = loader_of(folder)
    with CheckpointManager(str(tmp_path / "run"), {"model": Model(), "reader": first}) as manager:
        manager.restore()
        seen = []
        for batch in first:
            seen.append(batch["id"].tolist())
            manager.step(batch)
            if len(seen) == 20:
                break
    again = loader_of(folder)
    decoded.clear()
    with CheckpointManager(str(tmp_path / "run"), {"model": Model(), "reader": again}) as manager:
        assert manager.restore() == 20
        assert begun == [True]
        assert seen + ids(again) == ids(loader_of(folder))
        manager.step(again.last_receipt)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(("lakeckpt-window", "lakeckpt-part"))]


def ended(ones: list[threading.Thread]) -> bool:
    for one in ones:
        one.join(timeout=PATIENCE_S)
    return not any(one.is_alive() for one in ones)


@pytest.mark.parametrize("how", ["break", "dropped before the first batch", "over", "error"])
def test_threads_end_with_the_iteration(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeckpt.reading.windows.threads._shared", Shared(_Pools))  # no other reader's

    def fails(batch: Any) -> Any:
        raise ArithmeticError

    before = threads()
    loader = loader_of(folder, transform=fails if how == "error" else None)
    iterator = iter(loader)
    begun = [one for one in threads() if one not in before]  # of which earlier ones may be ending
    assert begun
    if how == "break":
        next(iterator)
    elif how == "over":
        list(iterator)
    elif how == "error":
        with pytest.raises(ArithmeticError):
            next(iterator)
    del iterator
    assert ended(begun)


def test_an_iteration_that_another_thread_drops_takes_nothing_from_the_one_that_begins(folder: Path) -> None:
    """As the garbage collector may, in any thread, at any moment."""
    expected = ids(loader_of(folder))
    loader = loader_of(folder)
    olds = [iter(loader)]
    found = [next(olds[0])]
    iterator = iter(loader)
    found.append(next(iterator))
    dropping = threading.Thread(target=olds.clear)
    dropping.start()
    found.append(next(iterator))
    dropping.join(PATIENCE_S)
    assert ids([*found, *iterator]) == expected


def test_an_iterator_that_is_kept_holds_no_windows_once_another_one_has_begun(folder: Path) -> None:
    loader = loader_of(folder)
    old = iter(loader)
    next(old)
    begun = threads()
    new = iter(loader)
    assert ended(begun)
    with pytest.raises(errors.StateUnavailable, match="out of date"):
        next(old)
    assert len(flat(new)) == 236


def test_a_forked_process_waits_for_no_thread_of_its_parent(folder: Path) -> None:
    loader = loader_of(folder, num_lanes=4)
    iterator = iter(loader)
    next(iterator)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    forked = context.Process(target=_forked, args=(loader, iterator, answers), daemon=True)
    forked.start()
    rest, again = answers.get()
    forked.join(timeout=PATIENCE_S)
    assert forked.exitcode == 0
    assert rest == again == [one["id"].tolist() for one in iterator]


def test_a_forked_process_waits_for_no_file_that_its_parent_was_opening(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A future of the parent's is not done in the fork, and the thread that was to do it is not there."""
    here, may_open, opening = os.getpid(), threading.Event(), threading.Event()
    rows = flat(some(loader_of(folder, num_lanes=4, shuffle_window=1), 1))
    inner, first = RowGroupDecoder._opened, {row // 60 for row in rows}  # the files of the first batch

    def wait(self: RowGroupDecoder, ordinal: int) -> OpenedFile:
        if os.getpid() == here and ordinal not in first:
            opening.set()
            may_open.wait(PATIENCE_S)
        return inner(self, ordinal)

    monkeypatch.setattr(RowGroupDecoder, "_opened", wait)
    loader = loader_of(folder, num_lanes=4, shuffle_window=1)
    iterator = iter(loader)
    next(iterator)
    assert opening.wait(PATIENCE_S)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    forked = context.Process(target=_forked, args=(loader, iterator, answers), daemon=True)
    forked.start()
    rest, again = answers.get()
    forked.join(timeout=PATIENCE_S)
    may_open.set()
    assert rest == again == [one["id"].tolist() for one in iterator]


def _forked(loader: LakeLoader, iterator: Any, answers: Any) -> None:
    state = loader.state_dict()
    rest = [one["id"].tolist() for one in iterator]
    other = LakeLoader(loader.dataset)
    other.load_state_dict(state)
    answers.put((rest, ids(other)))


@pytest.fixture
def waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakeLoader]:
    """A loader that has begun to read, of which windows wait for threads in this process, and in no fork of it."""
    here, may_decode, waits = os.getpid(), threading.Event(), threading.Event()
    inner = WindowDecoder.decode

    def decode(self: WindowDecoder, window: Window) -> DecodedWindow:
        if os.getpid() == here:
            waits.set()
            may_decode.wait(PATIENCE_S)
        return inner(self, window)

    monkeypatch.setattr(WindowDecoder, "decode", decode)
    loader = loader_of(folder, num_lanes=12, shuffle_window=1)
    loader._reader.start()
    assert waits.wait(PATIENCE_S)
    yield loader
    may_decode.set()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_forked_while_windows_wait_for_threads_read_all_rows(waiting: LakeLoader, kind: Any) -> None:
    """A thread that waits in the parent is not in the fork, and what it was to do will never be done there."""
    reader = kind(waiting.dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    for epoch in range(2):
        waiting.dataset.set_epoch(epoch)
        assert sorted(flat(reader)) == list(range(240))


def test_a_fork_made_while_windows_wait_for_threads_reads_all_rows_itself(waiting: LakeLoader) -> None:
    def read() -> None:
        found, error = until_error(waiting)
        answers.put((repr(error), flat(found)))

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    forked = context.Process(target=read, daemon=True)
    forked.start()
    error, found = answers.get()
    assert (error, sorted(found)) == ("None", list(range(240)))
    forked.join(timeout=PATIENCE_S)
    assert forked.exitcode == 0


def test_what_fails_before_it_is_asked_for_is_tried_again_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(loader_of(folder))
    inner, failures = BatchSource.new_reader, [errors.StorageError("not now")]

    def new_reader(self: BatchSource, lanes: int) -> PositionReader:
        if failures:
            raise failures.pop()
        return inner(self, lanes)

    monkeypatch.setattr(BatchSource, "new_reader", new_reader)
    assert ids(loader_of(folder)) == expected and not failures
    failures += [errors.StorageError("never")] * 9
    found, error = until_error(loader_of(folder))
    assert found == [] and isinstance(error, errors.StorageError)


def test_a_program_that_ends_in_the_midst_of_an_iteration_ends(folder: Path) -> None:
    script = f"""
from lakeckpt import LakeDataset, LakeLoader
iterator = iter(LakeLoader(LakeDataset({str(folder)!r}, batch_size=4, shuffle=True)))
print(len(next(iterator)["id"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_a_null_is_raised_with_its_row_group_and_the_windows_before_are_delivered(tmp_path: Path) -> None:
    values = [None if row == 27 else row for row in range(40)]
    pq.write_table(pa.table({"id": range(40), "x": values}), tmp_path / "a.parquet", row_group_size=20)
    batches, error = until_error(LakeLoader(LakeDataset(tmp_path, batch_size=4)))
    assert isinstance(error, errors.NullValueError) and "row group 1 of the data file 'a.parquet'" in str(error)
    assert (error.file, error.row_group, error.column) == ("a.parquet", 1, "x")
    assert flat(batches) == list(range(20))
    for seed in range(4):  # the window has both row groups, in either order
        shuffled = LakeDataset(tmp_path, batch_size=4, shuffle=True, shuffle_window=2, seed=seed)
        batches, error = until_error(LakeLoader(shuffled))
        assert isinstance(error, errors.NullValueError)
        assert (batches, error.file, error.row_group) == ([], "a.parquet", 1)
