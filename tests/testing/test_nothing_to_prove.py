"""Calls of the kit that would leave nothing to prove are refused, and say what to do; what users rightly do is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lakeckpt import LakeDataset, LakeLoader, ReadOptions
from lakeckpt.errors import ConfigError
from lakeckpt.testing import Attempt, Topology, assert_exactly_once, replay
from tests.lakes import LakeSpec
from tests.testing.wrong_loaders import Wrapped, make_of

SPEC = LakeSpec(files=((7, 5), (9,)))
ONE = [(1, 0)]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return SPEC.write(tmp_path / "lake")


def no_keys(item: Any) -> list[int]:
    return []


@pytest.mark.filterwarnings("ignore:the transform= of a LakeDataset got:UserWarning")
@pytest.mark.parametrize("case", [{}, {"batch_size": None}, {"transform": lambda batch: {"id": batch["id"][:0]}}])
def test_a_key_that_is_never_seen_proves_nothing(case: dict[str, Any], lake: Path) -> None:
    for key in (no_keys, *([None] if "transform" in case else [])):
        with pytest.raises(ConfigError, match=r"an epoch of 21 rows gave no key at all"):
            assert_exactly_once(make_of(None, lake, **case), topologies=ONE, key=key)
        with pytest.raises(ConfigError, match=r"an epoch of 21 rows gave no key at all"):
            replay(make_of(None, lake, **case), [Attempt(topology=(2, 0))], key=key)


@pytest.mark.parametrize("case", [{}, {"endless": True}, {"drop_last": True}])
def test_expecting_nothing_of_a_table_with_rows_proves_nothing(case: dict[str, Any], lake: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected= is empty, and an epoch has 21 rows"):
        assert_exactly_once(make_of(None, lake, **case), topologies=ONE, key=no_keys, expected=[])


def test_an_epoch_without_rows_has_no_keys(lake: Path) -> None:
    kept_none = make_of(None, lake, filters=[("id", "<", 0)])
    assert_exactly_once(kept_none, topologies=ONE, key=no_keys)
    assert_exactly_once(kept_none, topologies=ONE, key="id", expected=[])
    assert_exactly_once(make_of(None, lake, drop_last=True, batch_size=50), topologies=ONE)


@pytest.mark.parametrize("topology", [(1, 2), (3, 1)])
def test_a_loader_without_the_workers_that_a_topology_asks_for_is_refused(topology: Any, lake: Path) -> None:
    make_loader = make_of(None, lake)
    ranks, workers = topology
    said = (
        rf"make_loader\(rank=0, world_size={ranks}, num_workers={workers}\) returned a LakeLoader of 0 workers: .*"
        rf"such as \({ranks}, 0\)"
    )
    for topologies in ([topology], [(1, 0), topology]):
        with pytest.raises(ConfigError, match=said):
            assert_exactly_once(
                lambda rank, world_size, num_workers: make_loader(rank, world_size, 0), topologies=topologies
            )
    with pytest.raises(ConfigError, match=r"rank=1.* of 0 workers"):
        replay(
            lambda rank, world_size, num_workers: make_loader(rank, world_size, num_workers if rank == 0 else 0),
            [Attempt(topology=(2, 1))],
        )


def test_a_loader_that_cannot_be_restored_is_refused(lake: Path) -> None:
    rows = _dataset(lake)
    with pytest.raises(ConfigError, match=r"DataLoader, which has no state_dict and load_state_dict.*LakeLoader"):
        assert_exactly_once(lambda *place: DataLoader(rows(*place), batch_size=None), topologies=ONE)


@pytest.mark.filterwarnings("ignore:the transform= of a LakeDataset got:UserWarning")
def test_a_transform_that_drops_rows_is_told_to_need_a_function_as_key(lake: Path) -> None:
    some = make_of(None, lake, transform=lambda batch: {"id": batch["id"][batch["id"] % 2 == 0]})
    even = [n for n in range(21) if n % 2 == 0]
    with pytest.raises(
        AssertionError, match=r"that its receipt names.*drops, makes or reorders rows needs key=functio"
    ):
        assert_exactly_once(some, topologies=ONE, key="id", expected=even)
    assert_exactly_once(some, topologies=ONE, key=lambda item: item["id"].tolist(), expected=even)


def _dataset(lake: Path) -> Callable[..., Any]:
    return lambda rank, world_size, num_workers: LakeDataset(lake, batch_size=4, rank=rank, world_size=world_size)


def _own_loader(lake: Path) -> Callable[..., Any]:
    return lambda rank, world_size, num_workers: Wrapped(LakeLoader(_dataset(lake)(rank, world_size, 0)))


def _a_worker_always(lake: Path) -> Callable[..., Any]:
    return lambda rank, world_size, num_workers: LakeLoader(
        LakeDataset(
            lake, batch_size=4, options=ReadOptions(num_lanes=2), transform=dict, rank=rank, world_size=world_size
        ),
        num_workers=1,
    )


@pytest.mark.parametrize(
    ("make_of_lake", "topologies"),
    [(_dataset, [(1, 2), (2, 0)]), (_own_loader, [(1, 2)]), (_a_worker_always, [(1, 0)]), (_a_worker_always, [(1, 1)])],
)
def test_loaders_that_do_not_tell_or_have_workers_unasked_are_taken(
    make_of_lake: Callable[..., Any], topologies: Any, lake: Path
) -> None:
    assert_exactly_once(make_of_lake(lake), topologies=topologies, offsets=1, chains=0, key=lambda item: item["id"])


@pytest.mark.parametrize("offsets", [0, -1, 1.5, True, "some"])
def test_offsets_that_would_restore_nowhere_are_refused(offsets: Any, lake: Path) -> None:
    said = f"offsets must be an integer of at least 1 or 'all', got {offsets!r}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        assert_exactly_once(make_of(None, lake), topologies=ONE, offsets=offsets)


@pytest.mark.parametrize("chains", [-1, 2.0, None])
def test_chains_are_a_number(chains: Any, lake: Path) -> None:
    with pytest.raises(ConfigError, match=f"chains must be an integer of at least 0, got {chains}"):
        assert_exactly_once(make_of(None, lake), topologies=ONE, chains=chains)


@pytest.mark.parametrize(
    ("topology", "match"),
    [
        ((1.5, 0), "world_size must be an integer of at least 1, got 1.5"),
        ((0, 0), "world_size must be an integer of at least 1, got 0"),
        ((1, -1), "num_workers must be an integer of at least 0, got -1"),
        ((1, None), "num_workers must be an integer of at least 0, got None"),
        ((1, True), "num_workers must be an integer of at least 0, got True"),
        ((1, 0, 8), "options are arguments of make_loader, such as {'batch_size': 8}, got 8"),
        ((1, 0, {3: 4}), "options are arguments of make_loader"),
    ],
)
def test_no_such_topology(topology: Any, match: str, lake: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        assert_exactly_once(make_of(None, lake), topologies=[topology])
    with pytest.raises(ConfigError, match=match):
        Attempt(topology=topology)


@pytest.mark.parametrize("changes", [{"steps": 1.5}, {"steps": -1}, {"lost": None}, {"lost": -1}])
def test_no_such_attempt(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"an attempt's (lost )?steps must be an integer of at least 0"):
        Attempt(topology=(1, 0), **changes)


def test_integers_of_numpy_are_integers(lake: Path) -> None:
    assert Topology(world_size=np.int64(2)) == Topology(world_size=2)  # type: ignore[arg-type]
    assert (
        repr(Attempt(topology=(np.int64(2), 0), steps=np.int64(3)))
        == "Attempt(topology=Topology(world_size=2, num_workers=0, options={}), steps=3, lost=0)"
    )  # type: ignore[arg-type]
    assert_exactly_once(make_of(None, lake), topologies=ONE, offsets=np.int64(1), chains=np.int64(0))  # type: ignore[arg-type]
