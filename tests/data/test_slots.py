"""A slot of shared memory is written again when nobody can see it any more, and not before."""

from __future__ import annotations

import os
import threading
from collections import deque

import torch

from lakeckpt.data.workers.slots import SlotMemory, Slots


def test_a_slot_ends_when_its_last_view_dies_in_whatever_thread() -> None:
    memory = SlotMemory.make()
    slots = Slots(memory, spare_bytes=1 << 20)
    offset = slots.take(100)
    view = torch.frombuffer(memory.lease(offset, 100), dtype=torch.uint8)[5:9]
    assert memory.ended() == []
    holds = [view]
    del view
    thread = threading.Thread(target=holds.clear)
    thread.start()
    thread.join()
    assert memory.ended() == [offset] and memory.ended() == []
    slots.free([offset])
    assert slots.take(99) == offset


def test_free_slots_are_used_again_and_most_give_their_memory_back() -> None:
    memory = SlotMemory.make()
    size = 1 << 20
    slots = Slots(memory, spare_bytes=5 * size)

    def taken() -> int:
        return os.fstat(memory.descriptor).st_blocks * 512

    offsets = [slots.take(size) for _ in range(12)]
    assert len(set(offsets)) == 12 and taken() >= 12 * size
    slots.free(offsets)
    assert 5 * size <= taken() <= 5.5 * size
    again = [slots.take(size - 1) for _ in range(12)]
    assert again[:5] == offsets[:-6:-1] and set(again) == set(offsets)
    kept = memory.lease(again[0], size)
    kept[:] = 7
    memory.close()
    assert taken() <= 1.5 * size and (kept == 7).all()
    del kept
    assert taken() < size


def test_a_forked_process_that_closes_its_copy_takes_nothing_from_the_parent() -> None:
    memory = SlotMemory.make()
    slots = Slots(memory, spare_bytes=1 << 20)
    child = os.fork()
    if child == 0:
        os.read(0, 0)
        memory.close()
        os._exit(0)
    lease = memory.lease(slots.take(5000), 5000)
    lease[:] = 3
    os.waitpid(child, 0)
    assert (lease == 3).all()


def test_a_slot_memory_gives_its_descriptor_and_its_addresses_back() -> None:
    descriptor = SlotMemory.make().descriptor
    try:
        os.fstat(descriptor)
    except OSError:
        return
    raise AssertionError("its descriptor is open")


def test_batches_of_different_sizes_use_the_same_memory_again() -> None:
    memory, sizes = SlotMemory.make(), sizes_of_images(2000)
    slots, in_flight = Slots(memory, spare_bytes=1 << 30), deque[int]()
    for size in sizes:
        offset = slots.take(size)
        memory.lease(offset, size)[:] = 1
        in_flight.append(offset)
        if len(in_flight) > 6:
            slots.free([in_flight.popleft()])
    assert os.fstat(memory.descriptor).st_blocks * 512 <= 14 * max(sizes)  # 7 are in flight
    memory.close()


def sizes_of_images(count: int) -> list[int]:
    """Sizes of micro-batches of images: from 200 to 300 KB."""
    return [200_000 + 7919 * number**2 % 100_000 for number in range(count)]
