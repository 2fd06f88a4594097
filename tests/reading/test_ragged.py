from __future__ import annotations

import numpy as np
import pytest

from lakeckpt.reading.columns.ragged import Ragged, slice_column, to_pylist


def words(*texts: str) -> Ragged[np.ndarray]:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)])
    return Ragged(values=np.frombuffer(b"".join(encoded), np.uint8), offsets=offsets, kind="str")


def test_rows_of_text_are_str_and_of_bytes_are_bytes() -> None:
    text = words("héé", "", "ß")
    assert [text[i] for i in range(3)] == list(text) == text.tolist() == ["héé", "", "ß"]
    assert text[-1] == "ß"
    binary = Ragged(values=text.values, offsets=text.offsets, kind="bytes")
    assert binary[0] == "héé".encode()
    assert binary.tolist() == ["héé".encode(), b"", "ß".encode()]


def test_slices_are_ragged_columns_that_share_their_contents() -> None:
    text = words("ab", "c", "def", "")
    middle = text[1:3]
    assert middle.offsets.tolist() == [0, 1, 4]
    assert middle.tolist() == ["c", "def"]
    assert np.shares_memory(middle.values, text.values)
    assert len(text[3:1]) == 0 and text[3:1].tolist() == []
    with pytest.raises(ValueError, match="steps of 1 only, got 2"):
        text[::2]


@pytest.mark.parametrize("row", [2, -3])
def test_a_row_outside_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of a column of 2 rows"):
        words("a", "b")[row]


def test_rows_of_lists_are_columns() -> None:
    numbers = Ragged(values=np.arange(4), offsets=np.array([0, 1, 4]))
    assert numbers[1].tolist() == [1, 2, 3]
    lists = Ragged(values=numbers, offsets=np.array([0, 0, 2]))
    assert lists.tolist() == [[], [[0], [1, 2, 3]]]
    assert lists[1].tolist() == [[0], [1, 2, 3]]
    structs = Ragged(values={"a": np.arange(3), "b": words("x", "y", "z")}, offsets=np.array([0, 2, 3]))
    assert structs[1]["b"].tolist() == ["z"]
    assert structs.tolist()[0] == [{"a": 0, "b": "x"}, {"a": 1, "b": "y"}]


def test_masks_travel_with_slices_and_maps() -> None:
    column = Ragged(
        values=np.array([1, 0, 3]),
        offsets=np.array([0, 2, 3]),
        masks={"values.is_null": np.array([False, True, False])},
    )
    assert column.tolist() == [[1, None], [3]]
    assert column[0:1].tolist() == [[1, None]]
    assert column.map_arrays(lambda array: array.copy()).tolist() == [[1, None], [3]]
    assert column.map_arrays(list).masks == {"values.is_null": [False, True, False]}


def test_slice_column_reaches_into_structs() -> None:
    column = {"a": np.arange(4), "b": words("w", "x", "y", "z")}
    assert to_pylist({"s": slice_column(column, 1, 3)}, "s") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_ill_formed_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="'list', 'str' or 'bytes', got 'text'"):
        Ragged(values=np.zeros(0), offsets=np.zeros(1, np.int64), kind="text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one entry more"):
        Ragged(values=np.zeros(0), offsets=np.zeros(0, np.int64))


def test_what_pins_and_moves_batches_reaches_every_array_and_leaves_alone_what_is_none_of_theirs() -> None:
    class Tensor(np.ndarray):  # type: ignore[type-arg]
        def pin_memory(self) -> str:
            return f"pinned {self.tolist()}"

        def to(self, device: str, *, non_blocking: bool) -> tuple[str, bool, list[int]]:
            return device, non_blocking, self.tolist()

    values, offsets, mask = np.arange(3), np.array([0, 1, 3]), np.zeros(3, bool)
    plain = Ragged(values=values, offsets=offsets, masks={"values.is_null": mask})
    ragged = plain.map_arrays(lambda array: array.view(Tensor))
    pinned, moved = ragged.pin_memory(), ragged.to("there", non_blocking=True)
    assert (pinned.values, pinned.offsets) == ("pinned [0, 1, 2]", "pinned [0, 1, 3]")
    assert dict(pinned.masks) == {"values.is_null": "pinned [False, False, False]"}
    assert moved.values == ("there", True, [0, 1, 2]) and moved.offsets == ("there", True, [0, 1, 3])
    assert plain.pin_memory().values is values and plain.to("there").offsets is offsets
