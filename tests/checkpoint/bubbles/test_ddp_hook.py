"""The hook around DDP's hook: a bubble lasts from the last bucket until every bucket is summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lakeckpt.checkpoint.bubbles.collectives import _BucketHook
from lakeckpt.checkpoint.bubbles.gate import BubbleGate

Future = torch.futures.Future[torch.Tensor]


@dataclass
class Bucket:
    """What the hook asks of a bucket."""

    last: bool

    def is_last(self) -> bool:
        return self.last


def sites(gate: BubbleGate, step: int) -> list[str]:
    """The windows of the iteration that ends now."""
    gate.cut(step)
    return [window.site for window in gate.records()[-1].windows]


def test_the_bubble_lasts_until_every_bucket_is_summed() -> None:
    gate = BubbleGate()
    futures: list[Future] = []

    def sums(state: object, bucket: object) -> Future:
        assert state == "state"
        futures.append(torch.futures.Future())
        return futures[-1]

    hook = _BucketHook(gate, sums, "state")
    gate.cut(0)
    returned = [hook(None, Bucket(last)) for last in (False, False, True)]  # type: ignore[arg-type]
    futures[0].set_result(torch.zeros(1))
    futures[2].set_result(torch.ones(1))
    assert sites(gate, 1) == []
    futures[1].set_result(torch.zeros(1))
    assert sites(gate, 2) == ["ddp 0"]
    assert returned[2].wait().item() == 1


def test_buckets_that_are_summed_while_the_rank_computes_are_no_bubble() -> None:
    gate = BubbleGate()
    done: Future = torch.futures.Future()
    done.set_result(torch.zeros(1))
    hook = _BucketHook(gate, lambda state, bucket: done, None)
    gate.cut(0)
    hook(None, Bucket(False))  # type: ignore[arg-type]
    assert sites(gate, 1) == []
    hook(None, Bucket(True))  # type: ignore[arg-type]
    assert sites(gate, 2) == ["ddp 0"]
