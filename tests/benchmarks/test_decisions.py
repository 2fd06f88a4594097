"""The benchmark of decisions runs with the code that ranks run."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks import decisions
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("moved", [0, 1])
def test_all_parts_are_measured(moved: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=decisions.TIMEOUT)
    options = argparse.Namespace(nodes=4, ranks=2, clients=1, moved=moved, times=1)
    with ThreadPoolExecutor(1) as pool:
        acts = pool.submit(decisions.act, 0, server.port, options)
        found = decisions.measured(PrefixStore("job", server), options)
        acts.result(PATIENCE_S)
    assert {part: len(took) for part, took in found.items()} == dict.fromkeys(
        ("facts", "decide", "answer", "vote", "bare"), 1
    )
