"""Crafted documents, checksums right: no code runs, nothing large is made, the error is typed."""

from __future__ import annotations

import math
import pickle
import re
import tracemalloc
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged, WireError
from lakeckpt.wire.codec import DEFAULT_LIMITS, Limits, dumps, loads, payload_of
from lakeckpt.wire.values import Tag
from tests.wire.crafted import KIND, VERSION, sealed
from tests.wire.strategies import values

pack = msgpack.packb


def ext(code: int, *parts: object) -> bytes:
    """An extension whose content is the parts, packed, or as they are where they are bytearrays."""
    return pack(msgpack.ExtType(code, b"".join(bytes(p) if isinstance(p, bytearray) else pack(p) for p in parts)))


def raw(*content: int) -> bytearray:
    return bytearray(content)


def read(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> object:
    """Reads the payload while watching that no more memory is taken than a crafted document may cost."""
    data = sealed(payload)
    tracemalloc.start()
    try:
        return loads(data, kind=KIND, supported=VERSION, limits=limits).value
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 200_000 + 100 * len(data), "reading took memory out of proportion to the document"


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_bytes_run_nothing_wherever_they_stand(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    bomb = pickle.dumps(_Bomb(mark), protocol)
    for payload in (bomb, *(pack(msgpack.ExtType(code, bomb)) for code in range(128))):
        try:
            found = read(payload)
        except WireError:
            continue
        assert type(found) in (int, tuple), "bytes of a pickle may spell a number or numbers of ours, nothing else"
    assert read(pack({"a": bomb})) == {"a": bomb}
    with pytest.raises(WireDamaged):
        loads(bomb, kind=KIND, supported=VERSION)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "the bomb itself does nothing: the test proves nothing"


@pytest.mark.parametrize("code", [0, *range(10, 128), *range(-128, 0)])
def test_extension_types_that_are_not_ours_are_refused(code: int) -> None:
    for content in (b"", b"\x01", b"\x00" * 12):
        header = bytes([0xC7, len(content)]) + code.to_bytes(1, "big", signed=True)
        with pytest.raises(UnsupportedValue, match=f"the extension type {code},"):
            read(header + content)


@pytest.mark.parametrize("key", ["a", "", "é"])
def test_the_same_key_twice_is_refused(key: str) -> None:
    with pytest.raises(WireDamaged, match="twice"):
        read(b"\x82" + 2 * (pack(key) + b"\x01"))
    with pytest.raises(WireDamaged, match="twice"):
        read(ext(7, key, 1, key, 2))


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0, False), (0.0, -0.0)])
def test_keys_that_are_equal_to_python_are_the_same_key(first: object, second: object) -> None:
    with pytest.raises(WireDamaged, match="twice"):
        read(ext(7, first, 1, second, 2))


def test_keys_that_no_dict_can_have_are_refused() -> None:
    with pytest.raises(WireDamaged, match="a key of type int"):
        read(b"\x81\x01\x01")
    for key in ([], {}):
        with pytest.raises(WireDamaged, match="as the key of a dict"):
            read(ext(7, key, 1))
    with pytest.raises(WireDamaged, match="as the key of a dict"):
        read(ext(7, raw(*ext(1, [])), 1))


@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("times", [65, 1000, 100_000])
def test_depth_bombs_are_refused(head: bytes, times: int) -> None:
    with pytest.raises(LimitExceeded, match="more than 64 containers"):
        read(head * times + b"\x01")


def test_depth_bombs_of_extensions_are_refused() -> None:
    for code in (1, 7):
        payload = b"\x01"
        for _ in range(100):
            payload = ext(code, bytearray(payload)) if code == 1 else ext(code, 1, bytearray(payload))
        with pytest.raises(LimitExceeded):
            read(payload)


@pytest.mark.parametrize(
    "head",
    [b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"],
    ids=["str", "bin", "array", "map", "ext"],
)
@pytest.mark.parametrize("declared", [2, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
def test_lengths_that_are_not_there_cost_nothing(head: bytes, declared: int) -> None:
    length = declared.to_bytes(4, "big")
    for payload in (head + length, head + length + b"\x01", pack([1, 2])[:-1] + head + length + b"\x01"):
        with pytest.raises(WireDamaged, match=r"declared|missing"):
            read(payload)


def test_lengths_that_are_not_there_cost_nothing_when_nested() -> None:
    with pytest.raises((WireDamaged, LimitExceeded)):
        read((b"\xdd" + (1000).to_bytes(4, "big")) * 60 + b"\x01" * 1000)


def test_an_extension_cannot_reach_beyond_its_own_bytes() -> None:
    with pytest.raises(WireDamaged, match="2 items are declared where 1 bytes are left"):
        read(b"\x92" + ext(1, raw(0x92, 0x01)) + b"\x01")
    with pytest.raises(WireDamaged, match="declared"):
        read(b"\x92" + ext(8, raw(0xA2, 0x61)) + b"\xa1b")


@pytest.mark.parametrize(
    "content",
    [(4, "<f8", b"12345678"), (4, "U", "a"), (5, "<f8", [1], b"12345678"), (6, "<f8"), (8, "a"), (9, "a", b"\1\0")],
    ids=["scalar", "text-scalar", "array", "dtype", "tensor-ref", "dim-order"],
)
def test_what_is_left_over_inside_an_extension_is_refused_though_it_would_do_as_the_next_value(
    content: tuple[object, ...],
) -> None:
    code, *parts = content
    assert isinstance(code, int)
    assert isinstance(read(b"\x92" + ext(code, *parts) + pack("b")), list)  # where the next value stands outside of it
    with pytest.raises(WireDamaged, match="2 bytes follow the value of a"):
        read(b"\x92" + ext(code, *parts, "b"))


@pytest.mark.parametrize(
    "order", [b"", b"\0", b"\0\1", b"\0\2", b"\1\1", bytes(range(64, -1, -1)), [1, 0], None, "\1\0"]
)
def test_a_tensor_in_an_order_of_dimensions_that_is_none_is_refused(order: object) -> None:
    with pytest.raises(WireDamaged, match="a tensor whose dim_order is none"):
        read(ext(9, "a", order))


def test_a_tensor_in_an_order_of_more_dimensions_than_tensors_have_costs_nothing() -> None:
    with pytest.raises(WireDamaged, match="a tensor whose dim_order is none"):
        read(ext(9, "a", bytes(2**20)))


def test_more_items_than_the_limit_are_refused_before_they_are_made() -> None:
    with pytest.raises(LimitExceeded, match="more than 10 items"):
        read(pack([0] * 11), Limits(items=10))
    with pytest.raises(LimitExceeded, match="more than 10 items"):
        read(pack([[0] * 4] * 3), Limits(items=10))
    with pytest.raises(LimitExceeded, match="more than 10 items"):
        read(ext(1, *[0] * 11), Limits(items=10))


NODES = {
    "lists": b"\x90",
    "lists of a number": b"\x91\x01",
    "dicts": b"\x80",
    "tuples": b"\xc7\x00\x01",
    "dicts of pairs": b"\xc7\x00\x07",
    "tensors": b"\xd4\x08\xa0",
}


@pytest.mark.parametrize("name", NODES)
def test_more_lists_and_extensions_than_the_bytes_tell_of_are_refused_as_they_come(name: str) -> None:
    one, count = NODES[name], 400_000
    payload = b"\xdd" + count.to_bytes(4, "big") + one * count
    most = 20_000 + len(payload) // 4
    where = 5 + most * len(one)
    with pytest.raises(
        LimitExceeded, match=rf"more than {most} lists, dicts and extensions in {len(payload)} bytes"
    ) as at:
        read(payload)
    found = re.search(r"byte (\d+) of the payload", str(at.value))
    assert found is not None and where - 8 <= int(found[1]) <= where + 8 < len(payload), "it was read on"


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\xca\x00\x00\x00\x00",
        b"\xa2\xff\xfe",
        b"\x01\x01",
        b"\xcb\x00",
        ext(2),
        ext(2, raw(5)),
        ext(2, raw(*[0] * 9)),
        ext(2, raw(0, 0, *[255] * 8)),
        ext(3, raw(*[0] * 15)),
        ext(3, raw(*[0] * 17)),
        ext(8),
        ext(8, 1),
        ext(8, "a", "b"),
        ext(8, ["a"]),
        ext(4, "<f8"),
        ext(4, "<f8", b"1234567"),
        ext(4, "U", b"a"),
        ext(4, "S", "a"),
        ext(4, "|V8", b"12345678"),
        ext(4, "<U1", b"a\0\0\0"),
        ext(4, 7, b""),
        ext(4, "|b1", b"\x02"),
        ext(5),
        ext(5, "<f8", [2], b"12345678"),
        ext(5, "<f8", [-1], b""),
        ext(5, "<f8", [True], b"12345678"),
        ext(5, "<f8", [None], b"12345678"),
        ext(5, "<f8", [2**63], b""),
        ext(5, "<f8", [0, 2**62], b"")[:-1],
        ext(5, "<f8", 1, b"12345678"),
        ext(5, "<f8", [1], "12345678"),
        ext(5, "<f8", [1] * 65, b"12345678"),
        ext(5, "<f8", [1], b"12345678", 1),
        ext(5, "|b1", [2], b"\x01\x02"),
        ext(5, "<U1", [1], b"\xff\xff\xff\xff"),
        ext(5, ">U1", [1], b"\xff\x00\x00\x00"),
        ext(5, "|V0", [2**40], b""),
        ext(5, ["rec", 1, False, [["a", "|b1", 0]]], [1], b"\x07"),
        *(
            ext(6, spec)
            for spec in (
                None,
                1,
                "",
                "O",
                "|O",
                "|O8",
                "object",
                "f8,i4",
                "(9,)f8",
                "<f8 ",
                "<x4",
                "b1",
                "<f3",
                "<i16",
                "<f16",
                "<c32",
            )
        ),
        *(ext(6, spec) for spec in ("<U99999999999", "<M8[foo bar]", "\uff11", [], ["sub"], ["sub", "<f8", [-1]])),
        ext(6, ["rec", -1, False, []]),
        ext(6, ["rec", 8, False, [["a", "<f8"]]]),
        ext(6, ["rec", 8, False, [["a", "<f8", -1]]]),
        ext(6, ["rec", 8, False, [[1, "<f8", 0]]]),
        ext(6, ["rec", 8, False, [["a", "|O8", 0]]]),
    ],
)
def test_payloads_that_we_never_write_are_damaged(payload: bytes) -> None:
    with pytest.raises(WireDamaged):
        read(payload)


@pytest.mark.parametrize(
    "spec",
    [
        "<M8[foo]",
        "<m8[5Ys]",
        ["rec", 4, False, [["a", "<f8", 0]]],
        ["rec", 16, False, [["a", "<f8", 0], ["a", "<f8", 8]]],
        ["sub", "<f8", [2**30, 2**30]],
    ],
)
def test_dtypes_that_this_numpy_does_not_know_are_unsupported(spec: object) -> None:
    with pytest.raises(UnsupportedValue, match="knows no dtype"):
        read(ext(6, spec))


def test_a_dtype_nested_without_end_is_refused() -> None:
    spec: object = "<f8"
    for _ in range(9):
        spec = ["sub", spec, [1]]
    with pytest.raises(WireDamaged, match="nested deeper"):
        read(ext(6, spec))


def test_a_numpy_description_of_many_parts_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        read(ext(5, "<f8", [1] * 40_000, b""))


PAYLOADS = values.map(lambda value: dumps(value, kind=KIND, version=VERSION)[24 + len(KIND) : -16])


@given(PAYLOADS, st.data())
def test_a_mutated_payload_is_read_or_refused_by_a_typed_error(payload: bytes, data: st.DataObject) -> None:
    mutated = bytearray(payload)
    for _ in range(data.draw(st.integers(min_value=1, max_value=4))):
        at = data.draw(st.integers(min_value=0, max_value=len(mutated) - 1))
        mutated[at] = data.draw(st.integers(min_value=0, max_value=255))
    try:
        value = loads(sealed(bytes(mutated)), kind=KIND, supported=VERSION).value
    except WireError:
        return
    dumps(value, kind=KIND, version=VERSION, limits=Limits(depth=80))


@given(st.binary(min_size=1, max_size=40))
@example(b"\xdc\xff\xff")
@example(b"\xd8\x05" + b"\x00" * 16)
def test_random_payloads_are_read_or_refused_by_a_typed_error(payload: bytes) -> None:
    try:
        loads(sealed(payload), kind=KIND, supported=VERSION)
    except WireError:
        pass


@given(values)
def test_our_decoder_agrees_with_the_msgpack_library_on_what_both_read(value: object) -> None:
    """Differential: native values only, which the library reads without our extensions."""
    payload = dumps(value, kind=KIND, version=VERSION)[24 + len(KIND) : -16]
    theirs = msgpack.unpackb(payload, strict_map_key=False, ext_hook=lambda code, data: np.nan)
    ours = loads(sealed(payload), kind=KIND, supported=VERSION).value
    assert _natives(theirs) == _natives(ours)


def _natives(value: object) -> object:
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _natives(item) for key, item in value.items()}
    if type(value) is list:
        return [_natives(item) for item in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return "tagged"
    if value is None or type(value) in (bool, int, str, bytes):
        return value
    return "tagged" if type(value) is not float or math.isnan(value) else value


@pytest.mark.parametrize(
    "keys", [[n * (2**61 - 1) for n in range(99)], [(n * (2**61 - 1),) for n in range(99)]], ids=["numbers", "tuples"]
)
def test_keys_that_were_made_to_collide_are_refused_on_either_side(keys: list[object]) -> None:
    def packed(key: object) -> bytearray:
        return bytearray(payload_of(key))

    fits, over = keys[:64], keys[:65]
    assert len({hash(key) for key in over}) == 1
    assert read(ext(Tag.PAIRS, *(one for key in fits for one in (packed(key), None)))) == dict.fromkeys(fits)
    with pytest.raises(LimitExceeded, match="made to collide"):
        read(ext(Tag.PAIRS, *(one for key in over for one in (packed(key), None))))
    with pytest.raises(LimitExceeded, match="made to collide"):
        dumps(dict.fromkeys(over), kind=KIND, version=VERSION)
