"""lakeckpt explore writes a page of a run: what it shows is what the other commands print, and its size is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from tests.checkpoint.rig import Counter
from tests.checkpoint.scripts import Script, write_table

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]


def facts_in(page: Path) -> dict[str, Any]:
    """What the page holds, as its script reads it."""
    text = page.read_text("utf-8")
    data = text.partition('id="data">')[2].partition("</script>")[0]
    return json.loads(data)


def test_the_page_holds_what_the_other_commands_print(
    good_run: Script, lake: Path, ask: Ask, show: Show, tmp_path: Path
) -> None:
    run, page = lake.parent / "good", tmp_path / "run.html"
    status, printed = show("explore", run, "-o", page)
    facts = facts_in(page)
    assert status == 0 and printed.startswith(f"{page}  ") and "with the rows of 44 steps" in printed
    _, audit = ask("audit", run)
    _, inspected = ask("inspect", run, "--all")
    _, explained = ask("explain", run, "--step", 15)
    assert facts["audit"] == audit
    assert {name: facts[name] for name in inspected} == inspected
    assert facts["steps"]["15"] == explained
    assert facts == ask("explore", run)[1]
    for epoch in audit["readers"][0]["epochs"]:
        strip = next(one for one in facts["epochs"]["reader"] if one["epoch"] == epoch["epoch"])
        assert (strip["rows"], strip["done"]) == (epoch["rows"], epoch["once"])
        cells = sum(length for _, length in strip["cells"])
        done = sum(length for attempt, length in strip["cells"] if attempt >= 0)
        assert abs(done / cells - epoch["once"] / epoch["rows"]) < 0.1
    used = {attempt for strip in facts["epochs"]["reader"] for attempt, _ in strip["cells"]} - {-1}
    assert used == {one["attempt"] for one in inspected["checkpoints"] if one["in_history"]}


def test_restarts_say_what_they_cost(good_run: Script, lake: Path, ask: Ask) -> None:
    _, facts = ask("explore", lake.parent / "good")
    steps = {one["slot"]: one["step"] for one in facts["checkpoints"]}
    restored = [one for one in facts["attempts"] if one["restored_slot"] is not None]
    assert [one["attempt"] for one in facts["restarts"]] == [one["attempt"] for one in restored] != []
    assert [one["step"] for one in facts["restarts"]] == [steps[one["restored_slot"]] for one in restored]
    again = [one["steps_again"] for one in facts["restarts"]]
    assert again[-1] > 0 and again[:-1] == [0] * (len(again) - 1)  # the newest checkpoint was damaged by hand
    assert all(one["seconds"] >= 0 and not one["from_memory"] for one in facts["restarts"])


def test_rows_are_named_of_the_last_steps_only(good_run: Script, lake: Path, ask: Ask, show: Show) -> None:
    run = lake.parent / "good"
    _, facts = ask("explore", run, "--steps", 3)
    assert list(facts["steps"]) == ["44", "43", "42"] and "the last 3 steps (--steps)" in facts["steps_end"]
    assert ask("explore", run, "--steps", 0)[1]["steps"] == {}
    status, printed = show("explore", run, "--steps", -1)
    assert status == 2 and "0 or more, got -1" in printed
    status, printed = show("explore", run.parent / "nowhere")
    assert status == 2 and "no run" in printed


def test_no_text_of_a_run_can_end_the_element_that_holds_it(tmp_path: Path, show: Show) -> None:
    lake = write_table(tmp_path / "lake")
    (lake / "part-0.parquet").rename(lake / "part-<!--<script>.parquet")
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(lake, batch_size=50, columns=["id"]))
    with lakeckpt.CheckpointManager(tmp_path / "run", {"<script>": loader, "count": Counter()}) as manager:
        manager.restore()
        for batch in loader:
            manager.step(batch)
    assert show("explore", tmp_path / "run", "-o", tmp_path / "run.html")[0] == 0
    assert (tmp_path / "run.html").read_text("utf-8").count("<script") == 2
    facts = facts_in(tmp_path / "run.html")
    assert list(facts["epochs"]) == ["<script>"]
    assert "part-<!--<script>.parquet" in json.dumps(facts["steps"])


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path, show: Show) -> None:
    status, said = show("explore", tmp_path, "-o", tmp_path / "no" / "run.html")
    assert status == 2 and "--output is a file in a folder that exists" in said and "Traceback" not in said


def test_a_run_without_readers_has_a_page_too(tmp_path: Path, ask: Ask) -> None:
    with lakeckpt.CheckpointManager(tmp_path / "run", {"count": Counter()}) as manager:
        manager.restore()
        manager.step()
    _, facts = ask("explore", tmp_path / "run")
    assert facts["epochs"] == {} and facts["steps"] == {} and "no reader was tracked" in facts["steps_end"]


def test_a_strip_names_who_consumed_most_of_each_cell() -> None:
    from lakeckpt.cli.explore.facts import _Strip
    from lakeckpt.core.intervals import Intervals

    strip = _Strip(1000)
    strip.add(Intervals.of([(0, 250), (500, 510)]), 3)
    strip.add(Intervals.of([(250, 500)]), 7)
    plain = strip.to_plain()
    assert plain["done"] == 510 and sum(length for _, length in plain["cells"]) == 240
    assert [attempt for attempt, _ in plain["cells"]] == [3, 7, 3, -1]
    assert [length for _, length in plain["cells"]] == [60, 60, 3, 117]


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_small_epoch_has_as_many_cells_as_rows(rows: int) -> None:
    from lakeckpt.cli.explore.facts import _Strip

    assert _Strip(rows).to_plain() == {"rows": rows, "done": 0, "cells": [[-1, max(rows, 1)]]}
