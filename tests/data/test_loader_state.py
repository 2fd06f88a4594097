"""The state of a loader: of what the loop received, at any moment and as of any receipt; what checkpoints ask."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import Batch, LakeDataset, LakeLoader, Receipt
from lakeckpt.core.consumption import consumption
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.state import State
from lakeckpt.errors import StateError, StateUnavailable
from lakeckpt.testing.observed import positions_of
from tests.data.reading import ROWS, as_json, flat, ids, loader_of, some
from tests.examples import examples
from tests.lakes import LakeSpec


def test_the_state_is_plain_and_the_same_however_often_it_is_asked_for(lake: Path) -> None:
    loader = loader_of(lake)
    moments = [loader.state_dict()]
    for _ in loader:
        moments.append(loader.state_dict())
        assert loader.state_dict() == moments[-1] == as_json(moments[-1])
    moments.append(loader.state_dict())
    assert len({json.dumps(state) for state in moments}) == len(moments)
    assert moments[-1]["epoch"] == 1 and moments[-1]["step"] == 0
    for state in moments:
        assert State.from_plain(state).to_plain() == state


def test_a_state_that_was_handed_out_never_changes(lake: Path) -> None:
    loader = loader_of(lake)
    some(loader, 2)
    state = loader.state_dict()
    before = as_json(state)
    state["segments"].append("rubbish")
    list(loader)
    assert before["segments"] != state["segments"]
    other = loader_of(lake)
    other.load_state_dict(before)
    given = as_json(before)
    list(other)
    assert before == given


def test_every_rank_gives_the_same_state(lake: Path) -> None:
    for world_size, batch_size in itertools.product((2, 3), (4, None)):
        loaders = [
            loader_of(lake, rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)
        ]
        for _ in zip(*loaders, strict=False):
            states = [loader.state_dict() for loader in loaders]
            assert all(state == states[0] for state in states)


@pytest.mark.parametrize("case", [{}, {"batch_size": None}, {"endless": True}])
def test_the_state_as_of_every_recent_receipt_is_the_one_of_that_moment(lake: Path, case: dict[str, Any]) -> None:
    loader = loader_of(lake, **case)
    moments: list[tuple[Receipt, Any]] = []
    for _ in range(2 if not case.get("endless") else 1):
        for item in itertools.islice(loader, 60):
            assert loader.last_receipt == item.receipt
            moments.append((item.receipt, loader.state_dict()))
    assert len(moments) >= 20
    for receipt, state in moments:
        plain = Receipt.from_plain(as_json(receipt.to_plain()))
        assert loader.state_dict(at=plain) == state == loader.state_dict(receipt)


def test_receipts_from_before_the_mark_or_of_others_are_refused(lake: Path) -> None:
    loader = loader_of(lake)
    receipts = [batch.receipt for batch in some(loader, 6)]
    loader._reader.mark(at=receipts[3])
    assert loader.state_dict(at=receipts[3])["step"] == 4
    assert loader.state_dict(at=receipts[5])["step"] == 6
    for receipt in receipts[:3]:
        with pytest.raises(StateUnavailable, match="not among what this loader has delivered since"):
            loader.state_dict(at=receipt)
    ahead = [batch.receipt for batch in loader_of(lake)]
    with pytest.raises(StateUnavailable):
        loader.state_dict(at=ahead[7])
    wide = [batch.receipt for batch in some(loader_of(lake, rank=0, world_size=2), 5)]
    with pytest.raises(StateUnavailable):
        loader.state_dict(at=wide[4])
    loader._reader.mark()
    with pytest.raises(StateUnavailable):
        loader.state_dict(at=receipts[4])


@pytest.mark.parametrize(
    "other", [{"batch_size": 3}, {"num_lanes": 3}, {"rank": 0, "world_size": 1, "batch_size": None}]
)
def test_receipts_of_loaders_that_deal_otherwise_are_refused(lake: Path, other: dict[str, Any]) -> None:
    """At the same step and epoch, of as many ranks: their micro-batches are not this loader's."""
    loader = loader_of(lake)
    some(loader, 6)
    for one in some(loader_of(lake, **other), 5)[1:]:  # the first one may be the same
        for ask in (loader.state_dict, loader._reader.stretches, loader._reader.mark):
            with pytest.raises(StateUnavailable, match=r"epoch 0, step \d, micro-batch \d is not among"):
                ask(one.receipt)


def test_receipts_from_before_a_load_are_of_what_was_delivered_then(lake: Path) -> None:
    first = loader_of(lake)
    receipts = [batch.receipt for batch in some(first, 5)]
    states = [first.state_dict(at=receipt) for receipt in receipts]
    for ranks, lanes, steps in ((1, 3, 2), (2, 2, 3), (1, 1, 4)):
        elsewhere = loader_of(lake, rank=0, world_size=ranks, num_lanes=lanes)
        some(elsewhere, steps)
        first.load_state_dict(elsewhere.state_dict())
        assert [first.state_dict(at=receipt) for receipt in receipts] == states
        more = some(first, 3)
        assert first.state_dict(at=more[-1].receipt) == first.state_dict()
        assert [first.state_dict(at=receipt) for receipt in receipts] == states
        first._reader.mark(at=more[0].receipt)
        for receipt in receipts:
            with pytest.raises(StateUnavailable):
                first.state_dict(at=receipt)
        receipts, states = [one.receipt for one in more], [first.state_dict(at=one.receipt) for one in more]


def test_row_by_row_the_mark_itself_is_still_known(lake: Path) -> None:
    loader = loader_of(lake, batch_size=None)
    for row in itertools.islice(loader, 23):
        loader._reader.mark(at=row.receipt)
        assert loader.state_dict(at=row.receipt) == loader.state_dict()
        assert loader._reader.stretches() == []


def test_nothing_is_received_before_the_first_batch_and_after_loading(lake: Path) -> None:
    loader = loader_of(lake)
    assert loader.last_receipt is None and loader._reader.stretches() == []
    some(loader, 2)
    assert loader.last_receipt is not None
    loader.load_state_dict(loader.state_dict())
    assert loader.last_receipt is None
    state = loader_of(lake).state_dict()
    fresh = loader_of(lake, num_workers=0)
    fresh.load_state_dict(state)
    assert ids(fresh) == ids(loader_of(lake))


def test_lanes_of_the_first_start_are_kept_whatever_the_workers(lake: Path) -> None:
    first = loader_of(lake, num_workers=3)
    state = first.state_dict()
    assert state["segments"] == [[0, 0, 3, 4, 1]]
    resumed = loader_of(lake)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert ids(resumed) == ids(loader_of(lake, num_lanes=3))


def test_asking_a_dataset_changes_nothing_for_the_loader_over_it(lake: Path) -> None:
    asked = loader_of(lake, num_workers=2)
    asked.dataset.state_dict()
    len(asked.dataset)
    assert asked.state_dict() == loader_of(lake, num_workers=2).state_dict()


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": 10**5}, "step 100000 of epoch 0"),
        ({"base": {"begun": [[0, 1, 0, []]], "next_epoch": 1}}, r"step \d+ of epoch 0, which has 0"),
        ({"epoch": 2**63 - 1}, "of epoch 9223372036854775807"),
    ],
)
def test_a_state_that_no_job_comes_to_is_refused_and_nothing_changes(
    lake: Path, batch_size: int | None, changes: dict[str, Any], match: str
) -> None:
    whole = loader_of(lake, batch_size=batch_size)
    some(whole, 3 if batch_size else 12)
    state = {**whole.state_dict(), **changes}
    for one in (whole, whole.dataset):
        with pytest.raises(StateError, match=match):
            one.load_state_dict(state)
    other = loader_of(lake, batch_size=batch_size)
    some(other, 3 if batch_size else 12)
    assert ids(whole) == ids(other)


def positions_since(batches: list[Batch]) -> dict[int, Intervals]:
    found: dict[int, Intervals] = {}
    for batch in batches:
        for epoch, positions in positions_of(batch.receipt).items():
            found[epoch] = found.get(epoch, Intervals.empty()).union(positions)
    return found


def stretched(loader: LakeLoader, at: Receipt | None = None) -> dict[int, Intervals]:
    found: dict[int, Intervals] = {}
    for begin, end in loader._reader.stretches(at):
        for epoch, positions in consumption(begin, end).items():
            assert not found.get(epoch, Intervals.empty()).intersection(positions)
            found[epoch] = found.get(epoch, Intervals.empty()).union(positions)
    return found


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.tuples(
            st.integers(0, 14),  # batches taken
            st.sampled_from(["go on", "mark", "mark at", "reload", "finish"]),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_stretches_are_what_was_received_since_the_mark(
    uneven: Path, actions: list[tuple[int, str]], endless: bool
) -> None:
    loader = loader_of(uneven, endless=endless, num_lanes=2)
    since: list[Batch] = []
    for count, action in actions:
        for batch in itertools.islice(loader, count):
            since.append(batch)
        if action == "finish" and not endless:
            since += list(loader)
        if action == "mark":
            loader._reader.mark()
            since = []
        elif action == "mark at" and since:
            place = len(since) // 2
            assert stretched(loader, since[place].receipt) == positions_since(since[: place + 1])
            loader._reader.mark(since[place].receipt)
            since = since[place + 1 :]
        elif action == "reload":
            loader.load_state_dict(as_json(loader.state_dict()))
        assert stretched(loader) == positions_since(since)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LakeSpec(files=((7, 0, 5), (9, 4))).write(tmp_path_factory.mktemp("uneven"))


def test_a_rewound_epoch_shows_as_two_stretches_over_the_same_rows(lake: Path) -> None:
    loader = loader_of(lake)
    some(loader, 3)
    loader.rewind()
    some(loader, 5)
    first, second = loader._reader.stretches()
    once, again = consumption(*first)[0], consumption(*second)[0]
    assert once.intersection(again) == once and again.size == 20


def test_a_lost_state_shows_as_two_stretches_over_the_same_rows(lake: Path) -> None:
    loader = loader_of(lake)
    early = loader.state_dict()
    some(loader, 3)
    loader.load_state_dict(early)
    some(loader, 2)
    assert [consumption(*pair)[0].size for pair in loader._reader.stretches()] == [12, 8]


def test_the_state_stays_small_over_many_changes_of_topology(lake: Path) -> None:
    rows: list[int] = []
    state: Any = None
    for turn in range(60):
        world_size = 1 + turn % 3
        loaders = [
            loader_of(lake, batch_size=1, num_lanes=6, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            if loader.epoch == 0:
                rows += flat(some(loader, turn % 2))
        state = as_json(loaders[0].state_dict())
        assert len(json.dumps(state)) < 4096 and len(state["segments"]) <= 32
    rest = loader_of(lake, batch_size=1, num_lanes=6)
    rest.load_state_dict(state)
    assert sorted(rows + (flat(rest) if rest.epoch == 0 else [])) == list(range(ROWS))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 3)])
def test_an_epoch_that_is_chosen_after_a_state_of_an_end_is_of_the_new_topology(
    lake: Path, before: int, after: int
) -> None:
    def loader(rank: int, world_size: int) -> LakeLoader:
        return LakeLoader(LakeDataset(lake, batch_size=10, shuffle=True, rank=rank, world_size=world_size))

    reader = loader(0, before)
    for _ in zip(range(len(reader)), reader, strict=False):
        pass  # the loop does not see the end
    state = reader.state_dict()
    found: list[int] = []
    for rank in range(after):
        reader = loader(rank, after)
        reader.load_state_dict(state)
        reader.state_dict()  # as restoring does
        reader.set_epoch(1)
        found += [row for batch in reader for row in batch["id"].tolist()]
    assert sorted(found) == sorted(set(found)) and len(found) == ROWS


def test_a_loader_that_was_started_can_be_copied(lake: Path) -> None:
    reader = LakeLoader(LakeDataset(lake, batch_size=10))
    reader._reader.start()
    other = copy.deepcopy(reader)
    assert [batch["id"].tolist() for batch in other] == [batch["id"].tolist() for batch in reader]


@pytest.mark.parametrize("batch_size", [4, None])
def test_the_length_is_known_at_the_end_of_an_epoch_of_other_ranks(lake: Path, batch_size: int | None) -> None:
    before = loader_of(lake, batch_size=batch_size)
    steps = len(some(before, len(before)))  # the loop counts, and does not ask for more
    for rank in range(3):
        loader = loader_of(lake, batch_size=batch_size, rank=rank, world_size=3)
        loader.load_state_dict(before.state_dict())
        assert len(loader) == steps
        assert list(loader) == [] and len(loader) == len(list(loader)) > 0
