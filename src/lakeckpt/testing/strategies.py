"""This module draws topologies and histories of jobs, for properties of Hypothesis.

The values are small and shrink well: `Topology`, and lists of `Attempt` for `lakeckpt.testing.replay`.
"""

from __future__ import annotations

from hypothesis import strategies as st

from lakeckpt.testing.attempts import Attempt, Topology

__all__ = ["histories", "topologies"]


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
