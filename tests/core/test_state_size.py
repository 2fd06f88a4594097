"""A reader state stays small, whatever the size of the table: 1 KiB for 32 segments, 16 bytes for each interval."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from lakeckpt.core.changes import MAX_SEGMENTS, replan, start
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest
from lakeckpt.core.state import Segment, State
from lakeckpt.wire.envelope import dumps, loads
from tests.core.states import identity_of

TERA = 10**12


def written(state: State) -> bytes:
    data = dumps(state.to_plain(), kind="state", version=(1, 0))
    assert State.from_plain(loads(data, kind="state", supported=(1, 0))) == state
    return data


def test_thirty_two_segments_of_a_job_of_16384_ranks_take_at_most_a_kibibyte() -> None:
    choose = random.Random(5)
    ranks = 2**14
    segments = [Segment(micro_batch=0, step=0, num_lanes=2 * ranks, batch_size=4096, world_size=ranks)]
    for _ in range(MAX_SEGMENTS - 1):
        before = segments[-1]
        step = before.step + choose.randrange(2**10)
        micro_batch = before.micro_batch + (step - before.step) * before.world_size
        lanes = choose.randrange(2**8, ranks)
        segments.append(Segment(micro_batch=micro_batch, step=step, num_lanes=lanes, batch_size=4096, world_size=lanes))
    identity = replace(identity_of(40 * TERA, seed=2**64 - 1), selection="9" * 64, version="v" * 20)
    state = State(orders=(identity,), epoch=10**6, segments=tuple(segments), step=segments[-1].step + 2**10)
    assert len(segments) == 32 and len(written(state)) <= 1024, len(written(state))


def test_every_state_that_a_long_job_reaches_takes_at_most_a_kibibyte_and_sixteen_bytes_an_interval() -> None:
    choose = random.Random(11)
    for endless, rows in itertools.product((False, True), (10**6, TERA)):
        state = start(identity_of(rows, endless=endless), epoch=0, num_lanes=96, batch_size=512, world_size=8)
        for turn in range(60):
            state = replace(state, step=state.step + choose.randrange(1, 12 if rows == 10**6 else 10**5))
            world_size, lanes = choose.choice([4, 6, 7, 8, 24]), choose.choice([8, 24, 40, 96, 168])
            if choose.random() < 0.7 and state.segment.num_lanes % world_size == 0:
                lanes = state.segment.num_lanes  # the lanes stay: the deal goes on, one more segment
            lanes += -lanes % world_size
            state = replan(state, num_lanes=lanes, batch_size=512, world_size=world_size)
            left = [] if state.base is None else state.base.begun
            size = len(written(state))
            assert size <= 1024 + 16 * sum(len(one.positions) for one in left), (turn, size, left)


def test_ten_thousand_scattered_intervals_take_at_most_sixteen_bytes_each() -> None:
    far = 10 * TERA // 10**4
    positions = Intervals.of([(n * far, n * far + far // 2) for n in range(10**4)])
    left = Left(epoch=3, positions=positions, num_lanes=12, rotation=5)
    segment = Segment(micro_batch=2**40, step=2**38, num_lanes=12, batch_size=4, world_size=4)
    rest = Rest(begun=(left,), next_epoch=4)
    state = State(orders=(identity_of(10 * TERA),), epoch=3, segments=(segment,), step=2**38 + 7, bases=(rest,))
    assert len(written(state)) <= 1024 + 16 * 10**4
