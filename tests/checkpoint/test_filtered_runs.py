"""A filter's rows are counted once for a run, kept beside its index, and audited and explained like any others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import LakeDataset, LakeLoader, pack
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.data.base import selecting
from lakeckpt.errors import CheckpointDamaged, SchemaError, StateMismatch
from lakeckpt.reading.filters.count import count_rows
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.token_counts import count_tokens
from tests.checkpoint.rig import Counter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.checkpoint.scripts import Script, write_table

f = pc.field
KEPT = [i for i in range(200) if 20 <= i < 45 or i >= 90]
FILTER = ((f("id") >= 20) & (f("id") < 45)) | (f("id") >= 90)
"""Of the row groups of 30, 30, 40, 25, 0, 1 and 74 rows: 10, 15, 10, and the last ones whole."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lake"))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The filters that were counted."""
    found: list[str] = []

    def noted(table: Any, keep: Any, **options: Any) -> Any:
        found.append(str(keep))
        return count_rows(table, keep, **options)

    monkeypatch.setattr(selecting, "count_rows", noted)
    return found


def run_of(table: Path, **options: Any) -> Script:
    return Script(table, **{"filters": FILTER, **options})


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": False, "num_lanes": 12}, {"drop_last": True, "num_lanes": 4}, {"endless": True}],
    ids=str,
)
def test_every_kept_row_counts_once_whatever_crashed_and_every_step_is_explained(
    table: Path, options: dict[str, Any]
) -> None:
    script = run_of(table, **options)
    for world_size, steps in ((1, 9), (2, 11), (3, 7), (4, 5), (1, 6)):
        script.attempt(steps, world_size=world_size, every=4)
        report = audit(script.storage)
        assert report.verdict == "proved", report.words()
    (reader,) = report.readers
    first = reader.epochs[0]
    dropped = len(KEPT) - len({row for (epoch, row) in script.truth(report.step) if epoch == 0})
    assert (first.status, first.once, first.dropped) == ("complete", len(KEPT) - dropped, dropped)
    assert bool(dropped) == ("drop_last" in options)
    tip = read_history(script.storage).tip
    assert tip is not None
    for step in range(1, tip.step + 1):
        (found,) = explain(script.storage, step).readers
        assert [[KEPT[row] for row in rank.table_rows.tolist()] for rank in found.ranks] == [
            [row for _, row in rank] for rank in script.book[step]
        ]


def test_rows_are_counted_once_for_a_run(table: Path, counts: list[str]) -> None:
    script = run_of(table)
    script.attempt(5, world_size=1)
    script.attempt(5, world_size=1)
    assert len(counts) == 1, "later attempts take what the run has saved"
    assert len([path for path in script.storage.objects if path.startswith("index/")]) == 2


def test_another_spelling_is_counted_once_and_goes_on_where_it_keeps_the_same_rows(
    table: Path, counts: list[str]
) -> None:
    script = run_of(table)
    script.attempt(5, world_size=1)
    spelled = (f("id") >= 90) | ((f("id") < 45) & (f("id") >= 20))
    for _ in range(2):
        script.attempt(5, world_size=1, filters=spelled)
    assert len(counts) == 2, "the second attempt has the counts of the first one"
    assert len([path for path in script.storage.objects if path.startswith("index/")]) == 2
    assert audit(script.storage).verdict == "proved"


def test_what_another_pyarrow_counted_is_counted_again(
    table: Path, counts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run_of(table)
    script.attempt(5, world_size=1)
    monkeypatch.setattr(pa, "__version__", "99.0.0")
    for _ in range(2):
        script.attempt(5, world_size=1)
    assert len(counts) == 2
    assert RowSelection.loads(script.storage.objects[the_selection(script)]).pyarrow == "99.0.0"


def test_rows_that_another_pyarrow_keeps_are_refused_before_anything_is_delivered(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run_of(table)
    script.attempt(8)
    monkeypatch.setattr(pa, "__version__", "99.0.0")
    mask = RowFilter.mask

    def otherwise(keep: RowFilter, rows: pa.Table) -> pa.ChunkedArray:
        return pc.and_(mask(keep, rows), pc.not_equal(rows["id"], 30))

    monkeypatch.setattr(RowFilter, "mask", otherwise)
    (loader,) = script.loaders(1)
    count = Counter("mine")
    with pytest.raises(StateMismatch, match=r"keeps other rows than were counted.*99\.0\.0"):
        CheckpointManager(script.storage, {"count": count, "model": torch.nn.Linear(3, 2), "reader": loader}).restore()
    assert count.value == "mine"


def test_a_run_that_was_killed_before_its_first_save_has_the_counts(table: Path, counts: list[str]) -> None:
    script = run_of(table)
    script.attempt(1)
    assert read_history(script.storage).tip is None
    script.attempt(1)
    assert len(counts) == 1


def test_damaged_counts_are_counted_again_and_written_anew_where_the_file_is_removed(
    table: Path, counts: list[str]
) -> None:
    script = run_of(table)
    script.attempt(8)
    path = the_selection(script)
    whole = script.storage.objects[path]
    script.storage.objects[path] = whole[:-1]
    assert audit(script.storage).verdict == "not proved"
    assert [one.path for one in verify(script.storage).damage] == [path]
    with pytest.raises(CheckpointDamaged, match=path):
        explain(script.storage, 3)
    script.attempt(4)
    assert script.storage.objects[path] == whole[:-1] and len(counts) == 2
    script.storage.delete(path)
    script.attempt(4)
    assert script.storage.objects[path] == whole and len(counts) == 3
    assert audit(script.storage).verdict == "proved"


def the_selection(script: Script) -> str:
    (path,) = [path for path in script.storage.objects if path.startswith("index/") and path.count("/") == 2]
    return path


def test_a_selection_of_another_table_under_the_right_name_is_not_taken(table: Path, tmp_path: Path) -> None:
    other = run_of(write_table(tmp_path, files=[(200,)]))
    other.attempt(4)
    script = run_of(table)
    script.attempt(8)
    path = the_selection(script)
    script.storage.objects[path] = other.storage.objects[the_selection(other)]
    script.attempt(4)
    assert audit(script.storage).verdict == "not proved"
    assert [one.path for one in verify(script.storage).damage] == [path]
    script.storage.delete(path)
    script.attempt(4)
    assert RowSelection.loads(script.storage.objects[path]).table == script.table.index.digest
    assert audit(script.storage).verdict == "proved"


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ([("id", "<", 100)], r"this dataset, \(id < 100\), keeps other rows"),
        (None, "this dataset has none"),
    ],
)
def test_a_run_is_not_gone_on_with_under_another_filter(table: Path, filters: Any, said: str) -> None:
    script = run_of(table)
    script.attempt(8)
    (loader,) = script.loaders(1, filters=filters)
    count = Counter("mine")
    state = {"count": count, "model": torch.nn.Linear(3, 2), "reader": loader}
    with pytest.raises(StateMismatch, match=said):
        CheckpointManager(script.storage, state).restore()
    assert count.value == "mine"
    script.attempt(4)
    assert audit(script.storage).verdict == "proved"


def test_a_filter_that_was_changed_by_the_users_leave_is_no_proof(table: Path) -> None:
    script = run_of(table, filters=[("id", "<", 100)])
    script.attempt(8)
    script.attempt(4, filters=[("id", ">=", 100)], accept_changes=["selection"])
    report = audit(script.storage)
    assert report.verdict == "not proved"
    assert any("several filters" in doubt for doubt in report.every_doubt)


def test_rows_are_named_as_stored_where_a_row_group_is_whole(table: Path) -> None:
    script = run_of(table, shuffle=False, batch_size=len(KEPT))
    script.attempt(1, every=1)
    (reader,) = explain(script.storage, 1).readers
    named = [one.to_plain() for one in reader.ranks[0].where]
    assert [(one["file"], one["row_group"], one["rows"], one["of"], one["counted"]) for one in named] == [
        ("part-0.parquet", 0, 10, 10, "selected"),
        ("part-0.parquet", 1, 15, 15, "selected"),
        ("part-0.parquet", 2, 10, 10, "selected"),
        ("part-1.parquet", 0, 25, 25, "stored"),
        ("part-1.parquet", 2, 1, 1, "stored"),
        ("part-2.parquet", 0, 74, 74, "stored"),
    ]
    assert reader.selection == script.loaders(1)[0].identity.selection


def test_ranks_restore_together_and_rank_0_saves_the_counts(table: Path) -> None:
    storage = MemoryStorage()
    script = run_of(table)

    def body(rank: int, exchange: HubExchange) -> int:
        loader = script.loaders(2)[rank]
        held = manager(storage, {"reader": loader}, exchange=exchange)
        held.restore()
        return sum(len(batch["id"]) for batch in loader)

    assert sum(good(run_ranks(2, body))) == len(KEPT)
    assert len([path for path in storage.objects if path.startswith("index/")]) == 1


def test_where_one_rank_cannot_count_every_rank_is_told(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = run_of(table)
    makers: list[Callable[[], Any]] = [lambda: script.loaders(2)[0], lambda: broken(script)]

    def body(rank: int, exchange: HubExchange) -> None:
        manager(MemoryStorage(), {"reader": makers[rank]()}, exchange=exchange).restore()

    results = run_ranks(2, body)
    assert all(isinstance(one, SchemaError) for one in results), results
    assert "rank 1" in str(results[0])


def broken(script: Script) -> Any:
    loader = script.loaders(2)[1]

    def fail() -> None:
        raise SchemaError("the filter cannot be evaluated")

    loader.dataset._versions.at_hand.selecting.get = fail  # type: ignore[method-assign, union-attr, assignment]
    return loader


@pytest.mark.parametrize("filtered", [True, False])
def test_a_packed_run_counts_its_filter_and_its_tokens_once_and_never_at_a_restart(
    filtered: bool, tmp_path: Path, counts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pa.table({"id": range(100), "tokens": [[1, 2, 3]] * 100})
    pq.write_table(content, tmp_path / "a.parquet", row_group_size=20, write_statistics=False)

    def noted(*arguments: Any, **options: Any) -> Any:
        counts.append("tokens")
        return count_tokens(*arguments, **options)

    monkeypatch.setattr(selecting, "count_tokens", noted)
    storage = MemoryStorage()
    for done in (0, 3, 6):
        rows = LakeDataset(tmp_path, batch_size=1, filters=[("id", "<", 90)] if filtered else None)
        loader = LakeLoader(pack(rows, length=16))
        saver = manager(storage, {"reader": loader})
        assert saver.restore() == done
        for _, batch in zip(range(3), loader, strict=False):
            saver.step(batch)
        saver.save()
        saver.close()
        assert len(counts) == 1 + filtered
