"""A pickle is described, never run: what it names stays a name, and what is made to explode stays small."""

from __future__ import annotations

import collections
import pickle
import pickletools
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.checkpoint.foreign.pickles import Call, Name, describe
from lakeckpt.checkpoint.foreign.plain import plain
from lakeckpt.errors import LimitExceeded, UnsupportedValue, WireDamaged, WireError

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary(max_size=9)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner)
        | st.sets(st.integers(), max_size=4)
        | st.frozensets(st.text(max_size=2), max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(value=VALUES, protocol=st.integers(0, 5))
def test_plain_values_come_out_as_unpickling_would_make_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    found = plain(describe(data), size_bytes=len(data))
    assert found == value and same_types(found, pickle.loads(data))


def same_types(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return type(one) is type(other) and all(same_types(one[key], other[key]) for key in other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same_types, one, other))
    return type(one) is type(other)


@given(data=st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: b"\x80\x04" + data + b"."))
def test_any_bytes_are_a_value_or_a_typed_error(data: bytes) -> None:
    try:
        plain(describe(data), size_bytes=len(data))
    except WireError:
        pass


@given(value=VALUES, data=st.data())
def test_a_changed_pickle_is_a_value_or_a_typed_error(value: Any, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        plain(describe(bytes(whole)), size_bytes=len(whole))
    except WireError:
        pass


class Imports:
    """Every import from here on is an error."""

    def find_spec(self, name: str, *_: Any) -> None:
        raise AssertionError(f"{name} was looked for")


def test_what_a_pickle_names_is_neither_imported_nor_called(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x80\x04\x8c\x0bno_such_mod\x8c\x04boom\x93\x8c\x03arg\x85R}\x8c\x01kK\x01sb."
    assert "STACK_GLOBAL" in [opcode.name for opcode, _, _ in pickletools.genops(data)]
    monkeypatch.setattr(sys, "meta_path", [Imports()])
    found = describe(data)
    assert isinstance(found, Call) and found.function == Name(module="no_such_mod", name="boom")
    assert found.arguments == ("arg",) and found.states == [{"k": 1}]
    with pytest.raises(UnsupportedValue, match=r"could make a no_such_mod\.boom, and pickles are never run"):
        plain(found, size_bytes=len(data))


def laughs(levels: int) -> bytes:
    """Lists of two references to the list before, ``levels`` deep: 2**levels values when written out."""
    body = b"]\x94"
    for level in range(levels):
        body += b"]\x94(h" + bytes([level]) + b"h" + bytes([level]) + b"e"
    return b"\x80\x04" + body + b"."


BOMBS = {
    "billion laughs": laughs(60),
    "deep lists": b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "deep tuples": b"\x80\x04)" + b"\x85" * 50_000 + b".",
    "a deep tuple as a key": b"\x80\x04})" + b"\x85" * 50_000 + b"K\x01s.",
    "a list that holds itself": b"\x80\x04]\x94h\x00a.",
    "a text of terabytes": b"\x80\x04\x8d" + (2**42).to_bytes(8, "little") + b"x.",
    "an int of many digits": b"I" + b"9" * 20_000 + b"\n.",
    "a call of a call": b"cos\nsystem\n(S'true'\ntR(S'x'\ntR.",
    "an instance": b"(S'true'\nios\nsystem\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "no end": b"\x80\x04]",
    "a persistent name": b"Pabc\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_pickles_made_to_explode_are_refused_in_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((WireDamaged, UnsupportedValue, LimitExceeded)):
            plain(describe(BOMBS[name]), size_bytes=len(BOMBS[name]))
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
