"""Documents that tell of damage, as a released version wrote them."""

from __future__ import annotations

import pytest

from lakeckpt.checkpoint.manifest import Manifest, entry_from_bytes
from lakeckpt.lake.chunk_digests import ChunkDigests
from tests.golden.damage.make import DOCUMENTS, FOLDER, commit, digests


@pytest.mark.parametrize("name", DOCUMENTS)
def test_golden_documents_of_damage_are_written_as_they_were(name: str) -> None:
    assert DOCUMENTS[name]() == (FOLDER / name).read_bytes()


def test_golden_documents_of_damage_read_as_what_they_were_written_from() -> None:
    found = ChunkDigests.loads((FOLDER / "chunk-digests-1.0.lkc").read_bytes())
    assert found.of_file(0).tolist() == digests().of_file(0).tolist() == [[0, 2**32], [2**32 + 0x352441C2, 2**32]]
    assert found.of_file(1).tolist() == [[2**33 - 1]]
    entry = entry_from_bytes((FOLDER / "log.lkc").read_bytes())
    assert isinstance(entry, Manifest)
    skips = entry.readers["reader"].skips
    assert skips.to_plain() == commit().readers["reader"].skips.to_plain()
    assert [one.positions.pairs() for one in skips] == [[(0, 128), (300, 2**40)], [(5, 6)]]
