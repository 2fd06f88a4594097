"""What is exact is not suspected, and what cannot be told apart is refused before it is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import ConfigError, StateUnavailable
from tests.checkpoint.rig import Counter, MemoryStorage, manager
from tests.checkpoint.scripts import write_table
from tests.data.reading import dataset_of


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(str(write_table(tmp_path_factory.mktemp("lake"))))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(str(write_table(tmp_path_factory.mktemp("other"), files=[(100, 100)])))


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": row["id"]}, {"id": row["id"]}]


def reader_of(table: lakeckpt.Table, kind: str = "rows") -> lakeckpt.LakeLoader:
    if kind == "mix":
        parts = {name: (dataset_of(table, batch_size=10, columns=["id"]), 0.5) for name in ("web", "code")}
        return lakeckpt.LakeLoader(lakeckpt.mix(parts, seed=1, batch_size=10))
    many = {"rows": "many", "transform": twice} if kind == "many" else {}
    return lakeckpt.LakeLoader(dataset_of(table, batch_size=10, columns=["id"], **many))


@pytest.mark.parametrize("kind", ["rows", "many", "mix"])
def test_a_loader_in_two_managers_is_refused_by_the_first_before_anything_is_recorded(
    table: lakeckpt.Table, kind: str
) -> None:
    reader, first, second = reader_of(table, kind), MemoryStorage(), MemoryStorage()
    one = manager(first, {"count": Counter(), "reader": reader})
    one.restore()
    two = manager(second, {"count": Counter(), "reader": reader})
    two.restore()
    batch = next(iter(reader))
    for stated in (batch, None):
        with pytest.raises(ConfigError, match="is also in the state of another CheckpointManager"):
            one.step(stated)
    assert one.steps_done == 0
    two.step(batch)
    two.save()
    assert audit(second).verdict == "proved"


def test_a_manager_after_another_one_takes_its_loader(table: lakeckpt.Table) -> None:
    reader, storage = reader_of(table), MemoryStorage()
    for _ in range(2):
        saver = manager(storage, {"count": Counter(), "reader": reader})
        saver.restore()
        saver.step(next(iter(reader)))
        saver.save()
    assert audit(storage).verdict == "proved"


KINDS = [("rows", "rows"), ("rows", "mix"), ("mix", "rows"), ("mix", "mix"), ("many", "many"), ("rows", "many")]


@pytest.mark.parametrize(("mine", "its"), KINDS)
def test_a_batch_of_another_reader_is_refused_by_name(
    table: lakeckpt.Table, other: lakeckpt.Table, mine: str, its: str
) -> None:
    a, b = reader_of(table, mine), reader_of(other, its)
    saver = manager(MemoryStorage(), {"count": Counter(), "a": a, "b": b})
    saver.restore()
    of_a, of_b = next(iter(a)), next(iter(b))
    for stated in (of_b, of_b.receipt):
        with pytest.raises(ConfigError, match="this is a batch of reader 'b', and it was given as one of reader 'a'"):
            saver.step({"a": stated})
        with pytest.raises(ConfigError, match="this is a batch of reader 'b'"):
            saver.skip({"a": stated})
    assert saver.steps_done == 0
    saver.step({"a": of_a, "b": of_b})


@pytest.mark.parametrize(("mine", "its"), KINDS)
def test_a_batch_of_a_loader_in_no_state_is_refused(
    table: lakeckpt.Table, other: lakeckpt.Table, mine: str, its: str
) -> None:
    a, b = reader_of(table, mine), reader_of(other, its)
    saver = manager(MemoryStorage(), {"count": Counter(), "a": a})
    saver.restore()
    next(iter(a))
    with pytest.raises((ConfigError, StateUnavailable), match=r"not in this manager's state|not among what this"):
        saver.step(next(iter(b)))


def test_one_short_attempt_with_a_bare_step_is_delivered_and_not_suspected(
    table: lakeckpt.Table, tmp_path: Path
) -> None:
    storage = MemoryStorage()
    for steps, says in ((1, False), (4, True)):
        reader = reader_of(table)
        saver = manager(storage, {"count": Counter(), "reader": reader})
        saver.restore()
        for batch, _ in zip(reader, range(steps), strict=False):
            saver.step(batch if says else None)
            saver.save()
            if saver.steps_done == steps:
                break
    report = audit(storage)
    assert (report.verdict, report.exit_status, report.headline) == ("delivered", 3, "PROVED OF WHAT WAS DELIVERED")
