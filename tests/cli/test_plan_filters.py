"""``plan --filters`` tells the epoch that a filtered loader reads, and what of it is spared."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakeckpt
from lakeckpt.cli.plan.columns import column_bytes
from lakeckpt.cli.plan.filters import filter_of_json
from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.reading.filters.row_filter import row_filter
from tests.data.reading import dataset_of

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]

FILTER = '[[["id", "<", 45], ["id", ">=", 20]], [["id", ">=", 90]]]'
"""Of row groups of 30, 30, 40, 25, 0, 1 and 74 rows: 10, 15, 10, and the last ones whole."""


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_steps_and_rows_are_those_of_a_filtered_loader(lake: Path, ask: Ask, tail: str) -> None:
    status, plain = ask("plan", lake, "--filters", FILTER, "--world-size", 2, "--batch-size", 7, "--tail", tail)
    kept = [[(name, how, value) for name, how, value in group] for group in json.loads(FILTER)]
    options: dict[str, Any] = {"batch_size": 7, "filters": kept, "world_size": 2, "tail": tail}
    loaders = [lakeckpt.LakeLoader(dataset_of(str(lake), rank=rank, **options)) for rank in range(2)]
    batches = [list(one) for one in loaders]
    assert status == 0 and plain["rows"] == 135
    assert {len(one) for one in batches} == {plain["steps"]}
    assert plain["dropped_rows"] == 135 - sum(len(batch["id"]) for one in batches for batch in one)
    found = (plain["empty_row_groups"], plain["whole_row_groups"], plain["counted_row_groups"])
    assert found == (0, 3, 3) and "id < 45" in plain["filter"]


def test_bytes_are_of_the_columns_and_of_the_filters_columns(lake: Path, ask: Ask) -> None:
    both = column_bytes(lakeckpt.open_table(str(lake)), ["text", "id"])
    _, plain = ask("plan", lake, "--columns", "text", "--filters", '[["id", ">=", 125], ["id", "<", 150]]')
    assert (plain["rows"], plain["empty_row_groups"], plain["counted_row_groups"]) == (25, 4, 1)
    assert plain["stored_bytes"] == both.stored[5] + both.stored[6]
    share = both.decoded[5] + both.decoded[6] * 24 / 74
    assert abs(plain["decoded_bytes"] - share) <= 1


def test_people_are_told_what_the_filter_spares(lake: Path, show: Show) -> None:
    status, text = show("plan", lake, "--filters", '[["id", "in", [3, 150]]]')
    said = " ".join(text.split())
    assert status == 0 and "is_in(id, {value_set=int64:[ 3, 150 ]" in said
    assert "keeps no row of 4 row groups and every row of 0; 2 were decoded to count" in said
    _, text = show("plan", lake, "--filters", '[["id", "<", 0]]')
    assert "no row is read" in text


def test_times_and_decimals_are_read_from_text(tmp_path: Path) -> None:
    table = pa.table(
        {
            "day": [datetime.date(2024, 1, 2)],
            "at": pa.array([datetime.datetime(2024, 1, 2)], pa.timestamp("us", "UTC")),
            "price": [decimal.Decimal("1.50")],
            "name": ["2024-01-02"],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    schema = lakeckpt.open_table(tmp_path).schema
    given = (
        '[["day", ">=", "2024-01-02"], ["at", "<", "2024-01-02T01:00:00Z"], ["price", "in", ["1.50"]], '
        '["name", "==", "2024-01-02"]]'
    )
    wanted = [
        ("day", ">=", datetime.date(2024, 1, 2)),
        ("at", "<", datetime.datetime(2024, 1, 2, 1, tzinfo=datetime.UTC)),
        ("price", "in", [decimal.Decimal("1.50")]),
        ("name", "==", "2024-01-02"),
    ]
    assert filter_of_json(given, schema) == row_filter(wanted, schema)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("id < 3", ConfigError, "must be JSON"),
        ('{"id": 3}', ConfigError, "JSON list"),
        ('[["nope", "<", 3]]', SchemaError, "nope"),
        ('[["id", "<", "x"]]', SchemaError, "int64"),
        ('[["day", "<", "x"]]', ConfigError, "cannot be read as date32"),
        ("[]", ConfigError, "leave filters out"),
    ],
)
def test_what_is_no_filter_is_refused(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        filter_of_json(text, pa.schema([("id", pa.int64()), ("day", pa.date32())]))
