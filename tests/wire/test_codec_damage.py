"""Every altered, cut or misplaced document is refused, with an error that says which it is."""

from __future__ import annotations

import contextlib
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import NewerFormat, UnsupportedValue, WireDamaged
from lakeckpt.wire.envelope import TensorRef, dumps, loads
from lakeckpt.wire.values import Tag
from tests.wire.crafted import KIND, VERSION, resealed, sealed

VALUE = {
    "step": 7,
    "rng": (3, (1, 2**70), None),
    "w": TensorRef(key="w"),
    "a": np.arange(3, dtype="<u2"),
    1: {"é": -0.5},
}
DATA = dumps(VALUE, kind=KIND, version=VERSION)


def read(data: bytes | bytearray | memoryview) -> object:
    return loads(data, kind=KIND, supported=VERSION)


def test_the_document_under_test_is_sound() -> None:
    assert set(read(DATA)) == set(VALUE)  # type: ignore[call-overload]


@pytest.mark.parametrize("at", range(len(DATA)))
def test_every_change_of_a_single_byte_is_noticed(at: int) -> None:
    for byte in range(256):
        if byte != DATA[at]:
            with pytest.raises(WireDamaged):
                read(DATA[:at] + bytes([byte]) + DATA[at + 1 :])


@pytest.mark.parametrize("size", range(len(DATA)))
def test_every_truncation_is_noticed_at_either_end(size: int) -> None:
    with pytest.raises(WireDamaged):
        read(DATA[:size])
    with pytest.raises(WireDamaged):
        read(DATA[len(DATA) - size :])


@given(st.binary(min_size=1, max_size=64), st.integers(min_value=0, max_value=len(DATA)))
def test_bytes_put_in_anywhere_are_noticed(extra: bytes, at: int) -> None:
    with pytest.raises(WireDamaged):
        read(DATA[:at] + extra + DATA[at:])


@given(st.binary(max_size=200))
def test_bytes_that_are_not_ours_are_refused(data: bytes) -> None:
    with pytest.raises(WireDamaged):
        read(data)


def test_two_documents_in_one_file_are_refused() -> None:
    with pytest.raises(WireDamaged, match=f"has {2 * len(DATA)} bytes and its header states {len(DATA)}"):
        read(DATA + DATA)


def test_a_truncation_is_told_by_its_sizes() -> None:
    with pytest.raises(WireDamaged, match=f"it has {len(DATA) - 1} bytes and its header states {len(DATA)}"):
        read(DATA[:-1])


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: memoryview(np.frombuffer(b, np.uint16))])
def test_any_buffer_can_be_read(make: type) -> None:
    data = dumps(["an even", "number of bytes"], kind="thing", version=VERSION)
    data = data if len(data) % 2 == 0 else dumps(["an even", "number of  bytes"], kind="thing", version=VERSION)
    assert read(make(data)) == read(data)


def test_a_document_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(WireDamaged, match=r"expected a manifest document and found one of kind b'thing'"):
        loads(DATA, kind="manifest", supported=VERSION)


def test_a_newer_major_version_is_refused_by_name_and_a_newer_minor_one_is_read() -> None:
    with pytest.raises(NewerFormat, match=r"has format 2\.0 and this lakeckpt reads up to 1\.x: upgrade"):
        read(dumps(1, kind=KIND, version=(2, 0)))
    for version in [(1, 0), (1, 9), (0, 3)]:
        assert loads(dumps(1, kind=KIND, version=version), kind=KIND, supported=(1, 2)) == 1


def test_a_newer_major_version_is_not_even_decoded() -> None:
    with pytest.raises(NewerFormat):
        read(sealed(b"\xc1", version=(2, 0)))


def test_a_newer_envelope_is_refused_by_name() -> None:
    with pytest.raises(NewerFormat, match="envelope version 2"):
        read(sealed(b"\x01", envelope=2))


@pytest.mark.parametrize("field", [9, 14, 15, *range(16, 24)])
def test_a_header_that_contradicts_itself_is_refused_even_with_a_fitting_checksum(field: int) -> None:
    body = bytearray(DATA[:-16])
    body[field] ^= 2
    with pytest.raises(WireDamaged, match="header does not fit"):
        read(resealed(bytes(body)))


def test_a_header_alone_is_refused() -> None:
    with pytest.raises(WireDamaged, match="cannot be read"):
        read(sealed(b""))
    with pytest.raises(WireDamaged):
        read(resealed(struct.pack(">8sBBHHHQ", b"LAKECKPT", 1, 255, 1, 0, 0, 2**64 - 1)))


@pytest.mark.parametrize("code", [0, *range(8, 128)])
def test_an_extension_of_an_unknown_type_is_refused(code: int) -> None:
    with pytest.raises(UnsupportedValue, match=rf"extension type {code} is unknown"):
        read(sealed(msgpack.packb(msgpack.ExtType(code, b"\x00"))))


@given(st.binary(max_size=40))
def test_any_payload_under_a_right_checksum_is_read_or_refused_by_a_typed_error(payload: bytes) -> None:
    with contextlib.suppress(WireDamaged, UnsupportedValue):
        read(sealed(payload))


def test_an_array_of_objects_is_refused() -> None:
    payload = msgpack.packb(msgpack.ExtType(Tag.NUMPY_ARRAY, msgpack.packb(["|O", [1], b"\x00" * 8])))
    with pytest.raises(WireDamaged, match="Python objects"):
        read(sealed(payload))


def test_a_large_document_may_be_compressed_and_is_read_alike() -> None:
    alike = [{"table": "0123456789abcdef" * 4, "step": number} for number in range(200)]
    plain, small = (dumps(alike, kind="log", version=(1, 0), compress=one) for one in (False, True))
    assert len(small) < len(plain) / 5
    assert loads(small, kind="log", supported=(1, 0)) == loads(plain, kind="log", supported=(1, 0)) == alike
    assert dumps([1], kind="log", version=(1, 0), compress=True) == dumps([1], kind="log", version=(1, 0))
    for place in (14, 15, 40, len(small) - 20):
        with pytest.raises(WireDamaged):
            loads(small[:place] + bytes([small[place] ^ 1]) + small[place + 1 :], kind="log", supported=(1, 0))


def test_a_payload_that_is_not_compressed_although_its_header_says_so_is_refused() -> None:
    body = bytearray(DATA[:-16])
    body[15] = 1
    with pytest.raises(WireDamaged, match="cannot be decompressed"):
        read(resealed(bytes(body)))
