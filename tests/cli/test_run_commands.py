"""inspect, verify, explain and audit say of runs on disk what is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.lake.storage.open import open_storage
from tests.checkpoint.rig import Counter
from tests.checkpoint.scripts import Script, write_table
from tests.cli.conftest import script_at

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]


# --- audit


def test_audit_proves_a_run_that_kept_the_promise(good_run: Script, lake: Path, ask: Ask, show: Show) -> None:
    status, plain = ask("audit", lake.parent / "good")
    assert (status, plain["verdict"], plain["lost"], plain["repeated"]) == (0, "proved", 0, 0)
    status, told = show("audit", lake.parent / "good")
    assert status == 0
    assert "PROVED" in told and "rolled back: attempt" in told and "The verdict trusts" in told


def test_audit_names_the_rows_that_were_repeated(bad_run: Script, lake: Path, ask: Ask, show: Show) -> None:
    status, plain = ask("audit", lake.parent / "bad")
    assert (status, plain["verdict"]) == (1, "not proved") and plain["repeated"] == 56
    assert {one["file"] for one in plain["readers"][0]["findings"][0]["where"]} <= {
        f"part-{i}.parquet" for i in range(3)
    }
    status, told = show("audit", lake.parent / "bad")
    assert status == 1 and "NOT PROVED" in told and "56 rows were consumed more than once" in told


def test_audit_lists_every_row_when_asked(tmp_path: Path, show: Show) -> None:
    script = script_at(write_table(tmp_path / "lake", files=[(20,)] * 80), tmp_path / "run")
    script.attempt(60, batch_size=20, num_lanes=3, every=60)
    script.attempt(60, batch_size=20, num_lanes=5, every=60, lose_state=True)
    repeated = sum(times > 1 for times in script.truth(120).values())
    _, short = show("audit", tmp_path / "run")
    _, long = show("audit", tmp_path / "run", "--all")
    assert "rows more (--all)" in short and "rows more" not in long and ", … " not in long
    named = [
        _count(line.rstrip().split("  ")[-1])
        for line in long.partition("✗")[2].partition("✗")[0].splitlines()
        if ".parquet" in line
    ]
    assert sum(named) == repeated > 64


def test_audit_says_when_it_cannot_know(run_copy: Path, ask: Ask, show: Show) -> None:
    slot = read_history(open_storage(run_copy)).chain[1].slot
    (run_copy / "log" / f"{slot:010d}.lkc").write_bytes(b"")
    status, plain = ask("audit", run_copy)
    assert (status, plain["verdict"]) == (1, "not proved") and plain["doubts"]
    status, told = show("audit", run_copy)
    assert status == 1 and "NOT PROVED" in told and "unknown:" in told


def test_audit_of_an_older_checkpoint(good_run: Script, lake: Path, ask: Ask) -> None:
    slot = read_history(open_storage(lake.parent / "good")).chain[0].slot
    assert ask("audit", lake.parent / "good", "--tip", slot)[1]["step"] == 4


def _count(rows: str) -> int:
    """How many rows such a text names: ``all 20``, or ``0, 3–5``."""
    rows = rows.strip()
    if rows.startswith("all "):
        return int(rows[4:])
    pairs = [one.split("–") for one in rows.split(", ")]
    return sum(int(pair[-1]) - int(pair[0]) + 1 for pair in pairs)


# --- explain


def test_explain_names_the_rows_of_a_step_in_order(good_run: Script, lake: Path, ask: Ask) -> None:
    starts = {(0, 0): 0, (0, 1): 30, (0, 2): 60, (1, 0): 100, (1, 2): 125, (2, 0): 126}
    for step in (1, 12, 13, 20, 25, 30):
        status, plain = ask("explain", lake.parent / "good", "--step", step, "--rows")
        (reader,) = plain["readers"]
        found = [[starts[int(file[5]), group] + row for file, group, row in rank["order"]] for rank in reader["ranks"]]
        assert status == 0
        assert found == [[row for _, row in rank] for rank in good_run.book[step]]


def test_explain_shows_row_groups_or_every_row(good_run: Script, lake: Path, show: Show) -> None:
    status, short = show("explain", lake.parent / "good", "--step", "15")
    assert status == 0 and "2 of 2 ranks" in short and "part-0.parquet" in short
    status, long = show("explain", lake.parent / "good", "--step", "15", "--rows", "--rank", "1")
    assert status == 0 and "1 of 2 ranks" in long
    assert sum(line.split()[0] == "1" for line in long.splitlines() if line.strip()) == 7


def test_explain_refuses_a_step_that_is_not_there(good_run: Script, lake: Path, show: Show) -> None:
    status, told = show("explain", lake.parent / "good", "--step", "1000")
    assert status == 2 and "the history ends at step" in told


# --- inspect


def test_inspect_tells_checkpoints_attempts_and_places(good_run: Script, lake: Path, ask: Ask) -> None:
    status, plain = ask("inspect", lake.parent / "good")
    history = read_history(open_storage(lake.parent / "good"))
    assert status == 0 and history.tip is not None
    assert (plain["step"], plain["slot"]) == (history.tip.step, history.tip.slot)
    assert [one["slot"] for one in plain["checkpoints"] if one["in_history"]] == [one.slot for one in history.chain]
    assert [one["slot"] for one in plain["checkpoints"] if not one["in_history"]] == [
        one.slot for one in history.abandoned
    ]
    assert [one["restored_slot"] for one in plain["attempts"]] == [one.restored for one in history.restores]
    assert sum(one["checkpoints"] for one in plain["attempts"]) == len(plain["checkpoints"])
    with_data = [one for one in plain["checkpoints"] if one["files"]]
    assert len(with_data) == 3 and all(one["size_bytes"] > 0 for one in with_data)
    for one in plain["checkpoints"]:
        if one["in_history"]:
            at = one["readers"]["reader"]
            done = sum(epoch == at["epoch"] for epoch, _ in good_run.truth(one["step"]))
            assert (at["rows_done"], at["rows"]) == (done, 200)


def test_inspect_shows_a_table(good_run: Script, lake: Path, show: Show) -> None:
    status, told = show("inspect", lake.parent / "good")
    assert status == 0
    assert "rolled back" in told and "removed" in told and "a fresh start" in told and "epoch 0, 14.0 %" in told


@pytest.mark.parametrize(("best_is", "step"), [("lowest", 2), ("highest", 5)])
def test_inspect_shows_the_metric_and_marks_the_best(
    best_is: Any, step: int, tmp_path: Path, ask: Ask, show: Show
) -> None:
    run, rule = tmp_path / "run", lakeckpt.Keep(last=1, best=2, best_is=best_is)
    with lakeckpt.CheckpointManager(run, {"n": Counter()}, persist_every=1, keep=rule) as manager:
        manager.restore()
        for metric in (None, 0.25, 0.5, 1 / 3, 0.75, float("nan")):
            manager.step(metric=metric)
    _, told = show("inspect", run)
    lines = [line.split() for line in told.splitlines() if line.endswith(" best")]
    assert [line[1] for line in lines] == [str(step)]
    assert "0.333333" in told and " 0.25" in told
    _, plain = ask("inspect", run)
    assert plain["best_slot"] == next(one["slot"] for one in plain["checkpoints"] if one["step"] == step)
    assert plain["best_slot"] == lakeckpt.load(run, {"n": Counter()}, step="best").slot
    assert [one["metric"] for one in plain["checkpoints"]][:3] == [None, 0.25, 0.5]


def test_inspect_shows_the_newest_unless_all_are_asked_for(lake: Path, tmp_path: Path, show: Show) -> None:
    script = Script(lake)
    script.storage = open_storage(tmp_path / "long")  # type: ignore[assignment]
    script.attempt(20, every=1)
    assert "8 older" in show("inspect", tmp_path / "long")[1]
    assert "older" not in show("inspect", tmp_path / "long", "--all")[1]


def test_inspect_shows_the_best_however_old_it_is(tmp_path: Path, show: Show) -> None:
    rule = lakeckpt.Keep(last=1, best=1)
    with lakeckpt.CheckpointManager(tmp_path / "run", {"n": Counter()}, persist_every=1, keep=rule) as manager:
        manager.restore()
        for step in range(1, 21):
            manager.step(metric=abs(step - 3))
    _, told = show("inspect", tmp_path / "run")
    assert "7 older" in told
    assert [line.split()[:2] for line in told.splitlines() if line.endswith(" best")] == [["3", "3"]]


def test_inspect_of_an_endless_stream_names_the_first_epoch_that_is_not_whole(
    lake: Path, tmp_path: Path, ask: Ask
) -> None:
    script = Script(lake, endless=True, batch_size=50)
    script.storage = open_storage(tmp_path / "endless")  # type: ignore[assignment]
    script.attempt(5, every=1)
    places = [one["readers"]["reader"] for one in ask("inspect", tmp_path / "endless")[1]["checkpoints"]]
    assert [(at["epoch"], at["rows_done"]) for at in places] == [(0, 50), (0, 100), (0, 150), (1, 0), (1, 50)]


def test_inspect_lists_damage_and_leftovers(run_copy: Path, ask: Ask, show: Show) -> None:
    first = read_history(open_storage(run_copy)).chain[0].slot
    (run_copy / "log" / f"{first:010d}.lkc").write_bytes(b"nothing")
    stray = run_copy / "objects" / "0000000099" / "000000000001-000000"
    stray.mkdir(parents=True)
    (stray / "00000-0000-00.safetensors").write_bytes(b"x" * 1500)
    status, plain = ask("inspect", run_copy)
    assert status == 0 and plain["broken_at"] == first and len(plain["damage"]) == 1
    assert (plain["leftover_files"], plain["leftover_bytes"]) == (1, 1500)
    status, told = show("inspect", run_copy)
    assert "the history is broken" in told and "1 file (1.5 kB) of uncommitted saves" in told


# --- verify


def test_verify_finds_a_whole_run_intact(good_run: Script, lake: Path, ask: Ask, show: Show) -> None:
    status, plain = ask("verify", lake.parent / "good")
    assert status == 0 and plain["intact"] and plain["damage"] == []
    statuses = [one["status"] for one in plain["checkpoints"]]
    assert statuses.count("intact") == 3 and set(statuses) == {"intact", "removed"}
    status, told = show("verify", lake.parent / "good")
    assert status == 0 and "INTACT" in told and "removed by retention" in told


@pytest.mark.parametrize("how", ["first", "middle", "last", "cut", "longer", "empty", "gone"])
def test_verify_names_every_file_that_is_not_as_it_was_written(
    run_copy: Path, tmp_path: Path, how: str, ask: Ask
) -> None:
    files = [path for path in sorted(run_copy.rglob("*")) if path.is_file()]
    assert {path.relative_to(run_copy).parts[0] for path in files} == {"log", "index", "parts", "objects"}
    newest = [path for path in files if path.parent.name == "log"][-1]  # a log without it is whole, and shorter
    for path in files:
        data = path.read_bytes()
        at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}.get(how)
        if at is not None:
            path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        elif how == "gone":
            path.unlink()
        else:
            path.write_bytes({"cut": data[:-1], "longer": data + b"\0", "empty": b""}[how])
        status, plain = ask("verify", run_copy)
        name = path.relative_to(run_copy).as_posix()
        if how != "gone" or path != newest:
            assert status == 1 and name in {one["path"] for one in plain["damage"]}, name
        path.write_bytes(data)
    assert ask("verify", run_copy)[0] == 0


def test_verify_wants_the_checkpoints_to_be_there_that_the_rule_keeps(run_copy: Path, ask: Ask, show: Show) -> None:
    status, told = show("verify", run_copy)
    assert status == 0
    kept = [one for one in ask("verify", run_copy)[1]["checkpoints"] if one["status"] == "intact"]
    tip = read_history(open_storage(run_copy)).tip
    assert tip is not None
    for folder in ("parts", "objects"):
        shutil.rmtree(run_copy / folder / tip.save.folder)
    status, told = show("verify", run_copy)
    assert status == 1 and f"the newest intact checkpoint: step {kept[-2]['step']} (slot" in told
    for folder in ("parts", "objects"):
        shutil.rmtree(run_copy / folder)
    status, plain = ask("verify", run_copy)
    found = [one["slot"] for one in plain["checkpoints"] if one["status"] == "damaged"]
    assert status == 1 and found == [one["slot"] for one in kept] and len(kept) == 3
    status, told = show("verify", run_copy)
    assert status == 1 and "DAMAGED" in told and "the object is missing" in told and "restore() refuses" in told


def test_verify_says_what_a_lost_end_of_the_log_looks_like(run_copy: Path, ask: Ask, show: Show) -> None:
    tip = read_history(open_storage(run_copy)).tip
    assert tip is not None
    entry = run_copy / "log" / f"{tip.slot:010d}.lkc"
    entry.write_bytes(entry.read_bytes()[:-1])
    status, told = show("verify", run_copy)
    assert status == 1 and "1 object of the run" in told and "before the next save" in told
    assert "of checkpoints whose entries in the log are damaged" in told
    entry.unlink()
    status, plain = ask("verify", run_copy)
    assert status == 1, "what it had leave to remove is missed"
    assert plain["leftover_step"] == tip.step and plain["leftover_files"]
    status, told = show("verify", run_copy)
    assert f"They reach to step {tip.step}, after the newest checkpoint" in told


def test_verify_wants_the_index_of_the_table_that_was_read(run_copy: Path, tmp_path: Path, ask: Ask) -> None:
    (index,) = (run_copy / "index").iterdir()
    index.write_bytes(lakeckpt.open_table(str(write_table(tmp_path / "other", files=[(200,)]))).index.dumps())
    status, plain = ask("verify", run_copy)
    assert status == 1 and [one["path"] for one in plain["damage"]] == [f"index/{index.name}"]


def test_commands_change_nothing(run_copy: Path, show: Show) -> None:
    def contents() -> dict[str, bytes]:
        return {path.as_posix(): path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}

    before = contents()
    for command in (["audit"], ["verify"], ["inspect"], ["explain", "--step", "2"]):
        show(command[0], run_copy, *command[1:])
    assert contents() == before


def test_brackets_in_names_are_shown_as_they_are(lake: Path, tmp_path: Path, show: Show) -> None:
    place = tmp_path / "a[red]b"
    script = Script(lake)
    script.storage = open_storage(place)  # type: ignore[assignment]
    script.attempt(4)
    for command in (["audit"], ["verify"], ["inspect"]):
        assert "a[red]b" in show(command[0], place, *command[1:])[1].replace("\n", "")
