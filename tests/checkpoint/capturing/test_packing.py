"""Small tensors leave a device together: what is gathered arrives as if each had been copied, and nothing else does."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.capture.links import CopyBatch
from lakeckpt.checkpoint.capture.moves import Moves, joined
from tests.checkpoint.capturing.device import Device, SimulatedLink


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 1, 63, 64, 200])), min_size=1, max_size=12))
def test_what_is_gathered_arrives_and_nothing_between_far_ones_is_touched(sizes: list[tuple[int, int]]) -> None:
    memory = torch.full((sum(size + gap for size, gap in sizes) + 1,), 255, dtype=torch.uint8)
    expected, pairs, at, near = memory.clone(), [], 0, []
    for number, (size, gap) in enumerate(sizes):
        pairs.append((memory[at : at + size], torch.zeros(size, dtype=torch.uint8)))
        expected[at : at + size] = 100 + number
        near.append((at + size, at + size + gap if gap < 64 else at + size))
        at += size + gap
    batch = CopyBatch(pairs)
    for first in (1, 100):  # the second time as it was made ready the first time, of other values
        for number, (_, source) in enumerate(pairs):
            source.fill_(first + number)
        batch.queue()
        prepared = [id(one) for one in batch.to]
        batch.queue()
    assert prepared == [id(one) for one in batch.to], "prepared once"
    for low, high in near[:-1]:
        expected[low:high] = memory[low:high]  # what aligns tensors may hold anything
    assert torch.equal(memory, expected)
    assert len(batch.to) <= len(pairs)


def test_many_small_tensors_are_one_copy_and_a_large_one_is_its_own() -> None:
    memory = torch.zeros(2**20, dtype=torch.uint8)
    small = [(memory[at : at + 60], torch.ones(60, dtype=torch.uint8)) for at in range(0, 640, 64)]
    large = (memory[640 : 640 + 2**19], torch.ones(2**19, dtype=torch.uint8))
    whole = (memory[2**20 - 64 : 2**20 - 32].view(torch.float32), torch.ones(8))
    batch = CopyBatch([*small, large, whole])
    batch.queue()
    assert len(batch.to) == 3 and len(batch.gathers) == 1


def test_what_lies_among_small_tensors_and_is_not_gathered_is_not_overwritten() -> None:
    memory = torch.zeros(112, dtype=torch.uint8)
    pairs = [(memory[at : at + 16], torch.full((16,), at, dtype=torch.uint8)) for at in (0, 16, 32, 64, 80, 96)]
    pairs.insert(3, (memory[48:64].view(torch.float32), torch.arange(4.0)))
    batch = CopyBatch(pairs)
    batch.queue()
    assert len(batch.gathers) == 2
    assert all(torch.equal(to, source) for to, source in pairs)


def test_what_is_conjugated_or_negated_lazily_arrives_as_it_is_read() -> None:
    source = torch.randn(50, dtype=torch.complex64)
    to = torch.zeros(3, 50, dtype=torch.complex64)
    lazy = [source.conj(), torch.imag(source.conj()).to(torch.complex64), source]
    batch = CopyBatch([(row, one) for row, one in zip(to, lazy, strict=True)])
    batch.queue()
    assert all(torch.equal(row, one.resolve_conj().resolve_neg()) for row, one in zip(to, lazy, strict=True))
    negated = torch.imag(source.conj())
    assert negated.is_neg()
    CopyBatch([(one := torch.zeros(50), negated)]).queue()
    assert torch.equal(one, negated.resolve_neg())


def test_neighbours_are_joined_where_all_of_both_goes_one_way_and_no_further() -> None:
    links = [SimulatedLink(Device(seed)) for seed in range(2)]

    def moves(number: int, *ways: SimulatedLink | None, size_bytes: int = 10) -> Moves:
        made = Moves()
        for way in ways:
            source = torch.full((size_bytes,), number, dtype=torch.uint8)
            made.add(torch.zeros(size_bytes, dtype=torch.uint8), source, way)
        return made

    def numbers(made: Moves) -> list[int]:
        pairs = [pair for batch in made._linked.values() for pair in batch.pairs]
        return sorted({int(source[0]) for source in [*(source for _, source in pairs), *made._small_from]})

    one, other = links
    every = [moves(0, one), moves(1, one), moves(2, one, None), moves(3, one), moves(4, other), moves(5, other, other)]
    every += [moves(6, other, size_bytes=100), moves(7, other), moves(8), moves(9, other), moves(10, None)]
    found = joined(every, most_bytes=40)
    assert [numbers(made) for made in found] == [[0, 1], [2], [3], [4, 5], [6], [7], [], [9], [10]]
    assert [made.size_bytes for made in found] == [20, 20, 10, 30, 100, 10, 0, 10, 10]
    assert sum(made.size_bytes for made in every) == sum(made.size_bytes for made in found)
    assert numbers(every[0]) == [0] and every[0].size_bytes == 10, "what was joined is as it was"
