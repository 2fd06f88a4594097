"""A slot of shared memory is written again when nobody can see it any more, and not before."""

from __future__ import annotations

import os
import threading

import torch

from lakeckpt.data.slots import SlotMemory, Slots


def test_a_slot_ends_when_its_last_view_dies_in_whatever_thread() -> None:
    memory, descriptor = SlotMemory.make()
    slots = Slots(memory, descriptor)
    offset = slots.take(100)
    view = torch.frombuffer(memory.lease(offset, 100), dtype=torch.uint8)[5:9]
    assert memory.ended() == [] and memory.leased_bytes == 100
    holds = [view]
    del view
    thread = threading.Thread(target=holds.clear)
    thread.start()
    thread.join()
    assert memory.ended() == [offset] and memory.ended() == [] and memory.leased_bytes == 0
    slots.free([offset])
    assert slots.take(99) == offset
    os.close(descriptor)


def test_free_slots_are_used_again_and_most_give_their_memory_back() -> None:
    memory, descriptor = SlotMemory.make()
    slots = Slots(memory, descriptor)
    slots.spare = 2
    size = 1 << 20

    def taken() -> int:
        return os.fstat(descriptor).st_blocks * 512

    offsets = [slots.take(size) for _ in range(8)]
    assert len(set(offsets)) == 8 and taken() >= 8 * size
    slots.free(offsets)
    assert taken() <= 2.5 * size
    again = [slots.take(size - 1) for _ in range(8)]
    assert again[:2] == offsets[:-3:-1] and set(again) == set(offsets)
    kept = memory.lease(again[0], size)
    kept[:] = 7
    memory.close()
    assert taken() <= 1.5 * size and (kept == 7).all()
    del kept
    assert taken() < size
    os.close(descriptor)


def test_a_slot_that_a_forked_process_may_see_is_never_written_again() -> None:
    memory, descriptor = SlotMemory.make()
    slots = Slots(memory, descriptor)
    offset = slots.take(10)
    lease = memory.lease(offset, 10)
    lease[:] = 3
    asks, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asks, 1)
        os._exit(int((lease == 3).all()))
    del lease
    assert memory.ended() == []
    memory.close()
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    for one in (asks, told, descriptor):
        os.close(one)
