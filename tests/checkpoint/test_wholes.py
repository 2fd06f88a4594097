"""Parts are put together only of ranks that shared one tensor, however alike those of others are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import ranges
from lakeckpt.checkpoint.format.parts import SHARING, FileRecord, PartRecord, SaveId, TreeRecord
from lakeckpt.checkpoint.format.sharing import Sharing, part_key, sharing_from_bytes, sharing_to_bytes
from lakeckpt.checkpoint.state.wholes import Wholes
from lakeckpt.errors import CheckpointDamaged, WireDamaged
from lakeckpt.wire.envelope import dumps
from tests.checkpoint.rig import record_of

SAVE = SaveId(attempt=0, step=1, number=0)
FILE = FileRecord(path="objects/x.safetensors", size_bytes=99, head_bytes=8, head_digest=bytes(16))
Rows = tuple[int, int]


def saved(ranks: Sequence[Mapping[str, tuple[Sharing, int, Rows, int]]]) -> list[PartRecord]:
    """What ranks save that hold ``name → (how it is shared, rows of the whole, [first, stop) of them, content)``: each
    content of a key is written by the first rank that has it, as an agreement would have it."""
    held: dict[tuple[str, int, bytes], list[int]] = {}
    documents: dict[bytes, list[int]] = {}
    for rank, tensors in enumerate(ranks):
        for name, (_, rows, (first, stop), content) in tensors.items():
            if first < stop:
                key = part_key(name, (first,), (rows,))
                held.setdefault((key, stop - first, short_digest(b"%d" % content)), []).append(rank)
        if tensors:
            document = sharing_to_bytes({name: one[0] for name, one in tensors.items()})
            documents.setdefault(document, []).append(rank)
    parts = []
    for rank in range(len(ranks)):
        records = [
            record_of(TensorSpec(key=key, dtype="int8", shape=(size,)), digest, ranges(who))
            for (key, size, digest), who in held.items()
            if who[0] == rank
        ]
        trees = [
            TreeRecord(item=SHARING, document=one, digest=short_digest(one), ranks=ranges(who))
            for one, who in documents.items()
            if who[0] == rank
        ]
        part = PartRecord(
            run="r",
            save=SAVE,
            rank=rank,
            world_size=len(ranks),
            cut=bytes(16),
            files=(FILE,) * max(1, len(records)),
            tensors=tuple(
                replace(one, slabs=tuple(replace(slab, file=at) for slab in one.slabs))
                for at, one in enumerate(records)
            ),
            trees=tuple(trees),
        )
        parts.append(PartRecord.from_bytes(part.to_bytes()))
    return parts


def cut(rows: int, among: int) -> list[Rows]:
    """As torch cuts: rounded up, so that the last ones may have none."""
    step = -(-rows // among)
    return [(min(at * step, rows), min((at + 1) * step, rows)) for at in range(among)]


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, tuple[Sharing, int, Rows, int]]]:
    """Ranks in groups of any sizes, dealt in any order, that share tensors of a few names and sizes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(sum(sizes))))
    ranks: list[dict[str, tuple[Sharing, int, Rows, int]]] = [{} for _ in order]
    for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        members = sorted(order[stop - size : stop])
        sharing = Sharing(ranks=ranges(members), dims=(0,))
        for name in draw(st.sets(st.sampled_from("abc"))):
            rows, content = draw(st.integers(1, 5)), draw(st.integers(0, 2)) * 100
            for rank, (first, end) in zip(members, cut(rows, size), strict=True):
                ranks[rank][name] = (sharing, rows, (first, end), content + first)
    return ranks


@given(ranks=jobs())
def test_every_rank_gets_the_parts_of_those_that_shared_the_tensor_with_it(
    ranks: list[dict[str, tuple[Sharing, int, Rows, int]]],
) -> None:
    found = Wholes(saved(ranks))
    found.check()
    contents: dict[str, set[object]] = {}
    for rank, tensors in enumerate(ranks):
        composed = found.of(rank)
        for name, (sharing, rows, _, _) in tensors.items():
            one, records = composed[name]
            mates = [other[name] for other in ranks if name in other and other[name][0] == sharing]
            expected = {((first,), short_digest(b"%d" % what)) for _, _, (first, stop), what in mates if first < stop}
            assert {(part.offsets, record.digest) for part, record in zip(one.parts, records, strict=True)} == expected
            assert (one.spec.shape, one.sharing) == ((rows,), sharing)
            assert one.is_several == (name in found.several())
            contents.setdefault(name, set()).add((rows, frozenset((m[2], m[3]) for m in mates if m[2][0] < m[2][1])))
    assert set(found.several()) == {name for name, every in contents.items() if len(every) > 1}


def shared(*rows: tuple[str, Rows, int], of: int = 4, by: Sequence[int] = (0, 1)) -> list[PartRecord]:
    sharing = Sharing(ranks=ranges(by), dims=(0,))
    return saved([{name: (sharing, of, one, content)} for name, one, content in rows])


def test_parts_that_are_no_whole_are_damage() -> None:
    missing = shared(("a", (0, 2), 1), ("a", (3, 4), 2))
    overlapping = shared(("a", (0, 3), 1), ("a", (2, 4), 2))
    for parts, match in ((missing, "3 of 4 elements"), (overlapping, "overlap")):
        with pytest.raises(CheckpointDamaged, match=f"tensor 'a': .*{match}"):
            Wholes(parts).check()
        with pytest.raises(CheckpointDamaged, match=match):
            Wholes(parts).of(0)


@pytest.mark.parametrize(
    "plain",
    [
        7,
        [7],
        [[[[0, 2]], [0]]],
        [[[[0, 2]], [0], [7]]],
        [[[[2, 0]], [0], ["a"]]],
        [[[], [0], ["a"]]],
        [[[[0, 2]], [-2], ["a"]]],
        [[[[0, 2]], ["x"], ["a"]]],
        [[[[0, 2]], [0], ["a", "a"]]],
    ],
)
def test_what_says_who_shares_what_is_checked(plain: object) -> None:
    with pytest.raises(WireDamaged):
        sharing_from_bytes(dumps(plain, kind="tree", version=(1, 0)))
    part = shared(("a", (0, 4), 1), by=(0,))[0]
    wrong = replace(part.trees[0], document=dumps(plain, kind="tree", version=(1, 0)))
    with pytest.raises(CheckpointDamaged, match="how rank 0 shared"):
        Wholes([replace(part, trees=(wrong,))])
