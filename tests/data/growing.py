"""Tables that grow, and ranks that follow them in one process: for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lakeckpt import Follow, LakeDataset, LakeLoader, open_table
from tests.data.reading import as_json, dataset_of

AT_ONCE = Follow(poll_every_s=0, stop_after_idle_s=0)
"""The stream ends at the first look that finds nothing."""
NOT_THIRDS = pc.field("id") / 3 * 3 != pc.field("id")
"""A filter that drops every third row."""


@dataclass
class Growing:
    """A folder of Parquet files; ``id`` counts the rows in the order of their being added."""

    folder: Path
    rows: int = 0
    files: list[Path] = field(default_factory=list)

    def append(self, rows: int) -> None:
        """Add a file of ``rows`` rows. Its name lies anywhere among those of earlier files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        count = len(self.files)
        path = self.folder / f"{count * 7 % 10}-{count}.parquet"
        ids = pa.array(range(self.rows, self.rows + rows), pa.int64())
        pq.write_table(pa.table({"id": ids}), path, row_group_size=7)
        self.rows += rows
        self.files.append(path)


def follower(lake: Path, *, workers: int = 0, follow: Any = AT_ONCE, **dataset: Any) -> LakeLoader:
    """A loader that follows the table in ``lake``."""
    arguments = {"batch_size": 4, "shuffle": True, "rank": 0, "world_size": 1, **dataset}
    return LakeLoader(dataset_of(open_table(lake), LakeDataset, follow=follow, **arguments), num_workers=workers)


@contextmanager
def ranks_in_one_process() -> Iterator[None]:
    """Give what the first rank found to the others, which ask after it, and as often."""
    answers: list[bytes] = []
    asked: dict[int, int] = {}

    def found(find: Callable[[], bytes], *, explicit: tuple[int, int] | None, dp_group: Any) -> bytes:
        rank = 0 if explicit is None else explicit[0]
        if rank == 0:
            answers.append(find())
        asked[rank] = asked.get(rank, 0) + 1
        return answers[asked[rank] - 1]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("following", "versions"):
            patch.setattr(f"lakeckpt.data.position.{module}.found_by_first", found)
        yield


@dataclass
class Run:
    """What all ranks of a job consumed, attempt after attempt, and where it stands."""

    lake: Growing
    dataset: dict[str, Any]
    steps: list[list[list[int]]] = field(default_factory=list)
    """For each step of the history, the ids that each rank got."""
    states: list[Any] = field(default_factory=list)
    """For each step, the state after it, and the index of its table version."""

    @property
    def ids(self) -> list[int]:
        """All ids in the order of steps and ranks."""
        return [one for step in self.steps for rank in step for one in rank]

    def attempt(self, ranks: int, steps: int, appends: dict[int, int], *, lost: int = 0, **dataset: Any) -> bool:
        """Go on for ``steps`` steps, of which the last ``lost`` are rolled back; return whether the stream ended.

        ``appends``: rows that are added after a step, by the step of the history. They are removed from it.
        """
        with ranks_in_one_process():
            loaders = [
                follower(self.lake.folder, **{**self.dataset, **dataset, "rank": rank, "world_size": ranks})
                for rank in range(ranks)
            ]
            for loader in loaders if self.states else []:
                state, index = self.states[-1]
                loader.dataset._versions.repin(index)
                loader.load_state_dict(as_json(state))
            iterators = [iter(loader) for loader in loaders]
            before, rows = len(self.steps), len(self.ids)
            for _ in range(steps):
                batches = [next(one, None) for one in iterators]
                if batches[0] is None:
                    assert batches == [None] * ranks
                    return True
                self._note(loaders, batches)
                rows += sum(map(len, self.steps[-1]))
                assert rows <= self.lake.rows, "rows come again"
                if (more := appends.pop(len(self.steps), None)) is not None:
                    self.lake.append(more)
        kept = max(len(self.steps) - lost, before if lost else 0)
        del self.steps[kept:], self.states[kept:]
        return False

    def _note(self, loaders: list[LakeLoader], batches: list[Any]) -> None:
        self.steps.append([batch["id"].tolist() for batch in batches])
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        if states[0]["identity"]["tail"] == "carry":  # type: ignore[index]
            assert {len(batch["id"]) for batch in batches} == {loaders[0].dataset.batch_size}
        self.states.append((states[0], loaders[0].table.index))
