"""A pickle is described, never run: what it names stays a name, and what is made to explode stays small."""

from __future__ import annotations

import collections
import gc
import pickle
import pickletools
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import read_state
from lakeckpt.checkpoint.foreign import pickles
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


CONTAINERS = {
    "tuples": b")" + b"\x85" * 300,
    "tuples above marks": b"(" * 257,
    "tuples above marks that are made": b"(" * 200 + b")" + b"\x85" * 100 + b"t" * 200,
    "lists": b"]" * 300 + b"a" * 299,
    "dicts": b"}K\x01" * 300 + b"}" + b"s" * 300,
    "arguments": b"cbuiltins\nlist\n" * 300 + b")" + b"R\x85" * 300,
    "states": (b"cbuiltins\nlist\n)R" * 300) + b"b" * 299,
    "a persistent name": b")" + b"Q" * 300,
    "known again from the memo": b")\x85\x94" + b"\x85" * 200 + b"q\x010h\x01" + b"\x85" * 100,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_too_deep_is_refused_when_it_is_put_there_not_at_the_end(name: str) -> None:
    with pytest.raises(LimitExceeded, match="more than 256 containers"):
        describe(b"\x80\x04" + CONTAINERS[name])  # it has no end: read so far, it would be damaged


MADE = {
    "lists": b"]\x94",
    "dicts": b"}\x94",
    "sets": b"\x8f\x94",
    "tuples": b")\x85",
    "frozen sets": b"(\x91",
    "tuples above marks": b"(t",
    "lists above marks": b"(l",
    "dicts above marks": b"(d",
    "persistent names": b"NQ",
}


@pytest.mark.parametrize("name", MADE)
def test_a_pickle_that_makes_more_than_its_bytes_tell_of_is_refused_as_it_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, one, count = b"\x80\x04", MADE[name], 60_000
    followed = 0
    make = pickles._Machine.make

    def counted(machine: Any, value: Any, depth: int = 0) -> None:
        nonlocal followed
        followed += 1
        make(machine, value, depth)

    monkeypatch.setattr(pickles._Machine, "make", counted)
    data = begin + one * count
    most = 5_000 + len(data) // 4
    with pytest.raises(LimitExceeded, match=rf"makes more than {most} containers and calls of its {len(data)} bytes"):
        describe(data)
    assert followed == most + 1 < count


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_state_of_many_small_things_is_within_what_a_pickle_may_make(protocol: int) -> None:
    values = {"pairs": [(at, at + 1) for at in range(30_000)], "states": {at: {"step": [at]} for at in range(30_000)}}
    data = pickle.dumps(values, protocol=protocol)
    assert plain(describe(data), size_bytes=len(data)) == values


def test_the_collector_does_not_look_at_all_that_the_process_holds_while_a_pickle_is_described() -> None:
    seen: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    opened = b"\x80\x04" + b"]\x94" * 9_000
    for data, error in [(opened + b"a" * 300, LimitExceeded), (opened, WireDamaged), (b"(" * 50_000, LimitExceeded)]:
        with pytest.raises(error):
            describe(data)
        assert gc.isenabled()
    gc.callbacks.remove(note)
    gc.disable()
    try:
        describe(b"N.")
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert len(seen) < 20, "a collection for every few hundred lists, each of which may look at everything"


def pairs(keys: list[Any]) -> bytes:
    """An ``OrderedDict`` made of a list of pairs, as old pickles have them."""
    body = pickle.dumps([[key, None] for key in keys], protocol=2)[2:-1]
    return b"\x80\x02ccollections\nOrderedDict\n" + body + b"\x85R."


def members(kind: str, keys: list[Any]) -> bytes:
    """A set that is made of a list."""
    return b"\x80\x02cbuiltins\n" + kind.encode() + b"\n" + pickle.dumps(keys, protocol=2)[2:-1] + b"\x85R."


@pytest.mark.parametrize("keys", [[(2**61 - 1) * n for n in range(99)], [((2**61 - 1) * n, "") for n in range(99)]])
def test_keys_that_were_made_to_collide_are_refused(keys: list[Any]) -> None:
    written = [pickle.dumps(one, protocol=4) for one in (dict.fromkeys(keys), set(keys), frozenset(keys))]
    for data in [*written, pairs(keys), members("set", keys), members("frozenset", keys)]:
        with pytest.raises(LimitExceeded, match="made to collide"):
            plain(describe(data), size_bytes=len(data))


def test_an_array_is_made_of_the_bytes_that_are_there_and_not_of_a_number_of_them() -> None:
    names = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1K\x00K\x01\x87R"
    count = 2**29
    state = b"(K\x01J" + count.to_bytes(4, "little") + b"\x85" + dtype + b"\x89J" + count.to_bytes(4, "little") + b"tb."
    tracemalloc.start()
    try:
        with pytest.raises(WireDamaged, match="bytes are made of a int"):
            plain(describe(b"\x80\x03" + names + state), size_bytes=10**9)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("made", [torch.conj, lambda x: x.conj().imag, lambda x: x.imag, torch.abs])
def test_numbers_whose_signs_torch_keeps_aside_are_what_torch_says(tmp_path: Path, made: Any) -> None:
    value = made(torch.tensor([1 + 2j, 3 - 4j]))
    torch.save({"w": value}, tmp_path / "w.pt")
    dcp.save({"w": value}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for place in ("w.pt", "dcp"):
        found = read_state(tmp_path / place)["w"]
        assert found.tolist() == value.tolist() and found.dtype == value.dtype


def test_a_text_with_an_escape_that_is_none_is_damage() -> None:
    with pytest.raises(WireDamaged):
        describe(b"\x80\x02c" + b"a\\Kb\nc\n" + b".")
