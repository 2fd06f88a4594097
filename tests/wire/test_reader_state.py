"""Reader states on the wire: exact, small, checked when read, and readable for ever."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import MAX_SEGMENTS, Plan, replan, start
from lakeckpt.core.rest import Left, Rest
from lakeckpt.core.state import MAX_VERSION, ReaderState, Segment
from lakeckpt.errors import NewerFormat, WireDamaged, WireError
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.reader_state import KIND, VERSION, dumps_state, loads_state
from lakeckpt.wire.varint import pack_numbers
from tests.core.states import identity_of, reached_states
from tests.golden.reader_state.states import FOLDER, GOLDEN, path_of

PETA = 10**15
_WHOLE = loads(dumps_state(GOLDEN["fresh"]), kind=KIND, supported=VERSION).value


@given(reached_states())
def test_states_come_back_equal_and_equal_states_are_equal_bytes(state: ReaderState) -> None:
    data = dumps_state(state)
    assert loads_state(data) == state and loads_state(data).identity.version == state.identity.version
    assert dumps_state(ReaderState.from_plain(state.to_plain())) == data


@pytest.mark.parametrize("micro_batch", [0, 1, 10, 11, 12, 13, 14, 100])
def test_a_segment_may_begin_before_or_after_the_micro_batch_that_full_steps_come_to(micro_batch: int) -> None:
    before = Segment(micro_batch=0, step=0, num_lanes=4, batch_size=2, world_size=4)
    after = replace(before, micro_batch=micro_batch, step=3, world_size=2)
    state = ReaderState(identity=identity_of(500), epoch=0, segments=(before, after), step=4)
    assert loads_state(dumps_state(state)) == state


def test_thirty_two_segments_of_a_huge_job_take_at_most_a_kibibyte() -> None:
    random.seed(5)
    first = Segment(micro_batch=0, step=0, num_lanes=2**18, batch_size=2**20, world_size=2**17)
    segments = [first]
    for _ in range(MAX_SEGMENTS - 1):
        before = segments[-1]
        step = before.step + random.randrange(2**14)
        micro_batch = before.micro_batch + (step - before.step) * before.world_size
        lanes = random.randrange(2**10, 2**18)
        segments.append(
            Segment(micro_batch=micro_batch, step=step, num_lanes=lanes, batch_size=2**20 - 1, world_size=lanes)
        )
    identity = replace(identity_of(40 * PETA, seed=2**64 - 1), selection="9" * 64, version="v" * MAX_VERSION)
    state = ReaderState(identity=identity, epoch=10**6, segments=tuple(segments), step=segments[-1].step + 2**10)
    data = dumps_state(state)
    assert len(segments) == 32 and loads_state(data) == state
    assert len(data) <= 1024, len(data)


def test_every_state_that_a_long_job_reaches_takes_at_most_a_kibibyte_and_sixteen_bytes_an_interval() -> None:
    choose = random.Random(11)
    for endless, rows in itertools.product((False, True), (10**6, PETA)):
        state = start(identity_of(rows, endless=endless), epoch=0, num_lanes=96, batch_size=512, world_size=8)
        for turn in range(60):
            state = replace(state, step=state.step + choose.randrange(1, 12 if rows == 10**6 else 10**5))
            world_size, lanes = choose.choice([4, 6, 7, 8, 24]), choose.choice([8, 24, 40, 96, 168])
            if choose.random() < 0.7 and state.segment.num_lanes % world_size == 0:
                lanes = state.segment.num_lanes  # the lanes stay: the deal goes on, one more segment
            lanes += -lanes % world_size
            state = replan(state, num_lanes=lanes, batch_size=512, world_size=world_size)
            left = [] if state.base is None else state.base.begun
            size = len(dumps_state(state))
            assert size <= 1024 + 16 * sum(len(one.positions) for one in left), (turn, size, left)
            assert loads_state(dumps_state(state)) == state


def test_ten_thousand_scattered_intervals_take_at_most_sixteen_bytes_each() -> None:
    far = 2**55 // 10**4
    positions = Intervals.of([(n * far, n * far + far // 2) for n in range(10**4)])
    left = Left(epoch=3, positions=positions, num_lanes=12, rotation=5)
    segment = Segment(micro_batch=2**40, step=2**38, num_lanes=12, batch_size=4, world_size=4)
    state = ReaderState(
        identity=identity_of(2**56),
        epoch=3,
        segments=(segment,),
        step=2**38 + 7,
        base=Rest(begun=(left,), next_epoch=4),
    )
    data = dumps_state(state)
    assert len(data) <= 1024 + 16 * 10**4
    assert loads_state(data) == state


@given(reached_states(), st.data())
def test_any_other_numbers_are_another_state_or_refused(state: ReaderState, data: st.DataObject) -> None:
    table, selection, seed, numbers, *version = _payload(state)
    changed = bytearray(numbers)
    at = data.draw(st.integers(0, len(changed) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if kind == "flip":
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del changed[at:]
    else:
        changed.insert(at, data.draw(st.integers(0, 255)))
    minor = len(version)
    crafted = dumps([table, selection, seed, bytes(changed), *version], kind=KIND, version=(1, minor))
    try:
        found = loads_state(crafted)
    except WireDamaged:
        return
    assert dumps_state(found) == crafted
    Plan(found)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        ["", "", 0],
        [1, "", 0, b""],
        ["", "", "0", b""],
        ["", "", 0, "text"],
        ["", "", 0, b""],
        ["", "", 2**70, b"\x00"],
        [["deep"], "", 0, b"\x00\x00"],
        [*_WHOLE, 7],
        [*_WHOLE, "v" * (MAX_VERSION + 1)],
    ],
)
def test_documents_that_hold_no_state_are_refused(value: object) -> None:
    with pytest.raises(WireDamaged):
        loads_state(dumps(value, kind=KIND, version=VERSION))


@pytest.mark.parametrize("second", [(0, 5), (2, 0)])
def test_intervals_that_touch_or_are_empty_are_refused(second: tuple[int, int]) -> None:
    table, selection, seed, numbers = _payload(GOLDEN["re-cut"])
    assert isinstance(numbers, bytes)
    last = pack_numbers([5, 4, 2**39 - 9, 1])
    assert numbers.endswith(last)
    crafted = numbers.removesuffix(last) + pack_numbers([5, 4, *second])
    with pytest.raises(WireDamaged, match="empty or touch"):
        loads_state(dumps([table, selection, seed, crafted], kind=KIND, version=VERSION))


def test_every_bit_of_a_document_is_guarded() -> None:
    data = dumps_state(GOLDEN["re-cut"])
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            loads_state(bytes(changed))
    for size in range(len(data)):
        with pytest.raises(WireError):
            loads_state(data[:size])


def test_newer_minor_versions_read_and_newer_major_versions_are_refused() -> None:
    state = GOLDEN["fresh"]
    with_more = [*_payload(state), "Delta version 3", "a field of the future"]
    assert loads_state(dumps(with_more, kind=KIND, version=(1, 9))) == state
    with pytest.raises(NewerFormat, match="upgrade lakeckpt"):
        loads_state(dumps(with_more, kind=KIND, version=(2, 0)))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_states_read_as_the_states_they_were_written_from(name: str) -> None:
    assert loads_state(path_of(name).read_bytes()) == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_state_is_still_written_as_the_same_bytes(name: str) -> None:
    assert dumps_state(GOLDEN[name]) == path_of(name).read_bytes()


def test_every_golden_state_is_read_by_some_test() -> None:
    assert {path.name for path in FOLDER.glob("*.lkc")} == {path_of(name).name for name in GOLDEN}


def _payload(state: ReaderState) -> list[object]:
    value = loads(dumps_state(state), kind=KIND, supported=VERSION).value
    assert isinstance(value, list)
    return value
