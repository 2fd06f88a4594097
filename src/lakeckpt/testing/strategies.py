"""Hypothesis strategies: tables to read, and histories of jobs that read them.

They draw small values that shrink well: `LakeSpec` (written by its ``write``), `Topology` and lists of `Attempt`.
"""

from __future__ import annotations

from hypothesis import strategies as st

from lakeckpt.testing.attempts import Attempt, Topology
from lakeckpt.testing.lakes import COLUMNS, LakeSpec

__all__ = ["histories", "tables", "topologies"]


@st.composite
def tables(
    draw: st.DrawFn,
    *,
    max_files: int = 3,
    max_row_groups: int = 4,
    max_group_rows: int = 12,
    columns: tuple[str, ...] = COLUMNS,
    max_columns: int = 3,
    nulls: bool = False,
) -> LakeSpec:
    """Tables of up to ``max_files`` files of up to ``max_row_groups`` row groups of up to ``max_group_rows`` rows each.

    Row groups and files may be empty. ``columns``: the kinds to choose from; ``nulls``: whether some may be null.
    """
    group = st.integers(0, max_group_rows)
    files = draw(st.lists(st.lists(group, max_size=max_row_groups).map(tuple), min_size=1, max_size=max_files))
    chosen = draw(st.lists(st.sampled_from(columns), max_size=max_columns, unique=True)) if columns else []
    null_every = draw(st.sampled_from([0, 2, 3, 7])) if nulls else 0
    return LakeSpec(files=tuple(files), columns=tuple(chosen), null_every=null_every)


@st.composite
def topologies(
    draw: st.DrawFn,
    *,
    max_world_size: int = 4,
    max_workers: int = 0,
    max_batch_size: int | None = None,
    max_lanes: int | None = None,
) -> Topology:
    """Topologies; with ``max_batch_size`` or ``max_lanes``, also the options ``batch_size`` and ``num_lanes``."""
    options: dict[str, int | None] = {}
    if max_batch_size is not None:
        options["batch_size"] = draw(st.integers(1, max_batch_size))
    if max_lanes is not None:
        options["num_lanes"] = draw(st.none() | st.integers(1, max_lanes))
    return Topology(
        world_size=draw(st.integers(1, max_world_size)), num_workers=draw(st.integers(0, max_workers)), options=options
    )


@st.composite
def histories(
    draw: st.DrawFn,
    topology: st.SearchStrategy[Topology] | None = None,
    *,
    max_attempts: int = 5,
    max_steps: int = 12,
) -> list[Attempt]:
    """Histories: consume, checkpoint, crash, go on with another topology; for `lakeckpt.testing.replay`."""
    shape = topologies() if topology is None else topology
    attempt = st.builds(
        Attempt,
        topology=shape,
        steps=st.one_of(st.integers(0, max_steps), st.integers(0, max_steps), st.none()),
        lost=st.integers(0, 3),
    )
    return draw(st.lists(attempt, min_size=1, max_size=max_attempts))
