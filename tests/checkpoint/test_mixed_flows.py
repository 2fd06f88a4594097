"""Mixtures of raw text, whole documents and packed tokens, and packed mixtures, under the manager: each token counts
once, as the audit proves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import LakeLoader
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import ConfigError, StateMismatch
from tests.checkpoint.rig import MemoryStorage
from tests.checkpoint.test_many_rows import attempt
from tests.data.test_mixed_flows import every_token, lake, loader_of, tokenize, tokens_of, two_tokens
from tests.data.test_packed_mixtures import THREE as PACKED
from tests.data.test_packed_mixtures import loader_of as packed_of

__all__ = ["lake"]

WEIGHTS = {"web": 4.0, "code": 2.0, "books": 1.0, "plain": 1.0}


def made(folder: Path, rank: int, world_size: int, **given: Any) -> LakeLoader:
    return loader_of(folder, rank, world_size, **given)


def run(storage: MemoryStorage, lake: Path, world_size: int, steps: int, **given: Any) -> list[int]:
    """The tokens of an attempt of so many steps, and of one more, which is lost."""
    given = {"every": 1, "make": made, **given}
    ran = attempt(storage, lake, world_size, steps, items_in=lambda one: tokens_of([one]), **given)
    return [token for rank in ran for _, token in rank]


@pytest.mark.parametrize("every", [1, 10**6])
def test_each_token_of_a_mixture_counts_once_on_any_chain_of_ranks_and_weights(lake: Path, every: int) -> None:
    storage, found = MemoryStorage(), list[int]()
    schedule = [(3, {**WEIGHTS, "books": 3.0, "web": 0.0}), (8, WEIGHTS)]
    for world_size, steps in [(2, 5), (1, 4), (2, 3)]:
        found += run(storage, lake, world_size, steps, every=every, schedule=schedule)
        state = State.from_plain(read_history(storage).tip.readers["reader"].state)
        assert state.is_whole and any(Plan(state.of(number)).begun for number in range(2))
        report = audit(storage)
        assert report.verdict == "proved", report.to_plain()
    assert set(Counter(found).values()) == {1}
    assert [one.name for one in report.readers] == [f"reader.{name}" for name in sorted(WEIGHTS)]
    units = {one.name.removeprefix("reader."): (one.counted, one.batch_of) for one in report.readers}
    assert units["web"] == units["code"] == ("row", "sequence") and units["books"] == ("window", "sequence")
    with pytest.raises(ConfigError, match=r"which rows of 'reader\.\w+' made a step depends on what its transform"):
        explain(storage, 3)


def packed(folder: Path, rank: int, world_size: int, **given: Any) -> LakeLoader:
    return packed_of(folder, rank, world_size, **given)


@pytest.mark.parametrize("every", [1, 10**6])
def test_each_token_of_a_packed_mixture_counts_once_on_any_chain_of_ranks_and_lanes(lake: Path, every: int) -> None:
    storage, found = MemoryStorage(), list[int]()
    for world_size, lanes, steps in [(2, None, 5), (1, 3, 4), (3, 6, 2), (2, None, 3)]:
        found += run(storage, lake, world_size, steps, every=every, make=packed, lanes=lanes)
        state = State.from_plain(read_history(storage).tip.readers["reader"].state)
        assert state.is_whole and any(Plan(state.of(number)).begun for number in range(3))
        report = audit(storage)
        assert report.verdict == "proved", report.to_plain()
    assert set(Counter(found).values()) == {1}
    assert [one.name for one in report.readers] == ["reader.code", "reader.plain", "reader.web"]
    assert all((one.counted, one.batch_of) == ("row", "sequence") for one in report.readers)
    found += run(storage, lake, 2, 60, every=every, make=packed)
    assert set(found) == set().union(*map(every_token, PACKED)), "all of the first epochs were read"
    report = audit(storage)
    assert report.verdict == "proved" and all(one.epochs[0].status == "complete" for one in report.readers)
    with pytest.raises(ConfigError, match=r"which rows of 'reader\.\w+' made a step depends on what its transform"):
        explain(storage, 3)


def test_a_source_joins_a_packed_mixture_and_the_others_go_on(lake: Path) -> None:
    storage, found = MemoryStorage(), list[int]()
    for weights in ({"web": 1.0, "plain": 1.0}, {"code": 1.0, "web": 1.0, "plain": 1.0}):
        found += run(storage, lake, 2, 5, weights=weights, make=packed)
        assert audit(storage).verdict == "proved"
    assert set(Counter(found).values()) == {1} and any(100_000 <= token < 200_000 for token in found)


def test_a_source_joins_a_mixture_and_the_others_go_on(lake: Path) -> None:
    storage, found = MemoryStorage(), list[int]()
    for weights in ({"web": 1.0, "plain": 1.0}, {"code": 1.0, "web": 1.0, "books": 1.0, "plain": 1.0}):
        found += run(storage, lake, 2, 5, weights=weights)
        assert audit(storage).verdict == "proved"
    assert set(Counter(found).values()) == {1} and any(100_000 <= token < 200_000 for token in found)


def test_another_tokenizer_of_a_source_is_refused_by_its_name(lake: Path) -> None:
    storage, weights = MemoryStorage(), {"web": 1.0, "plain": 1.0}
    run(storage, lake, 1, 3, weights=weights, tokenizer=tokenize)
    with pytest.raises(StateMismatch, match=r"source 'web' of the mixture.*tokenizer: '.*two_tokens' in this dataset"):
        run(storage, lake, 1, 3, weights=weights, tokenizer=two_tokens)
