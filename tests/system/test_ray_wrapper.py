"""Ray Train's own wrapper of loaders, on two ranks that are killed and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lakeckpt
from tests.checkpoint.reading_ahead import FILES, Run
from tests.checkpoint.scripts import write_table

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # ray's imports warn


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(write_table(tmp_path_factory.mktemp("table"), files=FILES))


def wrapped(loader: lakeckpt.LakeLoader) -> Iterator[Any]:
    """What ``ray.train.torch.prepare_data_loader(loader)`` gives, which needs a cluster to be asked for."""
    from ray.train.torch.train_loop_utils import _WrappedDataLoader

    return _WrappedDataLoader(loader, torch.device("cpu"), True)


@pytest.mark.parametrize("killed_after", [1, 2, 3, 8])
def test_a_bare_step_behind_rays_wrapper_is_warned_of_and_nothing_is_proved(
    killed_after: int, table: lakeckpt.Table
) -> None:
    run = Run(table, world_size=2)
    run.attempt(wrapped, says=False, steps=killed_after)
    run.attempt(wrapped, says=False)
    assert run.lost == 20  # a batch of each rank
    assert run.warned and run.verdict == "not proved"


def test_rays_wrapper_leaves_the_receipt_column_in_place(table: lakeckpt.Table) -> None:
    run = Run(table, world_size=2)
    run.attempt(wrapped, says=True, steps=4, column="receipt")
    run.attempt(wrapped, says=True, column="receipt")
    assert run.used_once and not run.warned and run.verdict == "proved"
