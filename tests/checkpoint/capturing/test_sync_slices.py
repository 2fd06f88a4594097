"""A synchronous save brings tensors of a device through slices: the same bytes and digests as those of host memory."""

from __future__ import annotations

import pytest
import torch

from lakeckpt.checkpoint import sync_save
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.state.snapshot import Snapshot
from tests.checkpoint.capturing.device import Device, SimulatedLink


class Seen(SimulatedLink):
    """Knows how many bytes were queued at once."""

    most_bytes = queued = 0

    def copy(self, batch):  # type: ignore[no-untyped-def]
        self.queued += 1
        self.most_bytes = max(self.most_bytes, sum(to.nbytes for to, _ in batch.pairs))
        return super().copy(batch)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "small": torch.randn(7),
        "large": torch.randn(3 * LEAF_BYTES // 2 + 5),
        "exact": torch.randint(0, 255, (2 * LEAF_BYTES,), dtype=torch.uint8),
        "turned": torch.randn(300, 700).t(),
        "lazy": torch.randn(9, dtype=torch.complex64).conj(),
        "none": torch.zeros(0, 3),
        "half": torch.randn(LEAF_BYTES // 2 + 1).half(),
        "one": torch.tensor(True),
    }


@pytest.mark.parametrize("leaves", [1, 2, 64])
@pytest.mark.parametrize("small_bytes", [0, 100, LEAF_BYTES])
@pytest.mark.parametrize("seed", range(3))
def test_what_comes_through_slices_is_what_lies_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, leaves: int, small_bytes: int, seed: int
) -> None:
    snapshot = Snapshot(tensors=tensors(), documents={})
    here = sync_save.stage(snapshot)
    link = Seen(Device(seed))
    monkeypatch.setattr(sync_save, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(sync_save, "_SLICE_BYTES", leaves * LEAF_BYTES)
    monkeypatch.setattr(sync_save, "open_link", lambda device: link)
    staged = sync_save.stage(snapshot)
    assert {key: (bytes(one.data), one.digest, one.spec) for key, one in staged.tensors.items()} == {
        key: (bytes(one.data), one.digest, one.spec) for key, one in here.tensors.items()
    }
    assert 0 < link.most_bytes <= leaves * LEAF_BYTES and (leaves > 8 or link.queued > 2)


def test_contiguous_tensors_in_host_memory_are_not_copied() -> None:
    tensor = torch.arange(LEAF_BYTES)
    data = sync_save.stage(Snapshot(tensors={"one": tensor}, documents={})).tensors["one"].data
    tensor[3] = 77
    assert data.cast("q")[3] == 77


def test_a_device_that_fails_is_reported_and_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(SimulatedLink):
        made = 0

        def copy(self, batch):  # type: ignore[no-untyped-def]
            self.made += 1
            if self.made == 3:
                raise RuntimeError("the device is gone")
            return super().copy(batch)

    monkeypatch.setattr(sync_save, "_SMALL_BYTES", 0)
    monkeypatch.setattr(sync_save, "_SLICE_BYTES", LEAF_BYTES)
    link = Failing(Device(1))
    monkeypatch.setattr(sync_save, "open_link", lambda device: link)
    with pytest.raises(RuntimeError, match="the device is gone"):
        sync_save.stage(Snapshot(tensors=tensors(), documents={}))
