"""The audit proves what held, names the rows of what did not, and says when it cannot know."""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.ledger.audit import audit, audit_history
from lakeckpt.checkpoint.ledger.audit_report import AuditReport, Finding
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import CheckpointNotFound
from tests.checkpoint.rig import Counter, MemoryStorage
from tests.checkpoint.scripts import Script, without, write_table

ROWS = 200


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lake"))


def audited(script: Script, **options: Any) -> AuditReport:
    """Audit, and hold the counts of every epoch against the script's own book."""
    report = audit(script.storage, **options)
    truth = script.truth(report.step)
    for reader in report.readers:
        for epoch in reader.epochs:
            times = Multiset(times for (of, _), times in truth.items() if of == epoch.epoch)
            assert epoch.once + epoch.again == times[1]
            assert epoch.repeated == sum(count for times, count in times.items() if times > 1)
            assert epoch.surplus == sum((times - 1) * count for times, count in times.items())
            assert epoch.lost + epoch.dropped + epoch.left == ROWS - sum(times.values())
    return report


def rows_of(finding: Finding, table: Path) -> set[int]:
    """The table rows that a finding names."""
    import pyarrow.parquet as pq

    starts, done = {}, 0
    for path in sorted(table.glob("*.parquet")):
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            starts[path.name, group] = done
            done += metadata.row_group(group).num_rows
    return {
        starts[one.file, one.row_group] + row
        for one in finding.where
        for start, stop in one.rows.pairs()
        for row in range(start, stop)
    }


# --- what holds is proved


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_lanes": 12},
        {"tail": "drop", "num_lanes": 4},
        {"endless": True},
        {"endless": True, "num_lanes": 6},
        {"batch_size": None},
        {"batch_size": None, "tail": "drop", "num_lanes": 4},
    ],
    ids=str,
)
def test_crashes_and_changes_of_topology_leave_every_row_counted_once(
    table: Path, shuffle: bool, options: dict[str, Any]
) -> None:
    script = Script(table, shuffle=shuffle, **options)
    row_wise = 11 if options.get("batch_size", 7) is None else 1
    one_rank = row_wise > 1 and "tail" not in options  # ranks then differ by a row at an epoch's end
    for world_size, steps in ((1, 9), (2, 11), (3, 7), (4, 13), (2, 6), (1, 5)):
        script.attempt(steps * row_wise, world_size=1 if one_rank else world_size, every=4 * row_wise + 1)
        report = audited(script)
        assert report.verdict == "proved", report.to_plain()
    assert report.lost == report.repeated == report.again == 0
    epochs = report.readers[0].epochs
    assert len(epochs) > 1 and epochs[0].status == "complete" and epochs[-1].status == "in progress"
    assert report.attempts == 6 and report.exit_status == 0


def test_rows_dropped_by_the_tail_are_said_openly(table: Path) -> None:
    script = Script(table, tail="drop", num_lanes=4, batch_size=7)
    script.attempt(40, world_size=2)
    report = audited(script)
    complete = [epoch for epoch in report.readers[0].epochs if epoch.status == "complete"]
    assert [epoch.dropped for epoch in complete] == [ROWS - 4 * (50 // 7 * 7)] * len(complete)
    assert report.verdict == "proved" and "dropped on purpose" in report.words


def test_what_a_row_wise_tail_gives_to_no_rank_is_dropped_and_not_counted(table: Path) -> None:
    script = Script(table, batch_size=None, tail="drop", num_lanes=4)
    script.attempt(5, world_size=2, every=5)
    script.attempt(60, world_size=4, every=12)
    report = audited(script)
    assert report.verdict == "proved"
    first = report.readers[0].epochs[0]
    assert (first.status, first.dropped) == ("complete", 2)  # of the last 10 rows, 4 ranks got 2 each


def test_an_epoch_in_progress_is_not_lost(table: Path) -> None:
    script = Script(table)
    script.attempt(9, every=4)
    (epoch,) = audited(script).readers[0].epochs
    assert (epoch.status, epoch.once, epoch.left, epoch.lost) == ("in progress", 56, ROWS - 56, 0)


def test_an_epoch_that_is_over_to_the_last_row_is_complete_before_the_next_begins(table: Path) -> None:
    script = Script(table, batch_size=50)
    script.attempt(4, every=2)
    (epoch,) = audited(script).readers[0].epochs
    assert (epoch.status, epoch.once) == ("complete", ROWS)


def test_steps_that_used_several_batches_or_none_do_not_confuse_it(table: Path) -> None:
    script = Script(table)
    script.attempt(20, accumulate=3, every=3)
    script.attempt(10, accumulate=5, world_size=2, every=2)
    assert audited(script).verdict == "proved"


def test_the_record_outlives_the_data_and_the_table(tmp_path: Path) -> None:
    table = write_table(tmp_path / "lake")
    script = Script(table)
    script.attempt(40, keep=1)
    script.attempt(30, keep=1, world_size=2)
    for path in table.glob("*"):
        path.unlink()
    for path in [path for path in script.storage.objects if path.startswith(("parts/", "objects/"))]:
        script.storage.delete(path)
    assert audited(script).verdict == "proved"


def test_several_readers_have_an_account_each(table: Path) -> None:
    script = Script(table)
    (one,), (other,) = script.loaders(1), script.loaders(1, seed=4, batch_size=20)
    manager = CheckpointManager(script.storage, {"left": one, "right": other}, persist_every=3)
    manager.restore()
    for left, right in zip(one, other, strict=False):
        manager.step({"left": left, "right": right})
    manager.save()
    report = audit(script.storage)
    assert [reader.name for reader in report.readers] == ["left", "right"]
    assert [[epoch.once for epoch in reader.epochs] for reader in report.readers] == [[70], [200]]
    assert report.verdict == "proved"


def test_an_abandoned_branch_does_not_count(table: Path) -> None:
    script = Script(table)
    script.attempt(12, every=4)
    tip = read_history(script.storage).tip
    assert tip is not None
    script.storage.delete(tip.save.part_path(0))
    with pytest.warns(UserWarning, match="not whole"):
        script.attempt(8, every=4)
    report = audited(script)
    assert report.verdict == "proved" and report.step == 16
    assert [(branch.slots, branch.last_step, branch.rows) for branch in report.branches] == [((tip.slot,), 12, 28)]


def test_the_history_of_an_older_checkpoint_can_be_asked_for(table: Path) -> None:
    script = Script(table)
    script.attempt(12, every=4)
    slots = [one.slot for one in read_history(script.storage).chain]
    report = audited(script, tip=slots[1])
    assert (report.step, report.verdict, report.readers[0].epochs[0].once) == (8, "proved", 56)
    assert (report.checkpoints, report.attempts, report.branches) == (2, 1, ())  # what came later was not rolled back
    script.attempt(8, every=4)
    script.storage.objects[slot_path(slots[2])] += b"x"
    assert audited(script, tip=slots[1]) == report
    with pytest.raises(CheckpointNotFound, match="not a checkpoint"):
        audit(script.storage, tip=99)


# --- what does not hold is named


@pytest.mark.parametrize(
    ("shuffle", "lanes"), [(True, (None, None)), (False, (None, None)), (True, (4, 6)), (False, (4, 6))]
)
def test_a_restore_that_lost_the_reader_state_repeats_rows_and_they_are_named(
    table: Path, shuffle: bool, lanes: tuple[int | None, int | None]
) -> None:
    script = Script(table, shuffle=shuffle)
    script.attempt(12, num_lanes=lanes[0])
    script.attempt(8, num_lanes=lanes[1], lose_state=True)
    report = audited(script)
    assert report.verdict == "not proved" and report.exit_status == 1 and report.repeated > 0
    (finding,) = [one for one in report.findings if one.kind == "repeated"]
    assert (finding.step, finding.attempt) == (16, read_history(script.storage).begins[1].attempt)
    assert rows_of(finding, table) == {row for (_, row), times in script.truth(20).items() if times > 1}
    again = {row for one in report.findings if one.kind == "again" for row in rows_of(one, table)}
    consumed_since = {row for step in range(13, 21) for _, row in script.book[step][0]}
    assert again == {row for _, row in script.truth(20)} - consumed_since


def test_a_reader_that_was_rewound_repeats_rows(table: Path) -> None:
    script = Script(table)
    script.attempt(8)
    script.attempt(8, after_restore=lambda loaders: loaders[0].rewind())
    report = audited(script)
    assert report.verdict == "not proved" and report.repeated == 56


def test_an_epoch_read_a_second_time_is_repeated(table: Path) -> None:
    script = Script(table, batch_size=50)
    script.attempt(6, every=2)
    script.attempt(2, every=2, after_restore=lambda loaders: loaders[0].set_epoch(0))
    report = audited(script)
    assert [(epoch.repeated, epoch.again, epoch.status) for epoch in report.readers[0].epochs] == [
        (100, 100, "in progress"),
        (0, 100, "left behind"),
    ]


def test_a_reader_that_ran_ahead_of_the_model_loses_rows_and_they_are_named(table: Path) -> None:
    script = Script(table)
    script.attempt(8)
    (ahead,) = script.loaders(1)
    batches = iter(ahead)
    for _ in range(11):
        next(batches)
    script.attempt(8, after_restore=lambda loaders: loaders[0].load_state_dict(ahead.state_dict()))
    report = audited(script)
    assert report.verdict == "not proved" and (report.lost, report.repeated) == (21, 0)
    (finding,) = report.findings
    assert finding.kind == "lost" and finding.step == 12
    (whole,) = script.loaders(1)
    order = [row for batch in whole for row in batch["id"].tolist()]
    assert rows_of(finding, table) == set(order[56:77])


def test_an_epoch_that_was_skipped_is_lost(table: Path) -> None:
    script = Script(table, batch_size=50)
    script.attempt(2, every=2)
    script.attempt(2, every=2, after_restore=lambda loaders: loaders[0].set_epoch(2))
    report = audited(script)
    assert [(epoch.once, epoch.lost) for epoch in report.readers[0].epochs] == [(100, 100), (0, 200), (100, 0)]


@pytest.mark.parametrize("endless", [True, False])
def test_a_gap_in_the_chain_loses_the_rows_of_the_manifest_that_is_not_there(table: Path, endless: bool) -> None:
    script = Script(table, endless=endless)
    script.attempt(20)
    history = read_history(script.storage)
    slot = history.chain[2].slot
    report = audit_history(without(history, slot), orders_of(script.storage, history))
    assert report.verdict == "not proved" and (report.lost, report.repeated) == (28, 0)
    (finding,) = report.findings
    assert finding.step == 16
    assert rows_of(finding, table) == {row for step in range(9, 13) for _, row in script.book[step][0]}


def test_an_endless_stream_that_began_anew_repeats_rows(table: Path) -> None:
    script = Script(table, endless=True)
    script.attempt(40)
    script.attempt(8, lose_state=True)
    report = audited(script)
    assert report.verdict == "not proved" and report.repeated == 56


def audited_with(table: Path, change: Callable[[Intervals], Intervals]) -> AuditReport:
    """The audit of a history whose last manifest records other rows than its state says."""
    script = Script(table)
    script.attempt(12)
    history = read_history(script.storage)
    last = history.chain[-1]
    record = last.readers["reader"]
    (stretch,) = record.stretches
    changed = replace(record, stretches=(replace(stretch, consumed={0: change(stretch.consumed[0])}),))
    chain = (*history.chain[:-1], replace(last, readers={"reader": changed}))
    return audit_history(replace(history, chain=chain), orders_of(script.storage, history))


def test_a_row_that_two_manifests_record_is_repeated_whatever_the_states_say(table: Path) -> None:
    report = audited_with(table, lambda rows: rows.union(Intervals.of([(5, 8)])))
    assert report.verdict == "not proved" and report.repeated == 3
    assert any("do not" in text or "are not those" in text for text in report.every_doubt)


def test_a_row_that_no_manifest_records_is_lost_whatever_the_states_say(table: Path) -> None:
    report = audited_with(table, lambda rows: rows.difference(Intervals.of([(60, 62)])))
    assert report.verdict == "not proved" and report.lost == 2


# --- what cannot be known is said


def test_positions_beyond_the_table_are_doubted_and_are_no_rows(table: Path) -> None:
    report = audited_with(table, lambda rows: rows.union(Intervals.of([(ROWS, ROWS + 5)])))
    assert report.verdict == "not proved" and (report.repeated, report.lost, report.again) == (0, 0, 0)
    assert any(f"positions beyond the {ROWS} rows of epoch 0" in text for text in report.every_doubt)
    assert report.readers[0].epochs[0].once == 12 * 7


def test_a_reader_that_began_with_a_later_epoch_is_proved_from_there_and_that_is_said(table: Path) -> None:
    script = Script(table)
    script.attempt(40, after_restore=lambda loaders: loaders[0].set_epoch(2))
    report = audit(script.storage)
    assert report.verdict == "proved" and [one.epoch for one in report.readers[0].epochs] == [2, 3]
    assert report.readers[0].notes == ("it began with epoch 2; the epochs before are not part of this run",)


def test_an_epoch_read_from_two_versions_of_the_table_is_not_proved(tmp_path: Path) -> None:
    script = Script(write_table(tmp_path / "old", files=[(50, 50), (100,)]), shuffle=False)
    script.attempt(8)
    script.table = lakeckpt.open_table(str(write_table(tmp_path / "new", files=[(100, 50), (50,)])))
    script.attempt(8, accept_changes=["table"])
    report = audited(script)
    assert report.verdict == "not proved" and report.lost == report.repeated == 0
    assert "2 versions of the table" in report.every_doubt[0]


def test_a_history_that_cannot_be_read_to_its_beginning_is_not_proved(table: Path) -> None:
    script = Script(table)
    script.attempt(16)
    script.storage.delete(slot_path(read_history(script.storage).chain[1].slot))
    report = audit(script.storage)
    assert (report.verdict, report.exit_status) == ("not proved", 1)
    (epoch,) = report.readers[0].epochs
    assert (epoch.before, epoch.once, epoch.lost) == (56, 56, 0)
    assert "history is broken" in report.every_doubt[0]


def test_a_newest_entry_that_cannot_be_read_stands_against_a_proof(table: Path) -> None:
    script = Script(table)
    script.attempt(16)
    tip = read_history(script.storage).tip
    assert tip is not None
    script.storage.objects[slot_path(tip.slot)] = b"x" + script.storage.objects[slot_path(tip.slot)][1:]
    report = audit(script.storage)
    assert report.verdict == "not proved" and report.step == 12
    assert slot_path(tip.slot) in report.every_doubt[0]


def test_without_the_index_nothing_is_proved_and_violations_are_still_seen(table: Path, tmp_path: Path) -> None:
    other = write_table(tmp_path, files=[(ROWS,)])
    script = Script(table)
    script.attempt(12)
    (index,) = [path for path in script.storage.objects if path.startswith("index/")]
    data = script.storage.objects.pop(index)
    assert audited(script).verdict == "not proved"
    script.storage.objects[index] = data[:-1]
    assert audited(script).verdict == "not proved"
    script.storage.objects[index] = lakeckpt.open_table(str(other)).index.dumps()
    assert audited(script).verdict == "not proved"
    script.storage.objects[index] = data
    script.attempt(8, lose_state=True)
    del script.storage.objects[index]
    report = audited(script)
    assert report.verdict == "not proved"
    assert all(finding.where == () and finding.more == finding.rows for finding in report.findings)


def test_checkpoints_without_a_reader_prove_nothing() -> None:
    storage = MemoryStorage()
    manager = CheckpointManager(storage, {"count": Counter()}, persist_every=1)
    manager.restore()
    assert audit(storage).verdict == "not proved"
    manager.step()
    report = audit(storage)
    assert report.verdict == "not proved" and "no reader was tracked" in report.words


def test_no_run_at_all_is_an_error() -> None:
    with pytest.raises(CheckpointNotFound, match="no run at memory"):
        audit(MemoryStorage())


def test_a_reader_that_later_checkpoints_lack_is_not_proved(table: Path) -> None:
    script = Script(table)
    script.attempt(8)
    history = read_history(script.storage)
    chain = (history.chain[0], replace(history.chain[1], readers={}))
    report = audit_history(replace(history, chain=chain), orders_of(script.storage, history))
    assert report.verdict == "not proved" and "in no checkpoint after step 4" in report.every_doubt[0]


def test_a_reader_that_began_inside_of_an_epoch_is_not_proved(table: Path) -> None:
    script = Script(table)
    (ahead,) = script.loaders(1)
    next(iter(ahead))
    script.attempt(8, after_restore=lambda loaders: loaders[0].load_state_dict(ahead.state_dict()))
    report = audit(script.storage)
    assert report.verdict == "not proved" and report.readers[0].epochs[0].before == 7


@pytest.mark.parametrize("what", ["attempt", "step", "state", "steps"])
def test_a_ledger_that_contradicts_itself_is_not_proved(table: Path, what: str) -> None:
    script = Script(table)
    script.attempt(8)
    script.attempt(8)
    history = read_history(script.storage)
    last: Manifest = history.chain[-1]
    record = last.readers["reader"]
    if what == "attempt":
        history = replace(history, restores=(history.restores[0], replace(history.restores[1], restored=1)))
    elif what == "step":
        history = replace(history, chain=(*history.chain[:-1], replace(last, step=3)))
    else:
        changed = (
            {"state": {"format": "?"}} if what == "state" else {"steps": history.chain[-2].readers["reader"].steps}
        )
        if what == "steps":
            last = replace(last, step=history.chain[-2].step)
        last = replace(last, readers={"reader": replace(record, **changed)})
        history = replace(history, chain=(*history.chain[:-1], last))
    report = audit_history(history, orders_of(script.storage, history))
    assert report.verdict == "not proved" and report.every_doubt


def test_the_report_is_plain_values_that_add_up(table: Path) -> None:
    import json

    script = Script(table, tail="drop", num_lanes=2)
    script.attempt(40)
    plain = json.loads(json.dumps(audit(script.storage).to_plain()))
    assert plain["verdict"] == "proved" and plain["exactly_once"] is True
    for epoch in plain["readers"][0]["epochs"]:
        counts = ("once", "repeated", "again", "lost", "dropped", "left", "before")
        assert sum(epoch[name] for name in counts) == epoch["rows"] == ROWS
