"""A slot of shared memory is written again when nobody can see it any more, and not before."""

from __future__ import annotations

import os
import threading

import torch

from lakeckpt.data.arena import Arena, Slots


def test_a_slot_ends_when_its_last_view_dies_in_whatever_thread() -> None:
    arena, descriptor = Arena.make()
    slots = Slots(arena, descriptor)
    offset = slots.take(100)
    view = torch.frombuffer(arena.lease(offset, 100), dtype=torch.uint8)[5:9]
    assert arena.ended() == [] and arena.leased_bytes == 100
    holds = [view]
    del view
    thread = threading.Thread(target=holds.clear)
    thread.start()
    thread.join()
    assert arena.ended() == [offset] and arena.ended() == [] and arena.leased_bytes == 0
    slots.free([offset])
    assert slots.take(99) == offset
    os.close(descriptor)


def test_free_slots_are_used_again_and_most_give_their_memory_back() -> None:
    arena, descriptor = Arena.make()
    slots = Slots(arena, descriptor)
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
    kept = arena.lease(again[0], size)
    kept[:] = 7
    arena.close()
    assert taken() <= 1.5 * size and (kept == 7).all()
    del kept
    assert taken() < size
    os.close(descriptor)


def test_a_slot_that_a_forked_process_may_see_is_never_written_again() -> None:
    arena, descriptor = Arena.make()
    slots = Slots(arena, descriptor)
    offset = slots.take(10)
    lease = arena.lease(offset, 10)
    lease[:] = 3
    asks, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asks, 1)
        os._exit(int((lease == 3).all()))
    del lease
    assert arena.ended() == []
    arena.close()
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    for one in (asks, told, descriptor):
        os.close(one)
