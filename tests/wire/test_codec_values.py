"""What goes in comes out, to the type and the bit; what is outside the closed list is refused with its path."""

from __future__ import annotations

import enum
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import UnsupportedValue
from lakeckpt.wire.envelope import dumps, dumps_map, loads
from lakeckpt.wire.values import pack
from tests.wire.crafted import KIND, VERSION
from tests.wire.sameness import same
from tests.wire.strategies import values

Point = namedtuple("Point", "x y")


def again(value: object) -> Any:
    return loads(dumps(value, kind=KIND, version=VERSION), kind=KIND, supported=VERSION)


@given(values)
def test_every_value_of_the_closed_list_comes_back_as_it_was(value: object) -> None:
    assert same(value, again(value))


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9), values, max_size=5))
def test_a_dict_made_of_known_payloads_is_the_same_document(value: dict[str, Any]) -> None:
    made = dumps_map({key: pack(one) for key, one in value.items()}, kind=KIND, version=VERSION)
    assert made == dumps(value, kind=KIND, version=VERSION)


@given(values)
def test_equal_values_give_equal_bytes(value: object) -> None:
    assert dumps(value, kind=KIND, version=VERSION) == dumps(again(value), kind=KIND, version=VERSION)


@given(values)
def test_the_payload_is_msgpack_that_any_reader_can_walk(value: object) -> None:
    data = dumps(value, kind=KIND, version=VERSION)
    payload = data[24 + len(KIND) : -16]
    msgpack.unpackb(payload, strict_map_key=False)


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_a_float_keeps_every_bit_even_of_a_nan(bits: int) -> None:
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert struct.pack(">d", again([value])[0]) == struct.pack(">d", value)


@pytest.mark.parametrize("exponent", [31, 32, 62, 63, 64, 65, 127, 128, 20000])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_integers_of_any_size_keep_their_value(exponent: int, step: int) -> None:
    assert again([2**exponent + step, -(2**exponent) + step]) == [2**exponent + step, -(2**exponent) + step]


def test_a_bool_and_an_int_stay_apart() -> None:
    assert [type(x) for x in again([True, 1, False, 0])] == [bool, int, bool, int]
    assert [type(k) for k in again({True: "a", 2: "b"})] == [bool, int]


def test_random_states_of_python_and_numpy_come_back_whole() -> None:
    states = {"python": random.Random(1).getstate(), "numpy": np.random.RandomState(1).get_state()}
    found = again(states)
    assert same(states, found)
    twin, other = random.Random(), np.random.RandomState()
    twin.setstate(found["python"])
    other.set_state(found["numpy"])
    assert twin.random() == random.Random(1).random()
    assert other.rand() == np.random.RandomState(1).rand()
    for bits in (np.random.PCG64(1), np.random.Philox(1), np.random.SFC64(1), np.random.MT19937(1)):
        assert same(bits.state, again(bits.state))


def test_an_array_that_came_back_is_writable_and_shares_nothing() -> None:
    data = dumps(np.arange(5), kind=KIND, version=VERSION)
    first, second = (loads(data, kind=KIND, supported=VERSION) for _ in range(2))
    first[:] = 7
    assert second.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.broadcast_to(np.float32(2), (3, 2)),
        np.zeros((0, 3), dtype=">i2"),
        np.zeros((3, 0, 2**40), dtype="u1"),
        np.array(5, dtype="M8[ns]"),
        np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8", (2, 2)), ("c", "U3")], align=True)),
    ],
    ids=lambda a: f"{a.dtype.str}{a.shape}",
)
def test_arrays_of_any_layout_keep_dtype_shape_and_values(array: np.ndarray[Any, Any]) -> None:
    found = again([array])[0]
    assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


def test_a_dict_keeps_its_order_whatever_its_keys() -> None:
    assert list(again({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]
    assert list(again({3: 1, "a": 2, None: 3, (1, "x"): 4, b"k": 5, 0.5: 6})) == [3, "a", None, (1, "x"), b"k", 0.5]
    assert type(again(OrderedDict(a=1))) is dict


class _Colour(enum.IntEnum):
    RED = 1


class _Text(str):
    pass


class _Items(list[int]):
    pass


class _Matrix(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    "leaf",
    [
        {1, 2},
        frozenset(),
        Point(1, 2),
        _Colour.RED,
        _Text("a"),
        _Items([1]),
        defaultdict(int),
        Counter(),
        bytearray(b"a"),
        memoryview(b"a"),
        object(),
        print,
        int,
        range(3),
        np.array([None]),
        np.array(["a"], dtype=np.dtypes.StringDType()),
        np.zeros(2, "V0"),
        np.zeros(2).view(_Matrix),
        np.zeros(1, [("a", "i4")])[0],
        np.dtype("O"),
        np.dtype({"names": ["b", "a"], "formats": ["i4", "?"], "offsets": [8, 0], "itemsize": 20}),
        np.dtype("i4", metadata={"a": 1}),
        "\udc80",
    ],
    ids=lambda leaf: f"{type(leaf).__name__}-{str(leaf)[:12]!a}",
)
def test_a_value_outside_the_closed_list_is_refused_with_its_path(leaf: object) -> None:
    value = {"state": [{"x y": (1, {7: leaf})}]}
    with pytest.raises(UnsupportedValue, match=r"optimizer\.state\[0\]\['x y'\]\[1\]\[7\]: "):
        dumps(value, kind=KIND, version=VERSION, root="optimizer")


def test_torch_values_are_refused_with_their_type() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.zeros(2), torch.Size([1, 2]), torch.float32, torch.device("cpu")):
        with pytest.raises(UnsupportedValue, match=r"^m\.w: <class 'torch"):
            dumps({"w": value}, kind=KIND, version=VERSION, root="m")


def test_a_bad_key_is_refused_with_the_path_of_its_dict() -> None:
    with pytest.raises(UnsupportedValue, match=r"a\[0\]: the key frozenset\(\): .*frozenset"):
        dumps({"a": [{frozenset(): 1}]}, kind=KIND, version=VERSION)


@pytest.mark.parametrize("wrap", [lambda loop: loop.append(loop), lambda loop: loop.append((loop,))])
def test_a_value_that_holds_itself_is_refused(wrap: Any) -> None:
    loop: list[object] = []
    wrap(loop)
    with pytest.raises(UnsupportedValue, match=r"^model is nested too deep"):
        dumps(loop, kind=KIND, version=VERSION, root="model")
