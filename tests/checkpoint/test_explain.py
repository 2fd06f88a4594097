"""`explain` names the rows of any optimizer step, in the order in which each rank read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.checkpoint.ledger.explain import StepExplained, explain, explain_history
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from tests.checkpoint.rig import Counter, MemoryStorage
from tests.checkpoint.scripts import Script, write_table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lake"))


def read_of(found: StepExplained) -> list[list[tuple[int, int]]]:
    """What was explained, as the script's book has it: per rank, (epoch, id) of each row."""
    (reader,) = found.readers
    return [
        list(
            zip(
                [span.epoch for one in rank.micro_batches for span in one.spans for _ in range(span.rows)],
                rank.table_rows.tolist(),
                strict=True,
            )
        )
        for rank in reader.ranks
    ]


def explained_as_booked(script: Script) -> int:
    """Hold every step of the history against the book; the number of steps."""
    history = read_history(script.storage)
    orders = orders_of(script.storage, history)
    assert history.tip is not None
    for step in range(1, history.tip.step + 1):
        assert read_of(explain_history(history, orders, step)) == script.book[step], f"step {step}"
    return history.tip.step


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_lanes": 12}, {"drop_last": True, "num_lanes": 4}, {"endless": True}, {"endless": True, "num_lanes": 6}],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_every_step_of_every_topology_is_explained(
    table: Path, shuffle: bool, options: dict[str, Any], accumulate: int
) -> None:
    script = Script(table, shuffle=shuffle, **options)
    for world_size, steps in ((1, 9), (2, 11), (3, 7), (4, 13), (1, 30)):
        script.attempt(steps, world_size=world_size, accumulate=accumulate, every=5)
    assert explained_as_booked(script) > 50


@pytest.mark.parametrize("options", [{"drop_last": True, "num_lanes": 4}, {"endless": True}], ids=str)
def test_row_wise_steps_begin_and_end_inside_of_micro_batches(table: Path, options: dict[str, Any]) -> None:
    script = Script(table, batch_size=None, **options)
    for world_size, steps in ((1, 19), (2, 23), (4, 13), (2, 40)):
        script.attempt(steps, world_size=world_size, accumulate=3, every=5)
    assert explained_as_booked(script) > 50


def test_an_epoch_read_twice_within_one_checkpoint_is_told_apart(table: Path) -> None:
    script = Script(table, batch_size=50)
    (loader,) = script.loaders(1)
    manager = CheckpointManager(script.storage, {"reader": loader}, persist_every=100)
    manager.restore()
    for step in range(1, 12):
        batch = next(iter(loader))
        script.book[step] = [[(0, row) for row in batch["id"].tolist()]]
        manager.step()
        if step in (2, 5, 9):
            loader.rewind()
    manager.save()
    assert explained_as_booked(script) == 11


def test_a_step_that_read_nothing_has_no_rows(table: Path) -> None:
    script = Script(table, batch_size=100)
    (loader,) = script.loaders(1)
    manager = CheckpointManager(script.storage, {"reader": loader}, persist_every=100)
    manager.restore()
    manager.step()
    for number, _ in zip(range(1, 5), (one for _ in range(3) for one in loader), strict=False):
        manager.step()
        if number != 2:
            manager.save()
        manager.step()
    manager.save()
    history = read_history(script.storage)
    orders = orders_of(script.storage, history)
    rows = [explain_history(history, orders, step).readers[0].rows for step in range(1, 10)]
    assert rows == [0, 100, 0, 100, 0, 100, 0, 100, 0]


def test_what_was_rolled_back_is_not_explained(table: Path) -> None:
    script = Script(table)
    script.attempt(10, every=4)
    script.attempt(1, every=4)
    with pytest.raises(CheckpointNotFound, match="ends at step 8: step 9 was not committed"):
        explain(script.storage, 9)


def test_steps_begin_at_one(table: Path) -> None:
    script = Script(table)
    script.attempt(4)
    with pytest.raises(ConfigError, match="counted from 1"):
        explain(script.storage, 0)


def test_ranks_can_be_chosen_and_must_be_there(table: Path) -> None:
    script = Script(table)
    script.attempt(8, world_size=4)
    (reader,) = explain(script.storage, 3, ranks=[2]).readers
    assert [rank.rank for rank in reader.ranks] == [2]
    assert reader.ranks[0].table_rows.tolist() == [row for _, row in script.book[3][2]]
    with pytest.raises(ConfigError, match="ranks 0 to 3, there is no rank 4"):
        explain(script.storage, 3, ranks=[1, 4])


def test_several_readers_are_explained_each(table: Path) -> None:
    script = Script(table)
    (one,), (other,) = script.loaders(1), script.loaders(1, seed=4, batch_size=20)
    manager = CheckpointManager(script.storage, {"left": one, "right": other}, persist_every=3)
    manager.restore()
    seen = []
    for left, right in zip(one, other, strict=False):
        seen.append([left["id"].tolist(), right["id"].tolist()])
        manager.step()
    found = explain(script.storage, 5)
    assert [reader.ranks[0].table_rows.tolist() for reader in found.readers] == seen[4]


def test_without_the_index_or_the_record_the_step_cannot_be_explained(table: Path) -> None:
    script = Script(table)
    script.attempt(16)
    history = read_history(script.storage)
    (index,) = [path for path in script.storage.objects if path.startswith("index/")]
    data = script.storage.objects.pop(index)
    with pytest.raises(CheckpointDamaged, match=index):
        explain(script.storage, 3)
    script.storage.objects[index] = data
    script.storage.delete(slot_path(history.chain[1].slot))
    assert read_of(explain(script.storage, 9)) == script.book[9]
    with pytest.raises(CheckpointDamaged, match="lies before what can be read"):
        explain(script.storage, 8)


def test_a_record_of_steps_that_fits_no_stretch_is_damage(table: Path) -> None:
    script = Script(table)
    script.attempt(8)
    history = read_history(script.storage)
    last = history.chain[-1]
    record = replace(last.readers["reader"], stretches=history.chain[0].readers["reader"].stretches)
    chain = (history.chain[0], replace(last, readers={"reader": record}))
    with pytest.raises(CheckpointDamaged, match="no recorded stretch goes there"):
        explain_history(replace(history, chain=chain), orders_of(script.storage, history), 7)


def test_checkpoints_without_a_reader_explain_nothing() -> None:
    storage = MemoryStorage()
    manager = CheckpointManager(storage, {"count": Counter()}, persist_every=1)
    manager.restore()
    manager.step()
    with pytest.raises(CheckpointNotFound, match="no reader was tracked"):
        explain(storage, 1)


def test_plain_values_name_every_row_when_asked(table: Path) -> None:
    script = Script(table)
    script.attempt(8, world_size=2)
    found = explain(script.storage, 2)
    plain = json.loads(json.dumps(found.to_plain(every_row=True)))
    (reader,) = plain["readers"]
    assert [rank["rows"] for rank in reader["ranks"]] == [7, 7]
    for rank, booked in zip(reader["ranks"], script.book[2], strict=True):
        named = [(file, group, row) for file, group, row in rank["order"]]
        assert named == [found.readers[0].order.place(row) for _, row in booked]
        assert sum(one["rows"] for one in rank["row_groups"]) == 7
    assert "order" not in found.to_plain()["readers"][0]["ranks"][0]
