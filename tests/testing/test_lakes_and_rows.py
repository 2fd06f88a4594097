"""The tables that tests read are what their specs say, and rows of batches are told as the table's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt import LakeDataset, LakeLoader, Ragged, ReadOptions, Receipt
from lakeckpt.core.receipts import Span
from lakeckpt.errors import ConfigError
from lakeckpt.testing.observed import Observed, Violation, positions_of
from lakeckpt.testing.row_keys import RowKeys, canonical
from tests.lakes import COLUMNS, LakeSpec, tables


@given(spec=tables(nulls=True, max_columns=5))
def test_files_hold_the_row_groups_and_rows_that_the_spec_says(
    tmp_path_factory: pytest.TempPathFactory, spec: LakeSpec
) -> None:
    folder = spec.write(tmp_path_factory.mktemp("lake"))
    files = [pq.ParquetFile(path) for path in sorted(folder.iterdir())]
    found = [tuple(f.metadata.row_group(g).num_rows for g in range(f.num_row_groups)) for f in files]
    assert [tuple(n for n in groups if n) for groups in found] == [
        tuple(n for n in groups if n) for groups in spec.files
    ]
    rows = pa.concat_tables([f.read() for f in files])
    assert rows.column("id").to_pylist() == list(range(spec.rows))
    assert rows.schema.equals(spec.schema)
    assert eval(repr(spec), {"LakeSpec": LakeSpec}) == spec


def test_every_kind_of_column_comes_from_loaders_as_it_is_in_the_table(tmp_path: Path) -> None:
    spec = LakeSpec(files=((9, 4), (6,)), columns=COLUMNS, null_every=4)
    folder = spec.write(tmp_path / "lake")
    for output in ("torch", "numpy", "arrow"):
        for batch_size in (4, None):
            dataset = LakeDataset(folder, batch_size=batch_size, output=output, options=ReadOptions(nulls="mask"))  # type: ignore[arg-type]
            keys = RowKeys(dataset, None, single=batch_size is None)
            expected = [key for group in keys.of_table() for key in group]
            found = [key for item in LakeLoader(dataset) for key in keys.of_item(item)]
            assert found == expected, (output, batch_size)
            assert len(Counter(found)) == spec.rows
            by_id = RowKeys(dataset, "id", single=batch_size is None)
            assert [key for group in by_id.of_table() for key in group] == list(range(spec.rows))


@pytest.mark.parametrize(
    "wrong", [{"columns": ("id",)}, {"columns": ("int8", "int8")}, {"files": ()}, {"files": ((-1,),)}]
)
def test_a_spec_that_cannot_be_written_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LakeSpec(**wrong)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (-0.0, 0.0),
        (torch.tensor([[1, 2]]), ((1, 2),)),
        (np.array([1.5]), (1.5,)),
        (Ragged(values=np.arange(3), offsets=np.array([0, 1, 3])), ((0,), (1, 2))),
        ({"a": [1], "b": None}, ("a", (1,), "b", None)),
        (torch.nested.nested_tensor([torch.arange(2), torch.arange(1)], layout=torch.jagged), ((0, 1), (0,))),
        (b"x", b"x"),
    ],
)
def test_values_become_hashable_and_equal_where_contents_are(value: Any, expected: Any) -> None:
    assert canonical(value) == expected
    hash(canonical(value))


def receipt(*spans: tuple[int, int, int]) -> Receipt:
    made = tuple(Span(epoch=e, start=a, stop=b) for e, a, b in spans)
    rows = sum(span.rows for span in made)
    return Receipt(epoch=0, micro_batch=0, lane=0, step=0, rank=0, world_size=1, spans=made, step_rows=rows)


def test_positions_of_receipts_are_those_of_their_rows() -> None:
    whole = receipt((0, 4, 6), (1, 0, 3))
    assert {epoch: found.pairs() for epoch, found in positions_of(whole).items()} == {0: [(4, 6)], 1: [(0, 3)]}


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)), st.integers(0, 5))
def test_an_account_passes_just_where_rows_are_the_expected_ones(seen: list[int], table: list[int], miss: int) -> None:
    observed = Observed()
    observed.add(3, seen)
    more, less = Counter(seen) - Counter(table), Counter(table) - Counter(seen)
    if more or less.total() > miss:
        with pytest.raises(Violation, match="epoch 3"):
            observed.check(3, Counter(table), may_miss=miss)
    else:
        observed.check(3, Counter(table), may_miss=miss)


def test_a_copy_of_an_account_goes_on_apart() -> None:
    observed = Observed()
    observed.add(0, ["a"])
    observed.add_positions(receipt((0, 0, 2)))
    other = observed.copy()
    other.add(0, ["b"])
    other.add_positions(receipt((0, 2, 3)))
    assert observed.rows == {0: Counter("a")} and observed.positions[0].pairs() == [(0, 2)]
    with pytest.raises(Violation, match="consumed before"):
        observed.add_positions(receipt((0, 1, 3)))
