"""Who has come to a round, and who has left a text, is known of each rank, however many there are."""

from __future__ import annotations

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.tracking.ballots import Ballot


@given(st.data(), st.integers(2, 130))
def test_ranks_are_counted_in_any_order_and_those_with_a_text_are_named(data: st.DataObject, world_size: int) -> None:
    store, others = dist.HashStore(), list(range(1, world_size))
    order = data.draw(st.permutations(others))
    texts = data.draw(st.sets(st.sampled_from(others)))
    ballot = Ballot(store, "7", world_size)
    come = data.draw(st.integers(0, len(others) - 1))
    for rank in order[:come]:
        ballot.come(rank, has_text=rank in texts)
    assert ballot.absent() == sorted(order[come:]) and not store.check([ballot.complete])
    for rank in order[come:]:
        ballot.come(rank, has_text=rank in texts)
    assert ballot.absent() == [] and store.check([ballot.complete])
    assert ballot.with_text() == sorted(texts)
    for key in ballot.keys:
        store.delete_key(key)
    assert store.num_keys() == 0


def test_a_vote_without_objections_is_one_request_of_a_rank() -> None:
    class Counting:
        def __init__(self) -> None:
            self.store, self.requests = dist.HashStore(), 0

        def __getattr__(self, name: str) -> object:
            self.requests += 1
            return getattr(self.store, name)

    store = Counting()
    for rank in range(1, 1024):
        Ballot(store, "0", 1024).come(rank, has_text=False)
    counters = sum("/came/" in key for key in Ballot(store, "0", 1024).keys)
    assert store.requests == 1023 + counters + 1  # and a full counter is counted, and the last one wakes rank 0
