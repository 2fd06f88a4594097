"""Random reader states that a job could have reached: made by `replan`, and by hand where sizes matter."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from lakeckpt.core.changes import replan, start
from lakeckpt.core.identity import Identity
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State

DIGEST = "0123456789abcdef" * 4


def identity_of(
    rows: int,
    tail: str = "short",
    *,
    endless: bool = False,
    seed: int = 7,
    table: str = DIGEST,
    version: str = "",
) -> Identity:
    spec = OrderSpec(seed=seed, shuffle=True, window=4)
    return Identity(
        table=table,
        selection="",
        rows=rows,
        spec=spec,
        tail=tail,  # type: ignore[arg-type]
        endless=endless,
        version=version,
    )


topologies = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
"""(world size, lanes per rank, batch size)"""


@st.composite
def reached_states(draw: st.DrawFn, *, most_rows: int = 400) -> State:
    """A state that some job reached, over any number of changes of its topology."""
    endless = draw(st.booleans())
    tail = "short" if endless else draw(st.sampled_from(["short", "drop"]))
    identity = identity_of(
        draw(st.integers(int(endless), most_rows)),
        tail,
        endless=endless,
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        table=draw(st.sampled_from([DIGEST, "", "not hex", "0F"])),
        version=draw(st.sampled_from(["", "Delta version 12"])),
    )
    world_size, lanes, batch_size = draw(topologies)
    epoch = 0 if endless else draw(st.integers(0, 3))
    state = start(identity, epoch=epoch, num_lanes=world_size * lanes, batch_size=batch_size, world_size=world_size)
    for world_size, lanes, batch_size in draw(st.lists(topologies, max_size=6)):
        state = replan(
            _advanced(draw, state), num_lanes=world_size * lanes, batch_size=batch_size, world_size=world_size
        )
    return _advanced(draw, state)


def _advanced(draw: st.DrawFn, state: State) -> State:
    steps = Plan(state).steps
    step = state.step + draw(st.integers(0, 9))
    return replace(state, step=max(state.step, step if steps is None else min(step, steps)))
