"""A restart says in one line each what differs from the attempt before it, and warns of weights that are ignored."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, mix, pack
from lakeckpt.errors import RestartWarning
from tests.checkpoint.rig import MemoryStorage
from tests.data.reading import some


def one(batch: Any) -> Any:
    """A transform."""
    return batch


def other(batch: Any) -> Any:
    """Another one."""
    return batch


def write(folder: Path, name: str, rows: int = 60) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": range(rows), "text": ["a text"] * rows}), folder / name, row_group_size=20)
    return folder


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return write(tmp_path / "lake", "a.parquet")


def lines(caplog: pytest.LogCaptureFixture, storage: MemoryStorage, loader: LakeLoader, steps: int = 1) -> list[str]:
    """Restore, take and save ``steps``, and return what the restart said; its own takeover apart."""
    caplog.clear()
    manager = CheckpointManager(storage, {"reader": loader})
    with caplog.at_level(logging.INFO, "lakeckpt"):
        manager.restore()
    for batch in some(loader, steps):
        manager.step(batch)
    manager.save()
    return [each.getMessage() for each in caplog.records if "takes the run over" not in each.getMessage()]


def test_what_a_script_gives_otherwise_is_said_in_a_line_each(lake: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()

    def loader_of(transform: Any, size: int = 4, workers: int = 0) -> LakeLoader:
        return LakeLoader(LakeDataset(lake, batch_size=size, transform=transform), num_workers=workers)

    assert lines(caplog, storage, loader_of(one)) == []
    assert lines(caplog, storage, loader_of(one)) == []
    named = f"{__name__}.one", f"{__name__}.other"
    assert lines(caplog, storage, loader_of(other, 5, workers=1)) == [
        "'reader': batch size is 5, and was 4 in the attempt before",
        f"'reader': transform is {named[1]}, and was {named[0]} in the attempt before",
        "'reader': workers is 1, and was 0 in the attempt before",
    ]
    assert lines(caplog, storage, loader_of(None, 5, workers=1)) == [
        f"'reader': transform is none, and was {named[1]} in the attempt before"
    ]


def test_other_ranks_are_said(lake: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests.checkpoint.rig import EventWaiter, HubExchange, good, manager, run_ranks

    storage, said = MemoryStorage(), []
    for world_size in (2, 1):
        waiter = EventWaiter(storage)

        def body(rank: int, exchange: HubExchange) -> None:
            loader = LakeLoader(LakeDataset(lake, batch_size=4, rank=rank, world_size=world_size))  # noqa: B023
            saver = manager(storage, {"reader": loader}, exchange=exchange, waiter=waiter)  # noqa: B023
            saver.restore()
            saver.step(some(loader, 1)[0])
            saver.save()

        caplog.clear()
        with caplog.at_level(logging.INFO, "lakeckpt"):
            good(run_ranks(world_size, body, waiters=[waiter]))
        said += [each.getMessage() for each in caplog.records if "ranks" in each.getMessage()]
    assert said == ["this attempt has 1 ranks, and the attempt before it had 2"]


def test_a_table_that_has_grown_is_said_and_its_pinned_version_read(
    lake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    assert lines(caplog, storage, LakeLoader(LakeDataset(lake, batch_size=4))) == []
    write(lake, "b.parquet", 30)
    loader = LakeLoader(LakeDataset(lake, batch_size=4))
    assert lines(caplog, storage, loader) == [
        "'reader': the version that is read on has 1 files with 60 rows, and the table has 2 files with 90 rows now"
    ]
    assert len(loader.table.index.paths) == 1


def mixture(lake: Path, web: float, schedule: Any = (), names: tuple[str, ...] = ("web", "code")) -> LakeLoader:
    weights = dict(zip(names, (web, 1 - web, 0.5), strict=False))
    every = {name: (LakeDataset(lake, batch_size=4), weight) for name, weight in weights.items()}
    return LakeLoader(mix(every, num_lanes=2, schedule=schedule))


def test_edited_weights_are_warned_of_until_somebody_acts(lake: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    assert lines(caplog, storage, mixture(lake, 0.75), 3) == []
    ignored = r"web 0\.5, code 0\.5, are ignored: .*web 0\.75.*set_weights"
    for _ in range(2):
        with pytest.warns(RestartWarning, match=ignored) as caught:
            assert lines(caplog, storage, mixture(lake, 0.5)) == []
        assert len(caught) == 1
    manager = CheckpointManager(storage, {"reader": (loader := mixture(lake, 0.5))})
    with pytest.warns(RestartWarning):
        manager.restore()
    loader.set_weights({"web": 0.5, "code": 0.5})
    manager.step(some(loader, 1)[0])
    manager.save()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lines(caplog, storage, mixture(lake, 0.5))[0].startswith("'reader': weights is web 0.5, code 0.5, and")
        assert lines(caplog, storage, mixture(lake, 0.5)) == []


def test_weights_that_the_job_changed_itself_are_no_reason_to_warn(
    lake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    schedule = [(2, {"web": 0.25, "code": 0.75})]
    assert lines(caplog, storage, mixture(lake, 0.75, schedule), 4) == []
    assert lines(caplog, storage, mixture(lake, 0.75, schedule), 1) == []
    (said,) = lines(caplog, storage, mixture(lake, 0.75, [*schedule, (9, {"web": 0.5, "code": 0.5})]), 1)
    assert said.startswith("'reader': schedule is [(2, 'web 0.25, code 0.75'), (9, 'web 0.5, code 0.5')], and was [(2,")


def words(text: str) -> list[int]:
    """A tokenizer."""
    return [len(each) for each in text.split()]


def numbers(text: str) -> list[int]:
    """Another one, which an accepting run goes on with."""
    return [len(each) + 1 for each in text.split()]


def test_a_tokenizer_that_was_accepted_is_said(lake: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lakeckpt import ReadOptions

    def loader_of(tokenizer: Any) -> LakeLoader:
        dataset = LakeDataset(lake, batch_size=4, options=ReadOptions(accept_changes=["tokenizer"]))
        return LakeLoader(pack(dataset, length=4, column="text", tokenizer=tokenizer))

    storage = MemoryStorage()
    assert lines(caplog, storage, loader_of(words)) == []
    (said,) = lines(caplog, storage, loader_of(numbers))
    assert said == f"'reader': tokenizer is {__name__}.numbers, and was {__name__}.words in the attempt before"
