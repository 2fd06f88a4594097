"""The audit proves nothing of rows that were never in the record, and says which rows these are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import EXIT_STATUS, AuditReport
from lakeckpt.cli.main import main
from lakeckpt.data.position.deliveries import ConsumptionWarning
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.checkpoint.scripts import write_table
from tests.data.reading import dataset_of

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = "in no manager's state delivers rows while"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(str(write_table(tmp_path_factory.mktemp("lake"))))


def loader_of(table: lakeckpt.Table, **options: Any) -> lakeckpt.LakeLoader:
    chosen = {"batch_size": 10, "columns": ["id"], **options}
    restart = chosen.pop("restart", False)
    return lakeckpt.LakeLoader(dataset_of(table, **chosen), restart=restart)


def mixed(table: lakeckpt.Table, small: lakeckpt.Table, **options: Any) -> lakeckpt.LakeLoader:
    given = {name: options.pop(name) for name in ("rank", "world_size") if name in options}
    sources = {
        name: (dataset_of(one, batch_size=10, columns=["id"], **given), 0.5)
        for name, one in (("web", table), ("code", small))
    }
    return lakeckpt.LakeLoader(lakeckpt.mix(sources, seed=1, batch_size=10, **options))


def trained(run: Any, state: dict[str, Any], steps: int, *others: Any, **options: Any) -> None:
    """One attempt of ``steps`` steps, which states the rows of the first reader; ``others`` are read beside it."""
    name, reader = next(iter(state.items()), ("", None))
    missing = options.pop("missing", ())
    with lakeckpt.CheckpointManager(
        run, {"model": torch.nn.Linear(2, 2), **state}, persist_every=2, **options
    ) as saver:
        saver.restore(allow_missing=missing)
        ends = saver.steps_done + steps
        for batch, *_ in zip(range(steps) if reader is None else reader, *others, strict=False):
            saver.step(None if reader is None else {name: batch})
            if saver.steps_done == ends:
                break


def audited(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, AuditReport]:
    """The exit status and the words of ``lakeckpt audit``, and its report."""
    capsys.readouterr()
    status = main(["audit", str(run)])
    return status, capsys.readouterr().out, audit(LocalStorage(run))


# --- readers that join later


@pytest.mark.parametrize("kind", ["rows", "mix"])
def test_steps_before_a_reader_joined_are_not_proved(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    trained(tmp_path, {}, 4)
    for _ in range(2):
        reader = loader_of(table) if kind == "rows" else mixed(table, table)
        trained(tmp_path, {"reader": reader}, 4, missing="reader")
    status, said, report = audited(tmp_path, capsys)
    assert (status, report.verdict, report.from_step, report.exactly_once) == (3, "from step", 4, False)
    assert "\nPROVED FROM STEP 4  " in said and "the rows of the first 4 steps were not recorded" in said


def test_steps_of_a_cut_in_memory_before_a_reader_joined_are_not_proved(table: lakeckpt.Table, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"arenas": tmp_path / "arenas", "capture_every": 1, "persist_every": 100}
    dead = lakeckpt.CheckpointManager(run, {"count": Counter()}, **options)
    dead.restore()
    for _ in range(3):
        dead.step()
        dead._saves._engine.wait()  # type: ignore[union-attr]
    dead._saves._engine.close()  # type: ignore[union-attr]  # this trainer has died
    reader = loader_of(table)
    with lakeckpt.CheckpointManager(run, {"count": Counter(), "reader": reader}, **options) as saver:
        assert saver.restore(allow_missing="reader") == 3
        for batch in reader:
            saver.step(batch)
    report = audit(LocalStorage(run))
    assert (report.verdict, report.from_step, report.checkpoints) == ("from step", 3, 1)
    dead.close()


def test_a_reader_that_joins_others_is_noted(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, {"first": loader_of(table)}, 4)
    trained(tmp_path, {"first": loader_of(table), "more": loader_of(table)}, 4, missing="more")
    status, said, _ = audited(tmp_path, capsys)
    assert status == 0 and "note: reader 'more' joined the run after step 4" in said


# --- loaders in no state


def test_a_loader_in_no_state_that_is_trained_on_is_warned_of_once_and_noted(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pytest.warns(ConsumptionWarning, match=OUTSIDE) as caught:
            trained(tmp_path, {"reader": loader_of(table)}, 6, loader_of(table))
        assert len(caught) == 1
    status, said, report = audited(tmp_path, capsys)
    assert (status, report.verdict) == (0, "proved")
    assert "note: beside these readers, a loader that is in no state delivered rows in training" in said
    # put into the state, it has trained rows that nobody recorded
    trained(tmp_path, {"reader": loader_of(table), "other": loader_of(table)}, 4, missing="other")
    status, said, _ = audited(tmp_path, capsys)
    assert status == 3 and "PROVED FROM STEP 12 " in said


@pytest.mark.parametrize("how", ["no_grad", "eval", "restart", "between", "frozen"])
def test_loaders_of_evaluations_are_not_suspected(table: lakeckpt.Table, tmp_path: Path, how: str) -> None:
    model, other = torch.nn.Linear(2, 2), loader_of(table, restart=how == "restart")
    model.train(how not in ("eval", "frozen"))
    reader = loader_of(table)
    if how == "between":
        next(iter(other))  # a look at a batch before the first step
    with lakeckpt.CheckpointManager(tmp_path, {"model": model, "reader": reader}) as saver:
        saver.restore()
        for batch, _ in zip(reader, range(4), strict=False):
            saver.step(batch)
            if how != "between":
                with torch.set_grad_enabled(how != "no_grad"):
                    list(other)
    assert not audit(LocalStorage(tmp_path)).notes


# --- ranks that read the same rows


def stage(rank: int) -> torch.nn.Module:
    return torch.nn.ModuleDict({str(rank): torch.nn.Linear(2, 2)})


def replica(rank: int) -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def of_ranks(table: lakeckpt.Table, make: Callable[[int], torch.nn.Module], kind: str) -> tuple[AuditReport, set[str]]:
    """The audit of a run of 2 ranks that all read as rank 0 of 1, and the warnings of its ranks."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> None:
        torch.manual_seed(0)
        options = {} if kind == "group" else {"rank": 0, "world_size": 1}
        if kind == "many":
            options |= {"rows": "many", "transform": twice}
        reader = mixed(table, table, **options) if kind == "mix" else loader_of(table, **options)
        state = {"model": make(rank), "reader": reader}
        saver = manager(storage, state, exchange=exchange, waiter=waiter, persist_every=4)
        saver.restore()
        for batch, _ in zip(reader, range(8), strict=False):
            saver.step(batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        good(run_ranks(2, body, waiters=[waiter]))
    return audit(storage), {str(one.message) for one in caught if issubclass(one.category, ConsumptionWarning)}


def twice(rows: Any) -> Any:
    return [{"id": rows["id"]}, {"id": rows["id"]}]


@pytest.mark.parametrize("kind", ["rows", "mix", "many"])
def test_replicas_that_read_the_same_rows_are_warned_of_and_never_proved(table: lakeckpt.Table, kind: str) -> None:
    report, warned = of_ranks(table, replica, kind)
    assert all("2 ranks read the same rows of reader" in one and "dp_group=" in one for one in warned) and warned
    assert (report.verdict, report.exit_status) == ("not proved", 1)
    assert "trained replicas of one model: each row was trained 2 times" in report.every_doubt[0]


@pytest.mark.parametrize(("make", "kind"), [(stage, "rows"), (replica, "group")])
def test_a_group_that_reads_the_same_rows_is_named_by_what_the_verdict_trusts(
    table: lakeckpt.Table, make: Any, kind: str
) -> None:
    report, warned = of_ranks(table, make, kind)
    assert (report.verdict, warned) == ("proved", set())
    assert report.trusted[-1].startswith("the groups of ranks: 2 ranks that read the same rows of reader 'reader'")


# --- sources that are never read


def test_a_source_that_is_never_read_is_named_with_its_rows(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = lakeckpt.open_table(str(write_table(tmp_path / "small", files=[(3,)])))
    run = tmp_path / "run"
    trained(run, {"reader": mixed(table, small, exhausted="continue", num_lanes=4)}, 8)
    status, said, _ = audited(run, capsys)
    assert status == 0 and "3 rows of 'reader.code' are to come, none was read" in said
    assert "reader 'reader.code': 1 rank" in said


@pytest.mark.parametrize("exhausted", ["stop", "continue"])
def test_a_mixture_that_ends_before_its_first_step_says_which_source_is_too_small(
    table: lakeckpt.Table, tmp_path: Path, exhausted: Any
) -> None:
    small = lakeckpt.open_table(str(write_table(tmp_path / "small", files=[(3,)])))
    web = small if exhausted == "continue" else table
    loader = mixed(web, small, exhausted=exhausted, num_lanes=4)
    with pytest.raises(ConfigError, match=r"ends before its first step: of its sources, .*'code' has 3"):
        next(iter(loader))


# --- exit codes


def test_the_contributors_page_has_the_exit_code_of_each_verdict() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z ]+)` \| ([A-Z][^|]*) \| (\d) \|", page, re.MULTILINE)
    assert {verdict: int(status) for verdict, _, status in rows} == EXIT_STATUS
