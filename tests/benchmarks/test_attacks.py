"""The documents that the benchmark of attacks makes are read to their end, where they are refused."""

from __future__ import annotations

import pytest

from benchmarks.attacks import COSTLY, crafted
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import loads
from tests.wire.crafted import KIND, VERSION, sealed


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_document_is_refused_at_its_last_byte(name: str) -> None:
    payload = crafted(COSTLY[name], 2**12)
    with pytest.raises(WireDamaged, match=rf"byte {len(payload) - 1} of the payload: 1 bytes follow"):
        loads(sealed(payload), kind=KIND, supported=VERSION)
