"""`LakeReplica` in many histories, with a stand-in for torchft's Manager: replicas that die, heal, and do not commit.

The stand-in keeps what torchft documents: a replica behind the highest step number loads the objects of one that has
it, all take part in the step, and each commits it or not for itself. At step 0 all load the objects of the first one.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.torchft import LakeReplica
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import write_table

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROWS = 203


class FakeManager:
    """The part of ``torchft.Manager`` that a LakeReplica asks."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self._quorum_future: object = None
        self._step = 0
        self.place: tuple[int | None, int] = (None, 0)
        self.load: Callable[[Mapping[str, Any]], None]
        self.share: Callable[[], Mapping[str, Any]]

    def register_state_dict_fn(self, key: str, load: Any, share: Any) -> None:
        self.load, self.share = load, share

    def start_quorum(self, place: tuple[int | None, int]) -> None:
        self._quorum_future, self.place = object(), place

    def participating_rank(self) -> int | None:
        return self.place[0]

    def num_participants(self) -> int:
        return self.place[1]

    def current_step(self) -> int:
        return self._step

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step = state["step"]


class Sum:
    """A model: the sum of all ids that were committed, times how often."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total = state["total"]


class Replica:
    """A process of one replica group of ``ranks``, the first of which stands for all in quorums."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, *, saves: bool, lanes: int | None, workers: int = 0
    ) -> None:
        self.manager, self.model = FakeManager(), Sum()
        dataset = lakeckpt.LakeDataset(
            folder / "events",
            batch_size=4,
            shuffle=True,
            seed=7,
            rank=rank,
            world_size=ranks,
            options=lakeckpt.ReadOptions(num_lanes=lanes),
        )
        self.loader = lakeckpt.LakeLoader(dataset, num_workers=workers)
        state = {"model": self.model, "reader": self.loader}
        saving = {"persist_every": 3, "world_size": 1} if saves else {}
        self.lake = LakeReplica(cast(Any, self.manager), folder / "run", state, saves=saves, **saving)
        self.lake.__enter__()


class Job:
    """Replica groups 0 to ``groups - 1``, of which group 0 saves; ``history`` is step → (epoch, id) of its
    rows, in the newest branch."""

    def __init__(
        self, folder: Path, *, seed: int, groups: int, ranks: int = 1, lanes: int | None = None, workers: int = 0
    ) -> None:
        self.folder, self.ranks, self.lanes = write_table(folder / "events", rows=ROWS).parent, ranks, lanes
        self.random, self.groups, self.workers = random.Random(seed), groups, workers
        self.alive: dict[int, list[Replica]] = {group: self.begun(group) for group in range(groups)}
        self.history: dict[int, list[tuple[int, int]]] = {}
        self.jumps: list[int] = []

    def begun(self, group: int) -> list[Replica]:
        return [
            Replica(
                self.folder, rank, self.ranks, saves=group == 0 and rank == 0, lanes=self.lanes, workers=self.workers
            )
            for rank in range(self.ranks)
        ]

    @property
    def step(self) -> int:
        return max(self.alive[group][0].manager._step for group in self.alive)

    def quorum(self) -> None:
        """Every live replica starts a step, and those behind heal."""
        step = self.step
        source = next(group for group in self.alive if self.alive[group][0].manager._step == step)
        for place, group in enumerate(self.alive):
            for rank, one in enumerate(self.alive[group]):
                if one.manager._step < step or (step == 0 and group != source):
                    shared = self.alive[source][rank].manager.share()
                    one.manager._step = step
                    one.manager.load(shared)
                    if group == 0 and step:
                        self.jumps.append(step)
                one.manager.start_quorum((place, len(self.alive)))

    def take(self, *, committing: set[int], micro_batches: int = 1) -> None:
        """One step, which the replica groups ``committing`` commit."""
        self.quorum()
        every = [one for group in self.alive.values() for one in group]
        batches = [next(one.lake) for _ in range(micro_batches) for one in every]
        ids = [(batch.receipt.epoch, int(row)) for batch in batches for row in batch["id"]]
        assert {one.lake.epoch for one in every} == {every[0].lake.epoch}  # a loop may ask at any time
        for group, ranks in self.alive.items():
            for one in ranks:
                if group in committing:
                    one.manager._step += 1
                    one.model.total += sum(row for _, row in ids)
                assert one.lake.step() == (group in committing)
        if committing:
            self.history[self.step] = ids

    def go(self, epochs: int) -> None:
        """Take steps until ``epochs`` are done, while groups die, come back, and do not commit."""
        luck = self.random
        while max(one[0].lake.epoch for one in self.alive.values()) < epochs:
            fate = luck.random()
            committing = set(self.alive)
            if fate < 0.1:
                committing = set()
            elif fate < 0.2:
                committing = {luck.choice(list(self.alive))}
            self.take(committing=committing, micro_batches=luck.choice([1, 1, 2]))
            is_one = len({one[0].manager._step for one in self.alive.values()}) == 1
            if is_one and luck.random() < 0.15 and len(self.alive) > 1:
                del self.alive[luck.choice(list(self.alive))]
            dead = set(range(self.groups)) - set(self.alive)
            if dead and luck.random() < 0.2:
                group = luck.choice(sorted(dead))
                self.alive[group] = self.begun(group)

    def rows(self) -> list[tuple[int, int]]:
        return [one for step, ids in self.history.items() if step <= self.step for one in ids]


@pytest.mark.parametrize(("groups", "ranks", "lanes"), [(2, 1, None), (3, 1, 24), (3, 2, None)])
@pytest.mark.parametrize("seed", [0, 1, 2, 104])  # 104: group 0 comes back in an epoch that others began
def test_every_row_counts_once_in_the_committed_steps(
    tmp_path: Path, seed: int, groups: int, ranks: int, lanes: int | None
) -> None:
    job = Job(tmp_path, seed=seed, groups=groups, ranks=ranks, lanes=lanes)
    job.go(2)
    job.quorum()  # who did not commit the last step heals
    rows = job.rows()  # the last step may have some of the next epoch, too
    assert Counter(one for one in rows if one[0] < 2) == Counter(
        (epoch, row) for epoch in (0, 1) for row in range(ROWS)
    )
    every = [one for group in job.alive.values() for one in group]
    assert {one.model.total for one in every} == {sum(row for _, row in rows)}
    assert {one.lake.epoch for one in every} == {2}
    report = audit(open_storage(str(tmp_path / "run")))
    assert report.exactly_once or not report.checkpoints, report


def test_loader_workers_begin_anew_where_the_replicas_change(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, groups=2, lanes=4, workers=1)
    for committing in ({0, 1}, set(), {0, 1}):
        job.take(committing=committing)
    gone = job.alive.pop(1)
    job.take(committing={0})
    job.alive[1] = gone
    while job.alive[0][0].lake.epoch < 1:
        job.take(committing={0, 1})
    assert Counter(row for _, row in job.rows()) == Counter(range(ROWS))


def test_a_spare_reads_along_and_takes_no_rows(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, groups=2)
    job.take(committing={0, 1})
    one, spare = (job.alive[group][0] for group in (0, 1))
    one.manager.start_quorum((0, 1))
    spare.manager.start_quorum((None, 1))  # WorldSizeMode.FIXED_WITH_SPARES
    taken = [next(each.lake)["id"].tolist() for each in (one, spare)]
    assert taken[0] == taken[1] and len(taken[0]) == 4


def test_what_a_dead_replica_had_is_nothing_to_save_until_the_next_step(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, groups=2)
    for _ in range(4):
        job.take(committing={0, 1})
    job.take(committing={1})
    job.quorum()  # group 0 heals
    saver = job.alive[0][0]
    saver.lake.__exit__(None, None, None)
    latest = saver.lake.checkpoints.latest() if saver.lake.checkpoints else None
    assert latest is not None and latest.step == 3


def test_a_replica_that_heals_in_mid_epoch_goes_on_from_the_place_of_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, groups=2)
    job.take(committing={0, 1})
    ahead = job.alive[1][0]
    ahead.manager.start_quorum((1, 2))
    next(ahead.lake)
    ahead.manager._step += 1
    assert ahead.lake.step()
    job.quorum()  # group 0 did not see this step, and has an iterator at hand
    places = [next(group[0].lake).receipt.step for group in job.alive.values()]
    assert places == [2, 2]


def test_healing_from_another_history_is_never_proved(tmp_path: Path) -> None:
    """Two replicas that did not see each other: torchft takes the one that did more steps."""
    job = Job(tmp_path, seed=0, groups=2, lanes=2)
    job.take(committing={0, 1})
    other = job.alive.pop(1)
    for _ in range(3):
        job.take(committing={0})  # group 0 saves step 3, on rows 0 and 1 of the lanes
    job.alive = {1: other, 0: job.alive[0]}
    other[0].manager.start_quorum((1, 3))  # the rows of the third of three
    for _ in range(4):
        next(other[0].lake)
        other[0].manager._step += 1
        other[0].lake.step()
        other[0].manager.start_quorum((1, 3))
    while job.step < 9:
        job.take(committing={0, 1})
    assert audit(open_storage(str(tmp_path / "run"))).verdict == "not proved"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drop_last": True}, "drop_last=True"),
        ({"batch_size": None}, "batch_size=None"),
        ({"follow": True}, "follow="),
        ({"options": lakeckpt.ReadOptions(on_new_version="next_epoch")}, "on_new_version"),
        ({"transform": lambda rows: [rows], "rows": "many"}, 'rows="many"'),
    ],
)
def test_what_cannot_be_dealt_to_other_replicas_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    events = write_table(tmp_path / "events", rows=ROWS)
    dataset = lakeckpt.LakeDataset(events, **{"batch_size": 4, **options})
    with pytest.raises(ConfigError, match=re.escape(named)):
        LakeReplica(cast(Any, FakeManager()), tmp_path / "run", {"reader": lakeckpt.LakeLoader(dataset)}, saves=True)


def test_a_mixture_and_a_state_without_a_loader_are_refused(tmp_path: Path) -> None:
    events = write_table(tmp_path / "events", rows=ROWS)
    mixture = lakeckpt.mix({"events": (lakeckpt.LakeDataset(events, batch_size=4), 1.0)})
    for state, named in (({"reader": lakeckpt.LakeLoader(mixture)}, r"lakeckpt\.mix"), ({}, "one lakeckpt.LakeLoader")):
        with pytest.raises(ConfigError, match=named):
            LakeReplica(cast(Any, FakeManager()), tmp_path / "run", {"model": Sum(), **state}, saves=True)


def test_an_asynchronous_quorum_is_refused(tmp_path: Path) -> None:
    manager = FakeManager()
    manager._use_async_quorum = True
    with pytest.raises(ConfigError, match="use_async_quorum=False"):
        LakeReplica(cast(Any, manager), tmp_path / "run", {"model": Sum()}, saves=True)


def test_calls_in_another_order_are_refused_before_a_row_is_lost(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, groups=1)
    one = job.alive[0][0]
    with pytest.raises(ConfigError, match=r"zero_grad\(\)"):
        next(one.lake)  # before the first quorum
    job.take(committing={0})
    with pytest.raises(ConfigError, match=r"zero_grad\(\)"):
        next(one.lake)  # as a for loop does, which takes a batch before its quorum
    with pytest.raises(ConfigError, match="follows a batch"):
        one.lake.step()
    one.manager.start_quorum((0, 1))
    next(one.lake)
    one.manager.start_quorum((0, 1))
    with pytest.raises(ConfigError, match=r"without replica\.step\(\)"):
        next(one.lake)
    with pytest.raises(ConfigError, match=r"without replica\.step\(\)"):
        one.manager.share()


def test_step_before_the_optimizer_is_refused_at_the_next_batch(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, groups=1)
    one = job.alive[0][0]
    one.manager.start_quorum((0, 1))
    next(one.lake)
    assert not one.lake.step()
    one.manager._step += 1
    one.manager.start_quorum((0, 1))
    with pytest.raises(ConfigError, match=r"without replica\.step\(\)"):
        next(one.lake)


def test_a_replica_is_read_inside_of_its_context(tmp_path: Path) -> None:
    events = write_table(tmp_path / "events", rows=ROWS)
    manager, loader = FakeManager(), lakeckpt.LakeLoader(lakeckpt.LakeDataset(events, batch_size=4))
    lake = LakeReplica(cast(Any, manager), tmp_path / "run", {"reader": loader}, saves=True)
    manager.start_quorum((0, 1))
    with pytest.raises(ConfigError, match=r"with LakeReplica\(…\) as replica"):
        next(lake)
