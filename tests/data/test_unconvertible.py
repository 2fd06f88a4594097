"""A column that cannot become tensors is refused when the dataset is made, not hours into a run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakeckpt
from lakeckpt.errors import ConfigError, SchemaError


def test_a_mask_that_would_hide_a_column_is_refused_at_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "x.is_null": [2]}), tmp_path / "t.parquet")
    with pytest.raises((SchemaError, ConfigError), match="is_null"):
        lakeckpt.LakeDataset(tmp_path, batch_size=1, options=lakeckpt.ReadOptions(nulls="mask"))
    assert (
        len(lakeckpt.LakeDataset(tmp_path, batch_size=1, options=lakeckpt.ReadOptions(nulls="mask"), output="arrow"))
        == 1
    )
