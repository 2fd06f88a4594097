"""Documents of released versions stay readable, and the format does not drift unnoticed."""

from __future__ import annotations

import pytest

from lakeckpt.wire.envelope import loads
from tests.golden.wire.values import FOLDER, GOLDEN, KIND, VERSION, path_of, written
from tests.wire.sameness import same


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_documents_read_as_the_values_they_were_written_from(name: str) -> None:
    assert same(GOLDEN[name], loads(path_of(name).read_bytes(), kind=KIND, supported=VERSION))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_value_is_still_written_as_the_same_bytes(name: str) -> None:
    assert written(name) == path_of(name).read_bytes()


def test_every_golden_document_is_read_by_some_test() -> None:
    assert {path.name for path in FOLDER.glob("*.lkc")} == {path_of(name).name for name in GOLDEN}
