"""Each private part of torch that lakeckpt uses does what lakeckpt uses it for, with the torch that is installed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils import signal_handling

from lakeckpt.data.base import torch_private
from tests.patience import PATIENCE_S


class Told(Dataset[Any]):
    """Returns what torch tells a worker of itself."""

    def __getitem__(self, index: int) -> Any:
        torch_private.set_worker_info(worker=3, workers=5, seed=7, dataset="mine")
        info = get_worker_info()
        assert info is not None
        return os.getpid(), info.id, info.num_workers, info.seed, info.dataset

    def __len__(self) -> int:
        return 6


@pytest.fixture
def worker() -> Iterator[Any]:
    """The iterator of a DataLoader with one worker."""
    loader = DataLoader(Told(), batch_size=None, collate_fn=same, num_workers=1, multiprocessing_context="forkserver")
    iterator = iter(loader)
    yield iterator
    torch_private.stop_workers(iterator)


def same(item: Any) -> Any:
    return item


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_store_of_the_job_is_that_of_torch_distributed(one_rank: None) -> None:
    torch_private.job_store(1).set("key", "value")
    assert torch_private.job_store(1).get("key") == b"value"
    assert torch_private.job_store(2) is None


def test_without_a_job_there_is_no_store() -> None:
    assert torch_private.job_store(1) is None


def test_a_worker_says_who_it_is_and_which_process(worker: Any) -> None:
    pid, *told = next(worker)
    assert told == [3, 5, 7, "mine"] and pid == torch_private.worker_process(worker).pid


def test_results_that_wait_are_counted(worker: Any) -> None:
    assert torch_private.queued(None) == 0
    next(worker)
    while not (waiting := torch_private.queued(worker)):
        torch_private.worker_process(worker).join(0.01)
    assert waiting in (1, 2)


def test_stopped_workers_have_ended(worker: Any) -> None:
    process = torch_private.worker_process(worker)
    torch_private.stop_workers(worker)
    assert not process.is_alive()


def test_a_worker_that_dies_is_noticed_by_next_alone(worker: Any) -> None:
    torch_private.leave_signals(worker)
    torch_private.leave_signals(worker)
    process = torch_private.worker_process(worker)
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]  # torch's handler of SIGCHLD calls it
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(worker)


def test_a_wrapped_error_is_raised_again_with_its_traceback() -> None:
    wrapped = torch_private.ExceptionWrapper((KeyError, KeyError("x"), None), where="in a worker")  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError, match="in a worker"):
        wrapped.reraise()  # type: ignore[no-untyped-call]


def test_types_that_are_registered_are_collated_by_their_own_function() -> None:
    class Mine:
        pass

    def made(items: list[Mine], *, collate_fn_map: Any = None) -> int:
        return len(items)

    torch_private.default_collate_fn_map[Mine] = made
    try:
        assert default_collate([Mine(), Mine()]) == 2
    finally:
        del torch_private.default_collate_fn_map[Mine]
    found = torch_private.collate([{"a": 1}, {"a": 2}], collate_fn_map=torch_private.default_collate_fn_map)
    assert torch.equal(found["a"], torch.tensor([1, 2]))


def test_pinning_goes_into_containers_and_asks_objects_that_pin_themselves() -> None:
    class Pins:
        def pin_memory(self) -> str:
            return "pinned"

    assert torch_private.pin_memory({"a": [Pins()], "b": "text"}) == {"a": ["pinned"], "b": "text"}  # type: ignore[no-untyped-call]
