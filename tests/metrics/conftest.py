"""Each test begins with the counters of a new process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakeckpt import counters


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    before = dict(counters._stores)
    counters._stores.clear()
    counters.READERS.renew()
    counters.RUNS.renew()
    yield
    counters._stores.update(before)
