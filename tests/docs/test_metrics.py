"""The page of the metrics lists those that exist, and the dashboard asks for no others."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from lakeckpt.metrics import METRICS

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGE, DASHBOARD = HOW_TO / "metrics.md", HOW_TO / "metrics-dashboard.json"
LABELS = {one.name: {*one.labels, "rank"} for one in METRICS}
NAME = re.compile(r"\blakeckpt_\w+")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def wrong_in(expression: str) -> list[str]:
    """What an expression asks for that does not exist: metrics, or labels to group and select by."""
    names = NAME.findall(expression)
    wrong = [name for name in names if name not in LABELS]
    known = set.intersection(*(LABELS.get(name, set()) for name in names)) if names else set()
    grouped = [label.strip() for found in re.findall(r"\bby \(([^)]*)\)", expression) for label in found.split(",")]
    selected = re.findall(r"[{,]\s*(\w+)\s*[=!]", expression)
    return wrong + [label for label in (*grouped, *selected) if label not in known]


def test_the_page_has_a_row_for_each_metric_as_the_code_has_it() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `lakeckpt_")]
    assert rows == [
        f"| `{one.name}` | {', '.join(f'`{label}`' for label in one.labels)} | {one.about} |" for one in METRICS
    ]


def test_the_page_and_the_dashboard_ask_for_metrics_and_labels_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    asked = [line for line in page.splitlines() if "rate(" in line or line.lstrip().startswith("expr:")]
    assert len(asked) >= 4
    assert [one for line in asked for one in wrong_in(line)] == []
    assert [(one, wrong_in(one)) for one in expressions() if wrong_in(one)] == []
    assert {name for one in expressions() for name in NAME.findall(one)} == set(LABELS)


def test_an_expression_of_a_metric_or_a_label_that_does_not_exist_is_noticed() -> None:
    assert wrong_in("sum by (reader) (rate(lakeckpt_rows_total[1m]))") == []
    assert wrong_in("rate(lakeckpt_lines_total[1m])") == ["lakeckpt_lines_total"]
    assert wrong_in("sum by (run) (lakeckpt_epochs)") == ["run"]
    assert wrong_in('lakeckpt_step{job="x"}') == ["job"]


def test_panels_have_places_and_legends_of_their_own() -> None:
    places = [{(x, y) for x, y in itertools.product(*map(_span, _sides(panel)))} for panel in panels()]
    assert sum(map(len, places)) == len(set.union(*places))
    assert len({panel["id"] for panel in panels()}) == len({panel["title"] for panel in panels()}) == len(panels())
    for panel in panels():
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            names = NAME.findall(target["expr"])
            assert labels and all(labels <= LABELS[name] for name in names)


def _sides(panel: dict[str, Any]) -> list[tuple[int, int]]:
    place = panel["gridPos"]
    return [(place["x"], place["w"]), (place["y"], place["h"])]


def _span(side: tuple[int, int]) -> range:
    return range(side[0], sum(side))
